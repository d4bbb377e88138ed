"""A step's rollout: its groups go out under the policy in force and come back settled, all of them before any is trained on.

So a job is synchronous: nothing of a later step is issued before this one has been trained.
"""

from collections.abc import Callable, Sequence

import msgspec

from libs.common.job import Job
from libs.common.pulling import Puller
from libs.common.tokens import PolicyVersion
from libs.common.trajectory import Record, TrajectoryId
from services.trainer.gather import Gatherer
from services.trainer.job_data import JobData
from services.trainer.steps import StepLedger


class Gathered(msgspec.Struct, frozen=True):
    """What has come back of a step; every record is in a terminal state.

    Attributes:
        training: by group, in order of issue. evaluated: held-out samples.
        valid: the training groups that have enough scored samples to learn from.
    """

    training: list[list[Record]]
    evaluated: list[Record]
    valid: frozenset[int]

    @property
    def trained(self) -> list[Record]:
        """The training records, group after group."""
        return [record for group in self.training for record in group]

    @property
    def ids(self) -> list[TrajectoryId]:
        """Of everything."""
        return [record.spec.id for record in (*self.trained, *self.evaluated)]


class StepRollout:
    """The rollouts of one life of a job's step loop.

    Args:
        settled: word of trajectories that are settled. on_progress: called when something has come back.
    """

    def __init__(
        self, job: Job, *, data: JobData, gatherer: Gatherer, settled: Puller, on_progress: Callable[[], None]
    ) -> None:
        self._job, self.data, self._gatherer = job, data, gatherer
        self._settled, self._on_progress = settled, on_progress
        self._ledger = self._new_ledger(0)

    def counts(self, step: int) -> tuple[int, int]:
        """(settled, expected) samples of a step; nothing of one that hasn't begun."""
        return self._ledger.counts if self._ledger.step == step else (0, 0)

    async def gather(self, step: int, policy: PolicyVersion, *, train: bool, evaluate: bool) -> Gathered:
        """Roll out the next groups to train on, and all held-out prompts, under a policy.

        Raises:
            Superseded: another trainer than the one that published ``policy`` holds the job.
        """
        groups = self.data.training_groups(self._job.rollout.batch, step=step) if train else []
        if evaluate:
            groups += self.data.evaluation_groups(step=step)
        ledger = self._ledger = self._new_ledger(step)
        records = await self._gatherer.gather(
            ledger, groups, data=self.data, policy=policy, settled=self._settled, on_progress=self._on_progress
        )
        return Gathered(
            training=_by_group([record for record in records if record.spec.purpose == "train"]),
            evaluated=[record for record in records if record.spec.purpose == "eval"],
            valid=frozenset(ledger.valid_groups()),
        )

    def _new_ledger(self, step: int) -> StepLedger:
        return StepLedger(step=step, replacements=self._job.rollout.batch)


def _by_group(records: Sequence[Record]) -> list[list[Record]]:
    groups: dict[int, list[Record]] = {}
    for record in records:
        groups.setdefault(record.spec.id.group, []).append(record)
    return list(groups.values())
