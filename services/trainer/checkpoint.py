"""Checkpoints that are complete or invisible.

A checkpoint is written into a directory beside its own, fsynced, described by a manifest with every file's size and sha256,
and renamed into place. Whatever happens before the rename leaves earlier checkpoints as they were; loading verifies every
file against the manifest before anything of it is used.
"""

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from libs.common.errors import JigsawError

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.msgpack"


class _File(msgspec.Struct, frozen=True):
    size: int
    sha256: str


class _Manifest(msgspec.Struct, frozen=True):
    format: int
    files: dict[str, _File]


class Checkpoint(msgspec.Struct, frozen=True):
    """What a checkpoint holds: named sets of tensors, and plain data (msgpack's types; tuples come back as lists)."""

    tensors: dict[str, dict[str, torch.Tensor]]
    state: dict[str, Any]


def save(directory: Path, *, tensors: Mapping[str, Mapping[str, torch.Tensor]], state: Mapping[str, Any]) -> None:
    """Write a checkpoint; when this returns, it is durable at ``directory`` and replaces what was there.

    Raises:
        JigsawError: it can't be written, for example because the disk is full; what was there is intact.
    """
    partial, replaced = _beside(directory, "partial"), _beside(directory, "replaced")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, group in tensors.items():
            save_file(dict(group), partial / f"{name}.safetensors")
        (partial / STATE).write_bytes(msgspec.msgpack.encode(state))
        files = {path.name: _describe(path) for path in sorted(partial.iterdir())}
        (partial / MANIFEST).write_bytes(msgspec.json.encode(_Manifest(format=FORMAT, files=files)))
        for path in (*partial.iterdir(), partial):
            _sync(path)
        if directory.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            directory.rename(replaced)
        partial.rename(directory)
        _sync(directory.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise JigsawError(f"checkpoint {directory} can't be written: {error}") from error
    shutil.rmtree(replaced, ignore_errors=True)


def load(directory: Path) -> Checkpoint:
    """Verify a checkpoint and read it.

    Raises:
        JigsawError: there is none, or a file of it is missing, changed or unreadable.
    """
    replaced = _beside(directory, "replaced")
    if not directory.exists() and replaced.exists():
        replaced.rename(directory)  # a writer was killed between its two renames
    try:
        manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=_Manifest)
        if manifest.format != FORMAT:
            raise JigsawError(f"checkpoint {directory}: format {manifest.format}, but this version reads {FORMAT}")
        for name, expected in manifest.files.items():
            if _describe(directory / name) != expected:
                raise JigsawError(f"checkpoint {directory}: {name} isn't what was written")
        sets = [Path(name) for name in manifest.files if name.endswith(".safetensors")]
        return Checkpoint(
            tensors={path.stem: load_file(directory / path) for path in sets},
            state=msgspec.msgpack.decode((directory / STATE).read_bytes()),
        )
    except (OSError, SafetensorError, msgspec.DecodeError) as error:
        raise JigsawError(f"checkpoint {directory} can't be read: {error}") from error


def _beside(directory: Path, role: str) -> Path:
    """A hidden sibling of the directory, on the same file system."""
    return directory.with_name(f".{directory.name}.{role}")


def _describe(path: Path) -> _File:
    """The file's size and digest, as read back."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return _File(size=path.stat().st_size, sha256=digest)


def _sync(path: Path) -> None:
    """Make a file's or a directory's content durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
