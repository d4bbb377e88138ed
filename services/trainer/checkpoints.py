"""A job's checkpoints on disk: where they lie, which one to resume from, which ones to keep.

A checkpoint is named after its step and the incarnation of the trainer that wrote it. No file system can be made to refuse
a trainer that was frozen in the middle of writing and replaced: but what it writes when it wakes up has a name of its own,
and is older than anything of its successor's.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

from libs.common import manifest
from libs.common.tokens import PolicyVersion

PREFIX = "step-"


class Kept(msgspec.Struct, frozen=True):
    """A checkpoint and the reward by which it is judged (mean held-out reward, or training reward without evaluation)."""

    version: PolicyVersion
    reward: float | None


class Checkpoints:
    """The checkpoints of one job; its methods work on files.

    Args:
        folder: holds ``step-000010.1`` (after 10 steps, by the job's first trainer) and so on.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of(cls, job_folder: Path) -> Self:
        """Those of the job that has this folder."""
        return cls(job_folder / "checkpoints")

    def path(self, version: PolicyVersion) -> Path:
        """Where the checkpoint of a policy lies."""
        return self._folder / f"{PREFIX}{version.step:06d}.{version.incarnation}"

    def versions(self) -> list[PolicyVersion]:
        """The policies with a complete checkpoint, oldest first; one that was left half-written isn't visible."""
        found = (PolicyVersion.parse(path.name.removeprefix(PREFIX)) for path in self._folder.glob(f"{PREFIX}*"))
        return sorted((version for version in found if version is not None), key=lambda version: version.age)

    def newest_first(self) -> list[Path]:
        """All complete ones, in the order in which to try to resume from them."""
        return [self.path(version) for version in reversed(self.versions())]

    def verify(self, version: PolicyVersion) -> None:
        """Read a checkpoint back.

        Raises:
            JigsawError: it isn't what was written.
        """
        manifest.verify(self.path(version), contents=True)

    def prune(self, rewards: dict[int, float], *, incarnation: int, keep_last: int, keep_best: int) -> None:
        """Delete what isn't kept of what ``incarnation`` and those before it wrote; later ones are a successor's.

        Called once the newest has been verified.
        """
        mine = [version for version in self.versions() if version.incarnation <= incarnation]
        kept = [Kept(version, rewards.get(version.step)) for version in mine]
        for version in droppable(kept, keep_last=keep_last, keep_best=keep_best):
            shutil.rmtree(self.path(version), ignore_errors=True)  # a successor may be deleting it, too


def droppable(kept: Sequence[Kept], *, keep_last: int, keep_best: int) -> list[PolicyVersion]:
    """Policies whose checkpoints may go: neither among the newest nor among the best.

    Equals: the earlier step is better; of one step's, the later incarnation's.
    """

    def badness(item: Kept) -> tuple[float, int, int]:
        return -(item.reward or 0.0), item.version.step, -item.version.incarnation

    newest = {item.version for item in sorted(kept, key=lambda item: item.version.age)[-keep_last:]}
    best = {item.version for item in sorted((item for item in kept if item.reward is not None), key=badness)[:keep_best]}
    return [item.version for item in kept if item.version not in newest | best]
