"""What a job's trainer leaves outside itself: policy versions, checkpoints, the trained model.

The order is what makes a crash harmless: a policy is complete before the pointer moves to it, and records are forgotten only
once a durable checkpoint includes them.

A trainer that was frozen and replaced finds out before it writes anything. Where it is frozen between asking and writing, a
server refuses it (the pointer, the records), or what it writes lies where no successor looks (policies and checkpoints carry
its incarnation).
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from libs.common import manifest
from libs.common import messages as m
from libs.common.errors import StaleEpochError
from libs.common.policy_store import PolicyStore
from libs.common.sections import TrainSection
from libs.common.service import Context
from libs.common.tokens import PolicyVersion
from libs.common.trajectory import TrajectoryId
from services.trainer.checkpoints import Checkpoints
from services.trainer.compute_link import ComputeLink
from services.trainer.hold import Hold, Superseded
from services.trainer.leftovers import delete_leftovers


class Publication:
    """Publishes for one life of a job's trainer.

    Args:
        hold: of this life; every version carries its incarnation.
    """

    def __init__(self, context: Context, hold: Hold, *, compute: ComputeLink, policies: PolicyStore) -> None:
        self._context, self._hold, self._uid = context, hold, hold.job_uid
        self._compute, self._policies = compute, policies
        self._folder = context.settings.job_folder(hold.job_uid)
        self.checkpoints = Checkpoints.of(self._folder)
        self._retained: list[TrajectoryId] = []

    async def policy(self, step: int) -> PolicyVersion:
        """Write the policy after ``step`` updates and move the job's pointer to it.

        Raises:
            Superseded: another trainer holds the job.
        """
        await self._hold.require()
        version = PolicyVersion(step, self._hold.incarnation)
        folder = await anyio.to_thread.run_sync(self._policies.prepare, self._uid, version)
        await self._compute.write_policy(str(folder))
        digest = await anyio.to_thread.run_sync(self._policies.complete, self._uid, version)
        published = m.PolicyPublished(
            sender=self._context.instance,
            job_uid=self._uid,
            version=version,
            url=self._policies.url(self._uid, version),
            digest=digest,
        )
        table = await self._context.bus.table(m.PolicyPublished)
        current = await table.entry(self._uid)
        before = current.value if current is not None else None
        if before is not None and before.version.incarnation > self._hold.incarnation:
            raise Superseded(self._uid)
        if not await table.swap(self._uid, published, expected_revision=current.revision if current else 0):
            raise Superseded(self._uid)
        # Engines may still be loading the one before; newer ones are a successor's, if this trainer was frozen just now.
        oldest = version if before is None else before.version
        await anyio.to_thread.run_sync(lambda: self._policies.prune(self._uid, before=oldest))
        return version

    def retain(self, ids: Sequence[TrajectoryId]) -> None:
        """These records were trained or evaluated; they stay in the store until a checkpoint includes them."""
        self._retained += ids

    async def checkpoint(self, step: int, *, extra: dict[str, Any], rewards: dict[int, float], train: TrainSection) -> None:
        """Checkpoint after ``step`` updates, verify it, forget the records that it includes, drop older ones.

        Args:
            rewards: by which checkpoints are judged, per step.

        Raises:
            Superseded: another trainer holds the job.
        """
        await self._hold.require()
        version = PolicyVersion(step, self._hold.incarnation)
        await self._compute.write_checkpoint(step, str(self.checkpoints.path(version)), extra=extra)
        await anyio.to_thread.run_sync(self.checkpoints.verify, version)
        try:
            await self._context.store.forget(self._retained, incarnation=self._hold.incarnation)
        except StaleEpochError:
            raise Superseded(self._uid) from None
        self._retained = []

        def prune() -> None:
            self.checkpoints.prune(
                rewards, incarnation=self._hold.incarnation, keep_last=train.keep_last, keep_best=train.keep_best
            )

        await anyio.to_thread.run_sync(prune)

    async def model(self) -> Path:
        """Write the trained model in Hugging Face format; where it lies.

        Raises:
            Superseded: another trainer holds the job.
        """
        await self._hold.require()
        target, writer = self._folder / "model", str(self._hold.incarnation)
        aside = await anyio.to_thread.run_sync(lambda: manifest.prepare(target, writer=writer))
        await self._compute.write_policy(str(aside))
        await anyio.to_thread.run_sync(lambda: manifest.complete(target, durable=True, writer=writer))
        return target

    async def tidy(self, *, own: bool = False) -> None:
        """Delete what trainers before this one left half-written; one of them that still writes is replaced, and fails.

        Args:
            own: this one's, too: its training process has ended.
        """
        newest = self._hold.incarnation if own else self._hold.incarnation - 1
        await anyio.to_thread.run_sync(partial(delete_leftovers, self._folder, up_to=newest))
