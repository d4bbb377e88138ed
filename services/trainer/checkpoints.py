"""A job's checkpoints on disk: where they lie, which one to resume from, which ones to keep."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from libs.common import manifest

PREFIX = "step-"


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
