"""A directory that is complete or invisible: written aside, listed in a manifest, renamed into place.

The manifest names every file with size and sha256; its own digest names the directory's content. Policy versions and
checkpoints are such directories.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from libs.common.errors import JigsawError

MANIFEST = "manifest.json"


class FileEntry(msgspec.Struct, frozen=True):
    """One file: size in bytes and sha256 in hex."""

    size: int
    sha256: str


@contextmanager
def complete_or_invisible(target: Path, *, durable: bool) -> Iterator[Path]:
    """A temporary directory to write into, which becomes ``target`` with a manifest when the block ends well.

    Raises:
        JigsawError: no space or not writable; the temporary directory is gone and ``target`` untouched.
    """
    partial = prepare(target)
    try:
        yield partial
        complete(target, durable=durable)
    except OSError as error:
        raise _unwritable(target, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def prepare(target: Path, *, writer: str = "") -> Path:
    """An empty directory to write into before :func:`complete`; what an earlier try left there is gone.

    Args:
        writer: its name, where several may write the same target: each has a directory of its own.

    Raises:
        JigsawError: it can't be made.
    """
    partial = _partial(target, writer)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise _unwritable(target, error) from error
    return partial


def complete(target: Path, *, durable: bool, writer: str = "") -> None:
    """Make what was written into the prepared directory visible as ``target``.

    Args:
        target: what is there already is replaced; a kill in that instant leaves it beside (see :func:`recover`).
        durable: fsync everything before the rename, so that it survives a power cut.
        writer: as for :func:`prepare`.

    Raises:
        JigsawError: no space or not writable; ``target`` is untouched.
    """
    partial, replaced = _partial(target, writer), _beside(target, "replaced")
    try:
        _write_manifest(partial)
        if durable:
            for path in [*partial.iterdir(), partial]:
                _sync(path)
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        partial.rename(target)
        if durable:
            _sync(target.parent)
    except OSError as error:
        raise _unwritable(target, error) from error
    shutil.rmtree(replaced, ignore_errors=True)


def recover(target: Path) -> None:
    """Put back a directory whose replacement was cut short between its two renames."""
    replaced = _beside(target, "replaced")
    if not target.exists() and replaced.exists():
        replaced.rename(target)


def partials(folder: Path) -> Iterator[Path]:
    """What is being written, or was left half-written, as part of a folder."""
    return folder.glob(".*.partial")


def digest(directory: Path) -> str:
    """The sha256 of a directory's manifest, which stands for its whole content.

    Raises:
        JigsawError: it has no manifest, so it isn't complete.
    """
    try:
        return hashlib.sha256((directory / MANIFEST).read_bytes()).hexdigest()
    except OSError:
        raise JigsawError(f"{directory} is not complete: it has no {MANIFEST}") from None


def verify(directory: Path, *, contents: bool) -> None:
    """Check a directory against its manifest: sizes always, sha256 if ``contents``.

    Raises:
        JigsawError: naming the first file that is missing or differs.
    """
    try:
        entries = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=dict[str, FileEntry])
    except (OSError, msgspec.MsgspecError):
        raise JigsawError(f"{directory} is not complete: its {MANIFEST} is missing or unreadable") from None
    for name, entry in entries.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != entry.size:
            raise JigsawError(f"{path} is missing or has the wrong size")
        if contents and _sha256(path) != entry.sha256:
            raise JigsawError(f"{path} is damaged: its sha256 differs from the manifest")


def _unwritable(target: Path, error: OSError) -> JigsawError:
    return JigsawError(f"{target} can't be written: {error.strerror or error}")


def _partial(target: Path, writer: str) -> Path:
    return _beside(target, f"{writer}.partial" if writer else "partial")


def _beside(directory: Path, role: str) -> Path:
    """A hidden sibling of the directory, on the same file system."""
    return directory.with_name(f".{directory.name}.{role}")


def _write_manifest(directory: Path) -> None:
    files = sorted(path for path in directory.iterdir() if path.is_file())
    entries = {path.name: FileEntry(path.stat().st_size, _sha256(path)) for path in files}
    (directory / MANIFEST).write_bytes(msgspec.json.encode(entries))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
