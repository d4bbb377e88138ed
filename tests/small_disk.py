"""A disk so small that a test can fill it."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BLOCK = 4096


class SmallDisk:
    """A file system of its own at ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def fill(self, *, but_kb: int = 0) -> None:
        """Take all the room there is, but for a few KB."""
        with self._ballast.open("ab", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(bytes(16 * BLOCK))
            except OSError:
                ballast.truncate(max(0, self._ballast.stat().st_size - but_kb * 1024))

    def make_room(self) -> None:
        """Give everything back."""
        self._ballast.unlink()


@contextmanager
def small_disk(path: Path, *, size_mb: int) -> Iterator[SmallDisk]:
    """Mount one; the test is skipped where that isn't allowed."""
    path.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"a disk of its own can't be mounted here: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
