"""Valkey's append-only file, and what a power cut makes of it."""

import random
import time
from collections import deque
from pathlib import Path

import anyio
import msgspec

LOOK_S = 0.1
UNSAFE_S = 1.0
"""What was written longer ago is on the disk, with ``appendfsync everysec``."""


class _Look(msgspec.Struct, frozen=True):
    """How long a file was at a time."""

    at_s: float
    path: Path
    size: int


class AppendLog:
    """The file that the server appends to; how long it has been in the last second is known.

    Args:
        folder: where the server keeps its parts.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._looks = deque[_Look](maxlen=round(1.5 * UNSAFE_S / LOOK_S))

    async def keep_looking(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            self.look(time.monotonic())
            await anyio.sleep(LOOK_S)

    def look(self, now: float) -> None:
        """Note how long it is."""
        if path := self._newest():
            self._looks.append(_Look(now, path, path.stat().st_size))

    def tear(self, *, before: float, draw: random.Random) -> float:
        """Cut off some of what was written in the last second before a time, while the server isn't running.

        Returns:
            Nothing is lost that was written before this time. Times are of ``time.monotonic``, in seconds.
        """
        path, since = self._newest(), before - UNSAFE_S
        assert path is not None, f"there is no log in {self._folder}"
        size = path.stat().st_size
        first = min((look.size for look in self._looks if look.path == path and look.at_s >= since), default=size)
        with path.open("r+b") as file:
            file.truncate(draw.randint(first, size))
        return since

    def _newest(self) -> Path | None:
        """The part that is appended to; None while there is none."""
        parts = self._folder.glob("*.incr.aof")
        return max(parts, key=lambda path: int(path.name.split(".")[-3]), default=None)
