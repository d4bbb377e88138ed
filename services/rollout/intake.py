"""Takes a job's tasks off the bus as far as there is room, and claims their trajectories.

A task is acknowledged once its claim has committed, or once there is nothing to do for it here; from then on the lease, not
the message, says who works on the trajectory.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import anyio
import msgspec

from libs.common import messages as m
from libs.common import subjects
from libs.common.bus import Delivery, Puller
from libs.common.changes import Changes
from libs.common.errors import JigsawError, QueueGone
from libs.common.group_commit import GroupCommit
from libs.common.service import Context
from libs.common.store import Claim, NotClaimed, Restart, TrajectoryId
from libs.common.tokens import PolicyVersion

NO_WORK_WAIT_S = 2.0
NOT_NOW_S = 0.05


class Taker(Protocol):
    """Who runs what is taken in."""

    @property
    def version(self) -> PolicyVersion:
        """The policy in force."""

    @property
    def closing(self) -> bool:
        """Whether nothing more is to be taken."""

    def room(self) -> int:
        """How many more trajectories may be started now."""

    def start(self, claim: Claim) -> None:
        """Run a trajectory."""


class Intake:
    """Keeps a job's :class:`Taker` supplied.

    Args:
        changed: notified whenever ``room`` or ``closing`` may have changed.
        lease_s: for how long a trajectory is claimed.
    """

    def __init__(
        self, context: Context, job_uid: str, *, taker: Taker, changed: Changes, commits: GroupCommit, lease_s: float
    ) -> None:
        self._context, self._uid, self._taker, self._changed = context, job_uid, taker, changed
        self._commits, self._lease_s = commits, lease_s

    async def run(self) -> None:
        """Until the taker closes, or the job's queue is gone because the job has ended."""
        puller = await self._puller()
        if puller is None:
            return
        try:
            while not self._taker.closing:
                await self._changed.until(lambda: self._taker.closing or self._taker.room() > 0)
                if not self._taker.closing:
                    await self._take(await puller.fetch(self._taker.room(), wait_s=NO_WORK_WAIT_S))
        except QueueGone:
            return
        finally:
            await puller.close()

    async def _puller(self) -> Puller | None:
        """The job's queue, once the scheduler has made it; None if the taker closes before that."""
        while not self._taker.closing:
            try:
                return await self._context.bus.pull(m.StartRollout, subjects.tasks_consumer(self._uid))
            except QueueGone:
                await anyio.sleep(0.1)  # the scheduler makes it before it allocates; gone again if the job has ended
        return None

    async def _take(self, deliveries: Sequence[Delivery]) -> None:
        """Claim the records of tasks, start what was claimed, acknowledge."""
        work: list[tuple[Delivery, m.StartRollout]] = []
        for delivery in deliveries:
            task = delivery.message
            if not isinstance(task, m.StartRollout):
                raise JigsawError(f"{type(task).__name__} on a task subject")
            if self._taker.closing or task.policy != self._taker.version:
                await self._not_now(delivery, task)
            else:
                work.append((delivery, task))
        ids = [TrajectoryId(task.job_uid, task.group, task.sample) for _, task in work]
        if not ids:
            return
        claims = await self._context.store.claim(ids, owner=self._context.instance, ttl_ms=int(self._lease_s * 1000))
        for (delivery, task), claim in zip(work, claims, strict=True):
            if isinstance(claim, Claim):
                self._taker.start(await self._of_one_version(claim))
                await delivery.ack()
            else:
                await self._not_claimed(delivery, task, claim)

    async def _not_now(self, delivery: Delivery, task: m.StartRollout) -> None:
        """A synchronous step's tokens are all of one version: wait for it, or forget a word about an earlier one."""
        if not self._taker.closing and _age(task.policy) < _age(self._taker.version):
            await delivery.ack()
        else:
            await delivery.retry(after_s=NOT_NOW_S)

    async def _not_claimed(self, delivery: Delivery, task: m.StartRollout, why: NotClaimed) -> None:
        if why.why == "later":
            await delivery.retry(after_s=why.wait_ms / 1000)
            return
        if why.why == "exhausted":
            await self._context.bus.publish(
                m.following(task, m.TrajectorySettled, sender=self._context.instance, state="failed")
            )
        await delivery.ack()  # held by another, or past this state already: nothing to do here

    async def _of_one_version(self, claim: Claim) -> Claim:
        """The claim; without its tokens if they came from another step's policy, with which the rest can't be continued."""
        if not len(claim.tokens) or set(claim.tokens["step"].tolist()) == {self._taker.version.step}:
            return claim
        await asyncio.gather(*self._commits.put([Restart(claim.spec.id, claim.epoch)]))
        return msgspec.structs.replace(claim, tokens=claim.tokens[:0])


def _age(version: PolicyVersion) -> tuple[int, int]:
    """Sorts a job's versions by when they were published: a trainer that starts over may go back in steps."""
    return version.incarnation, version.step
