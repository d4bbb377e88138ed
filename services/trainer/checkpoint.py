"""Checkpoints: named sets of tensors and plain data, in a directory that is complete or invisible.

How a directory becomes visible, and what survives a kill or a full disk, is :mod:`libs.common.manifest`'s; loading verifies
every file against the manifest before anything of it is used.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from libs.common import manifest
from libs.common.errors import JigsawError
from services.trainer.resume import STATE, read_state


class Checkpoint(msgspec.Struct, frozen=True):
    """What a checkpoint holds: named sets of tensors, and plain data (msgpack's types; tuples come back as lists)."""

    tensors: dict[str, dict[str, torch.Tensor]]
    state: dict[str, Any]


def save(
    directory: Path,
    *,
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    state: Mapping[str, Any],
    companions: Callable[[Path], None] | None = None,
) -> None:
    """Write a checkpoint; when this returns, it is durable at ``directory`` and replaces what was there.

    Args:
        companions: writes further files into the directory.

    Raises:
        JigsawError: it can't be written, for example because the disk is full; what was there is intact.
    """
    with manifest.complete_or_invisible(directory, durable=True) as partial:
        try:
            for name, group in tensors.items():
                save_file(dict(group), partial / f"{name}.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:  # how it reports a full disk
            raise OSError(str(error)) from error
        (partial / STATE).write_bytes(msgspec.msgpack.encode(state))
        if companions is not None:
            companions(partial)


def load(directory: Path) -> Checkpoint:
    """Verify a checkpoint and read it.

    Raises:
        JigsawError: there is none, or a file of it is missing, changed or unreadable.
    """
    state = read_state(directory)
    try:
        return Checkpoint(
            tensors={path.stem: load_file(path) for path in sorted(directory.glob("*.safetensors"))}, state=state
        )
    except (OSError, SafetensorError) as error:
        raise JigsawError(f"{directory} can't be read: {error}") from error
