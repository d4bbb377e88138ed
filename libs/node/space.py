"""Whether a disk has the room that something is going to need: better refused now than failed in the middle."""

import shutil
from pathlib import Path

from libs.common.errors import NodeError


def require_space(folder: Path, needed_mb: int, *, purpose: str) -> None:
    """Make sure that ``needed_mb`` MB are free where ``folder`` is, or is going to be.

    Raises:
        NodeError: they aren't.
    """
    if (free_mb := free_space_mb(folder)) < needed_mb:
        raise NodeError(f"{folder}: {purpose} needs {needed_mb} MB of disk, {free_mb} MB are free")


def free_space_mb(folder: Path) -> int:
    """MB that are free where ``folder`` is, or is going to be."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(there).free >> 20
