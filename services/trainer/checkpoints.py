"""A job's checkpoints on disk: where they lie, which one to resume from, which ones to keep. Imports nothing heavy."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from libs.common import manifest
from libs.common.errors import JigsawError

PREFIX = "step-"
STATE = "state.msgpack"

C = TypeVar("C")


class Kept(msgspec.Struct, frozen=True):
    """A checkpoint and the reward by which it is judged (mean held-out reward, or training reward without evaluation)."""

    step: int
    reward: float | None


class Checkpoints:
    """The checkpoints of one job; its methods work on files.

    Args:
        folder: holds ``step-000010`` and so on.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, step: int) -> Path:
        """Where the checkpoint after ``step`` steps lies."""
        return self._folder / f"{PREFIX}{step:06d}"

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first; one that was left half-written isn't visible."""
        if not self._folder.is_dir():
            return []
        return sorted(int(path.name.removeprefix(PREFIX)) for path in self._folder.glob(f"{PREFIX}[0-9]*") if path.is_dir())

    def newest_first(self) -> list[Path]:
        """All complete ones, in the order in which to try to resume from them."""
        return [self.path(step) for step in reversed(self.steps())]

    def verify(self, step: int) -> None:
        """Read a checkpoint back.

        Raises:
            JigsawError: it isn't what was written.
        """
        manifest.verify(self.path(step), contents=True)

    def prune(self, rewards: dict[int, float], *, keep_last: int, keep_best: int) -> None:
        """Delete what isn't kept. Called once the newest has been verified."""
        kept = [Kept(step, rewards.get(step)) for step in self.steps()]
        for step in droppable(kept, keep_last=keep_last, keep_best=keep_best):
            shutil.rmtree(self.path(step))


def droppable(kept: Sequence[Kept], *, keep_last: int, keep_best: int) -> list[int]:
    """Steps whose checkpoints may go: neither among the newest nor among the best. Equals: the earlier one is better."""
    newest = {item.step for item in sorted(kept, key=lambda item: item.step)[-keep_last:]}
    judged = sorted((item for item in kept if item.reward is not None), key=lambda item: (-(item.reward or 0.0), item.step))
    best = {item.step for item in judged[:keep_best]}
    return [item.step for item in kept if item.step not in newest | best]


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
