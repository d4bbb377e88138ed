"""The reward service: takes finished trajectories, scores their text in worker processes, settles their records.

It reads a trajectory's record and writes its score, nothing else. Scoring twice is harmless: the store lets one score be
effective.
"""

from collections import defaultdict
from collections.abc import Sequence

import anyio
from anyio.abc import TaskGroup

from libs.common import messages as m
from libs.common.changes import Changes
from libs.common.errors import JigsawError, Unreachable
from libs.common.group_commit import GroupCommit
from libs.common.pulling import Delivery
from libs.common.service import Context
from libs.common.subjects import REWARD_CONSUMER
from libs.common.trajectory import TERMINAL, Record, Score, TrajectoryId
from libs.rewards.resolve import resolve
from libs.rewards.score import Outcome, Verdict
from services.reward.pool import ScorerPool

CONCURRENT = 64
NO_WORK_WAIT_S = 5.0
KEEP_ALIVES = 5
"""So often does it say what it works on within the time after which that goes to another."""

RETRY_S = 1.0


async def serve(context: Context) -> None:
    """Run until told to stop; what is being scored then goes to another instance at once."""
    service = RewardService(context)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(service.run, tasks)
        await context.stopping.wait()
        await service.pull_no_more()
        tasks.cancel_scope.cancel()
    await service.close()


class RewardService:
    """Scores the trajectories of all jobs, with one worker pool per job."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._commits = GroupCommit(context.store)
        self._pools: dict[str, ScorerPool] = {}
        self._scoring: defaultdict[str, set[anyio.CancelScope]] = defaultdict(set)
        self._opening = anyio.Lock()
        self._outstanding: set[Delivery] = set()
        self._changes = Changes()
        self._pulling, self._pulled = anyio.CancelScope(), anyio.Event()

    async def run(self, tasks: TaskGroup) -> None:
        """Take finished trajectories while there is room."""
        tasks.start_soon(self._commits.run)
        tasks.start_soon(self._keep_alive)
        tasks.start_soon(self._forget_ended_jobs)
        with self._pulling:
            puller = await self._context.bus.pull(m.TrajectoryFinished, REWARD_CONSUMER)
            while True:
                await self._changes.until(lambda: len(self._outstanding) < CONCURRENT)
                room = CONCURRENT - len(self._outstanding)
                deliveries = await puller.fetch(room, wait_s=NO_WORK_WAIT_S)
                with anyio.CancelScope(shield=True):  # so that what was fetched is given back with the rest
                    await self._take(deliveries, tasks)
        self._pulled.set()

    async def pull_no_more(self) -> None:
        """Withdraw from the queue: else what is given back next would come here again."""
        self._pulling.cancel()
        await self._pulled.wait()

    async def close(self) -> None:
        """End all workers."""
        for pool in self._pools.values():
            await pool.close()

    async def _take(self, deliveries: Sequence[Delivery], tasks: TaskGroup) -> None:
        events = [(delivery, delivery.message) for delivery in deliveries]
        finished = [(delivery, event) for delivery, event in events if isinstance(event, m.TrajectoryFinished)]
        if not finished:
            return
        ids = [TrajectoryId(event.job_uid, event.group, event.sample) for _, event in finished]
        for (delivery, event), record in zip(finished, await self._context.store.read(ids), strict=True):
            if record is None or record.state in ("pending", "running"):
                await delivery.ack()  # of a job that ended, or of an earlier life of the record
            else:
                self._outstanding.add(delivery)
                tasks.start_soon(self._settle_within, delivery, event, record)

    async def _settle_within(self, delivery: Delivery, event: m.TrajectoryFinished, record: Record) -> None:
        """Settle a record, unless its job ends meanwhile."""
        scopes = self._scoring[event.job_uid]
        with anyio.CancelScope() as scope:
            scopes.add(scope)
            try:
                await self._settle(delivery, event, record)
            finally:
                scopes.discard(scope)

    async def _settle(self, delivery: Delivery, event: m.TrajectoryFinished, record: Record) -> None:
        """Score a record unless it is settled already, tell its trainer, acknowledge.

        Cut short, because this service or the job ends, it has the delivery come again: to another instance, or to no job.
        """
        try:
            state: str = record.state
            if state == "finished":
                verdict = await self._verdict(record)
                if verdict is None:
                    await delivery.ack()  # its job has ended
                    return
                if verdict.outcome is Outcome.LOST and delivery.deliveries == 1:
                    await delivery.retry(after_s=RETRY_S)
                    return
                (answer,) = self._commits.put([Score(record.spec.id, record.epoch, verdict.reward, verdict.reason)])
                if await answer:
                    state = "scored" if verdict.reward is not None else "failed"
                else:  # another instance was first, and its verdict may differ; or another text is there by now
                    (state,) = await self._context.store.states([record.spec.id])
            if state in TERMINAL:
                told = m.following(event, m.TrajectorySettled, sender=self._context.instance, state=state)
                await self._context.bus.publish(told)
            await delivery.ack()
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await delivery.retry(after_s=0.0)
            raise
        finally:
            self._outstanding.discard(delivery)
            self._changes.notify()

    async def _verdict(self, record: Record) -> Verdict | None:
        """The score of a record; None when its job is gone. A scorer that can't be loaded fails the sample, with reason."""
        try:
            pool = await self._pool(record.spec.id.job_uid)
            verdict = await pool.score(record.text, record.spec.answer, record.spec.row) if pool is not None else None
        except Unreachable:  # no fault of the sample's
            raise
        except JigsawError as error:
            return Verdict(Outcome.FAILED, None, f"the scorer can't be loaded: {error}")
        return verdict

    async def _pool(self, job_uid: str) -> ScorerPool | None:
        async with self._opening:
            if job_uid not in self._pools:
                record = await (await self._context.bus.table(m.JobRecord)).get(job_uid)
                if record is None or record.state is m.JobState.ENDED:
                    return None
                settings, section = self._context.settings, record.job.reward
                scorer = resolve(section, allow=settings.plugins.allow, folders=settings.plugins.folders, file=job_uid)
                self._pools[job_uid] = ScorerPool(scorer, timeout_s=section.timeout_s, workers=settings.reward.workers)
            return self._pools[job_uid]

    async def _keep_alive(self) -> None:
        """Tell the bus that slow scores are being worked on, well inside its patience."""
        while True:
            await anyio.sleep(self._context.settings.worker_lost_s / KEEP_ALIVES)
            for delivery in list(self._outstanding):
                await delivery.extend()

    async def _forget_ended_jobs(self) -> None:
        """Close the workers of jobs that have ended."""
        table = await self._context.bus.table(m.JobRecord)
        async for change in table.watch():
            ended = change.value is None or change.value.state is m.JobState.ENDED
            if ended:
                for scope in self._scoring.pop(change.key, ()):
                    scope.cancel()
                if (pool := self._pools.pop(change.key, None)) is not None:
                    await pool.close()
