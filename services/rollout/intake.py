"""Takes a job's tasks off the bus as far as there is room, and claims their trajectories.

A task is acknowledged once its claim has committed, or once there is nothing to do for it here; from then on the lease, not
the message, says who works on the trajectory.
"""

import contextlib
from collections.abc import Sequence
from typing import Protocol

import anyio

from libs.common import messages as m
from libs.common import subjects
from libs.common.changes import Changes
from libs.common.errors import QueueGone
from libs.common.pulling import Delivery, Puller
from libs.common.service import Context
from libs.common.tokens import PolicyVersion
from libs.common.trajectory import Claim, NotClaimed, TrajectoryId

NO_WORK_WAIT_S = 2.0
NOT_NOW_S = 0.05
POLICY_WAIT_S = 10.0
"""Less than the bus waits for an acknowledgement."""


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

    async def start(self, claim: Claim) -> None:
        """Run a trajectory that was claimed."""


class Intake:
    """Keeps a job's :class:`Taker` supplied.

    Args:
        changed: notified whenever ``room`` or ``closing`` may have changed.
        lease_s: for how long a trajectory is claimed.
    """

    def __init__(self, context: Context, job_uid: str, *, taker: Taker, changed: Changes, lease_s: float) -> None:
        self._context, self._uid, self._taker, self._changed = context, job_uid, taker, changed
        self._lease_s = lease_s

    async def run(self) -> None:
        """Until the taker closes, or the job's queue is gone because the job has ended."""
        puller = await self._puller()
        if puller is None:
            return
        with contextlib.suppress(QueueGone):
            while not self._taker.closing:
                await self._changed.until(lambda: self._taker.closing or self._taker.room() > 0)
                if not self._taker.closing:
                    await self._take(await puller.fetch(self._taker.room(), wait_s=NO_WORK_WAIT_S))

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
        tasks = [(delivery, delivery.message) for delivery in deliveries if isinstance(delivery.message, m.StartRollout)]
        await self._wait_for_policy([task for _, task in tasks])
        work: list[tuple[Delivery, m.StartRollout]] = []
        for delivery, task in tasks:
            if self._taker.closing or task.policy != self._taker.version or task.step != self._taker.version.step:
                await self._not_now(delivery, task)
            else:
                work.append((delivery, task))
        ids = [TrajectoryId(task.job_uid, task.group, task.sample) for _, task in work]
        if not ids:
            return
        claims = await self._context.store.claim(ids, owner=self._context.instance, ttl_ms=int(self._lease_s * 1000))
        for claim in claims:
            if isinstance(claim, Claim):
                await self._taker.start(claim)  # all of them before anything else, so that one prefill computes them
        for (delivery, task), claim in zip(work, claims, strict=True):
            if isinstance(claim, Claim):
                await delivery.ack()
            else:
                await self._not_claimed(delivery, task, claim)

    async def _wait_for_policy(self, tasks: Sequence[m.StartRollout]) -> None:
        """Until the newest version that these tasks want is in force, for a while: a step's tasks often come before it."""
        newest = max((task.policy.age for task in tasks), default=(0, 0))
        with anyio.move_on_after(POLICY_WAIT_S):
            await self._changed.until(lambda: self._taker.closing or self._taker.version.age >= newest)

    async def _not_now(self, delivery: Delivery, task: m.StartRollout) -> None:
        """A synchronous step's tokens are all of one version: wait for it, or forget a word about an earlier one."""
        if not self._taker.closing and task.policy.age < self._taker.version.age:
            await delivery.ack()
        else:
            await delivery.retry(after_s=NOT_NOW_S)

    async def _not_claimed(self, delivery: Delivery, task: m.StartRollout, why: NotClaimed) -> None:
        if why.why == "later":
            await delivery.retry(after_s=why.wait_ms / 1000)
            return
        if why.why == "poisoned":
            await self._context.bus.publish(
                m.following(task, m.TrajectorySettled, sender=self._context.instance, state="failed")
            )
        await delivery.ack()  # held by another, or past this state already: nothing to do here
