"""Taking up a job from its checkpoints: the first that is whole. Imports nothing heavy."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from libs.common import manifest
from libs.common.errors import JigsawError

STATE = "state.msgpack"

C = TypeVar("C")


class Found(msgspec.Struct, Generic[C], frozen=True):
    """What there is to resume from: nothing, or the first whole checkpoint, and why those before it weren't used."""

    directory: Path | None = None
    checkpoint: C | None = None
    passed_over: tuple[str, ...] = ()


def load_first(directories: Sequence[Path], load: Callable[[Path], C]) -> Found[C]:
    """Read the first checkpoint that is whole: the first that ``load`` doesn't refuse with a JigsawError.

    Raises:
        JigsawError: there are some, and none is: beginning anew would train again what was trained.
    """
    passed_over: list[str] = []
    for directory in directories:
        try:
            return Found(directory, load(directory), tuple(passed_over))
        except JigsawError as error:
            passed_over.append(str(error))
    if passed_over:
        raise JigsawError(f"no checkpoint can be used: {'; '.join(passed_over)}")
    return Found()


def read_state(directory: Path) -> dict[str, Any]:
    """Verify a checkpoint, all its files included, and read its plain data.

    Raises:
        JigsawError: there is none, or a file of it is missing, changed or unreadable.
    """
    manifest.recover(directory)
    manifest.verify(directory, contents=True)
    try:
        state: dict[str, Any] = msgspec.msgpack.decode((directory / STATE).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise JigsawError(f"{directory} can't be read: {error}") from error
    return state
