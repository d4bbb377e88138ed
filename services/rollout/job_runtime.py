"""One job on one rollout instance: its engine process, its policy, its running trajectories.

Lives while the instance has an allocation for the job. Pulls tasks as far as the allocation allows, claims their records,
runs them, keeps their leases, hands them back when it ends.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import anyio
import msgspec
from anyio.abc import TaskGroup
from structlog.typing import FilteringBoundLogger

from libs.common import messages as m
from libs.common import subjects
from libs.common.bus import Delivery
from libs.common.chat import ChatTokenizer
from libs.common.errors import JigsawError, QueueGone, StaleEpochError
from libs.common.group_commit import GroupCommit
from libs.common.policy_store import PolicyStore
from libs.common.service import Context
from libs.common.store import Append, Claim, NotClaimed, Release, Renew, Restart, TrajectoryId, Write
from libs.environments.registry import make_environment
from services.rollout import wire
from services.rollout.engine_link import EngineLink
from services.rollout.runner import EngineLost, Lost, Tools, Trajectory

NO_WORK_WAIT_S = 2.0
BROKEN_PAUSE_S = 5.0
"""An instance whose engine can't be loaded takes one task this often: enough to tell why, and most are left to others."""
RETRY_FETCH_S = 1.0
HAND_BACK_S = 10.0


class JobRuntime:
    """Runs a job's trajectories on this instance until :meth:`run` is cancelled or asked to stop."""

    def __init__(self, context: Context, record: m.JobRecord, policies: PolicyStore) -> None:
        self._context, self._job, self._uid = context, record.job, record.job_uid
        self._policies = policies
        self._log: FilteringBoundLogger = context.log.bind(job=record.job_uid)
        self._commits = GroupCommit(context.store)
        self._engine = EngineLink(record.job, cores=context.settings.device.cores, receiver=self._receive, log=self._log)
        self._running: dict[str, Trajectory] = {}
        self._allocation: m.Allocation | None = None
        self._changed = anyio.Event()
        self._stopping = False
        self._step = 0
        self._tools: Tools | None = None

    @property
    def revision(self) -> int:
        """Revision of the allocation in force."""
        return self._engine.revision

    def allocate(self, allocation: m.Allocation) -> None:
        """A newer allocation arrived; it is applied at the engine's next step boundary."""
        if self._allocation is None or allocation.revision > self._allocation.revision:
            self._allocation = allocation
            self._notify()

    async def stop(self) -> None:
        """Take no more work; :meth:`run` gives back what is running and returns."""
        self._stopping = True
        self._notify()

    async def run(self) -> None:
        """Until stopped."""
        async with anyio.create_task_group() as tasks:
            for task in (self._commits.run, self._engine.run, self._follow_policy, self._renew):
                tasks.start_soon(task)
            tasks.start_soon(self._apply_allocations)
            try:
                await self._pull(tasks)
            finally:
                with anyio.CancelScope(shield=True):
                    with anyio.move_on_after(HAND_BACK_S):
                        given_back = [self._task(trajectory) for trajectory in self._running.values()]
                        await self._hand_back()
                        await self._context.bus.publish_all(given_back)
                    await self._engine.stop()
                    await anyio.to_thread.run_sync(partial(self._policies.prune_copies, self._uid, keep=()))
                tasks.cancel_scope.cancel()

    # --- policy and units --------------------------------------------------------------------------------------------

    async def _follow_policy(self) -> None:
        """Load the first policy, then switch to each newer one."""
        table = await self._context.bus.table(m.PolicyPublished)
        async for change in table.watch(self._uid):
            published = change.value
            if published is None:
                continue
            folder = await self._fetched(published)
            if folder is None:
                continue
            if self._tools is None:
                await self._prepare(folder)
            elif published.version.step != self._engine.version.step:
                await self._hand_back()  # what was begun under another policy isn't continued under this one
            await self._engine.use_policy(published.version, folder)
            await anyio.to_thread.run_sync(partial(self._policies.prune_copies, self._uid, keep=[published.version]))
            self._notify()

    async def _fetched(self, published: m.PolicyPublished) -> Path | None:
        """The folder of a version; None if it has been replaced by a newer one, which the watch tells of."""
        table = await self._context.bus.table(m.PolicyPublished)
        while True:
            try:
                return await anyio.to_thread.run_sync(self._fetch, published)
            except JigsawError as error:
                self._log.warning("policy_not_fetched", policy=str(published.version), reason=str(error))
                current = await table.get(self._uid)
                if current is None or current.version != published.version:
                    return None
                await anyio.sleep(RETRY_FETCH_S)

    def _fetch(self, published: m.PolicyPublished) -> Path:
        return self._policies.fetch(self._uid, published.version, digest=published.digest)

    async def _prepare(self, folder: Path) -> None:
        chat = await anyio.to_thread.run_sync(ChatTokenizer, folder)
        environment = make_environment(self._job.environment, allow=self._context.settings.reward.allow)
        self._tools = Tools(self._job, self._engine, chat, environment, self._commits)

    async def _apply_allocations(self) -> None:
        applied = -1
        while True:
            changed = self._changed
            if self._allocation is not None and self._allocation.revision > applied:
                applied = self._allocation.revision
                await self._engine.set_units(self._allocation.units, revision=applied, memory_mb=self._allocation.memory_mb)
            await changed.wait()

    # --- tasks -------------------------------------------------------------------------------------------------------

    async def _pull(self, tasks: TaskGroup) -> None:
        """Take tasks while there is room."""
        name = subjects.tasks_consumer(self._uid)
        while True:
            if self._stopping:
                return
            try:
                puller = await self._context.bus.pull(m.StartRollout, name)
                break
            except QueueGone:
                await anyio.sleep(0.1)  # the scheduler makes it before it allocates; gone again if the job has ended
        try:
            while not self._stopping:
                changed = self._changed
                room = self._room()
                if room <= 0:
                    await changed.wait()
                    continue
                try:
                    deliveries = await puller.fetch(room, wait_s=NO_WORK_WAIT_S)
                except QueueGone:
                    return  # the job ended
                await self._take(deliveries, tasks)
                if self._engine.broken:
                    await anyio.sleep(BROKEN_PAUSE_S)
        finally:
            await puller.close()

    def _room(self) -> int:
        if self._allocation is None or not self._allocation.units or self._tools is None or not self._engine.ready:
            return 0
        room = self._allocation.max_running - len(self._running)
        return min(room, 1) if self._engine.broken else room

    async def _take(self, deliveries: Sequence[Delivery], tasks: TaskGroup) -> None:
        """Claim the records of tasks, acknowledge, and start what was claimed."""
        work: list[tuple[Delivery, m.StartRollout]] = []
        for delivery in deliveries:
            task = delivery.message
            if not isinstance(task, m.StartRollout):
                raise JigsawError(f"{type(task).__name__} on a task subject")
            if self._stopping or (task.policy != self._engine.version and not self._engine.broken):
                await self._not_now(delivery, task)
            else:
                work.append((delivery, task))
        ids = [TrajectoryId(task.job_uid, task.group, task.sample) for _, task in work]
        if not ids:
            return
        ttl_ms = int(self._job.rollout.lease_s * 1000)
        claims = await self._context.store.claim(ids, owner=self._context.instance, ttl_ms=ttl_ms)
        for (delivery, task), claim in zip(work, claims, strict=True):
            if isinstance(claim, Claim):
                self._start(await self._of_one_version(claim), tasks)
                await delivery.ack()
            else:
                await self._not_claimed(delivery, task, claim)

    async def _not_now(self, delivery: Delivery, task: m.StartRollout) -> None:
        """A synchronous step's tokens are all of one version: wait for it, or forget a word from before a restart."""
        if not self._stopping and task.policy.incarnation < self._engine.version.incarnation:
            await delivery.ack()
        else:
            await delivery.retry(after_s=0.05)

    async def _not_claimed(self, delivery: Delivery, task: m.StartRollout, why: NotClaimed) -> None:
        if why.why == "later":
            await delivery.retry(after_s=why.wait_ms / 1000)
            return
        if why.why == "exhausted":
            await self._context.bus.publish(settled_as_failed(task))
        await delivery.ack()  # held by another, or past this state already: nothing to do here

    async def _of_one_version(self, claim: Claim) -> Claim:
        """The claim; without its tokens if they came from another step's policy, with which the rest can't be continued."""
        if not len(claim.tokens) or set(claim.tokens["step"].tolist()) == {self._engine.version.step}:
            return claim
        await asyncio.gather(*self._commits.put([Restart(claim.spec.id, claim.epoch)]))
        return msgspec.structs.replace(claim, tokens=claim.tokens[:0])

    def _start(self, claim: Claim, tasks: TaskGroup) -> None:
        assert self._tools is not None
        for held in self._running.values():
            if held.id == claim.spec.id:  # this worker lost it and has claimed it again
                held.fail_turn(Lost("claimed anew"))
        trajectory = Trajectory(claim, self._tools)
        self._step = claim.spec.step
        self._running[trajectory.key] = trajectory
        tasks.start_soon(self._drive, trajectory)

    async def _drive(self, trajectory: Trajectory) -> None:
        """Run a trajectory and tell how it ended."""
        try:
            await trajectory.run()
            (state,) = await self._context.store.states([trajectory.id])
            task = self._task(trajectory)
            if state == "finished":
                await self._context.bus.publish(finished(task))
            elif state == "pending":
                await self._context.bus.publish(task)
            elif state == "failed":
                await self._context.bus.publish(settled_as_failed(task))
        except Lost as lost:
            self._log.warning("trajectory_lost", trajectory=str(trajectory.id), reason=str(lost))
        finally:
            self._running.pop(trajectory.key, None)
            self._notify()
            if trajectory.in_turn:  # it ended in the middle of one: lost, or past its deadline
                await self._engine.drop([trajectory.key])

    def _task(self, trajectory: Trajectory) -> m.StartRollout:
        """The announcement of a trajectory; the claim's epoch numbers it."""
        spec = trajectory.claim.spec
        return m.StartRollout(
            sender=self._context.instance,
            job_uid=spec.id.job_uid,
            step=spec.step,
            group=spec.id.group,
            sample=spec.id.sample,
            policy=self._engine.version,
            attempt=trajectory.claim.epoch,
        )

    # --- leases ------------------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        ttl_s = self._job.rollout.lease_s
        while True:
            await anyio.sleep(ttl_s / 3)
            held = list(self._running.values())
            if held:
                writes = [Renew(trajectory.id, trajectory.claim.epoch, int(ttl_s * 1000)) for trajectory in held]
                for trajectory, answer in zip(held, await self._context.store.write(writes), strict=True):
                    if isinstance(answer, StaleEpochError):
                        trajectory.fail_turn(Lost(str(answer)))

    async def _hand_back(self) -> None:
        """Give back what is running, with every token that it has."""
        held = list(self._running.values())
        if not held:
            return
        await self._engine.drop([trajectory.key for trajectory in held])
        writes: list[Write] = []
        for trajectory in held:
            writes += trajectory.checkpoint()
            writes.append(Release(trajectory.id, trajectory.claim.epoch))
        await asyncio.gather(*self._commits.put(writes))
        for trajectory in held:
            trajectory.fail_turn(Lost("handed back"))
        self._log.info("handed_back", trajectories=len(held))

    # --- from the engine ---------------------------------------------------------------------------------------------

    async def _receive(self, message: wire.FromEngine) -> None:
        """Tokens go to their trajectories and to the store in one write; the rest is telemetry."""
        match message:
            case wire.Progress(version=version, segments=segments):
                appends: list[Append] = []
                for segment in segments:
                    trajectory = self._running.get(segment.key)
                    if trajectory is None:
                        continue
                    stopped = segment.stopped
                    trajectory.take(ids=segment.ids, logprobs=segment.logprobs, version=version, stopped=stopped)
                    if stopped is None:
                        appends += trajectory.checkpoint()
                self._commits.put(appends)
            case wire.StepFailed(error=error):
                for trajectory in list(self._running.values()):
                    trajectory.fail_turn(EngineLost(error))
                self._notify()
            case wire.Window():
                await self._report(message)
            case wire.Entered(sub_stage=sub_stage):
                await self._context.bus.publish(
                    m.SubStageEntered(sender=self._context.instance, job_uid=self._uid, step=self._step, sub_stage=sub_stage)
                )
            case wire.Loaded() | wire.PolicySwitched() | wire.UnitsApplied() | wire.Dropped():
                self._notify()

    async def _report(self, window: wire.Window) -> None:
        await self._context.bus.publish(
            m.RolloutWindow(
                sender=self._context.instance,
                job_uid=self._uid,
                step=self._step,
                window_s=window.window_s,
                tokens_prefill=window.tokens_prefill,
                tokens_decode=window.tokens_decode,
                running=window.running,
                waiting=window.waiting,
                lengths=window.lengths,
                kv_used=window.kv_used,
                units=len(self._allocation.units) if self._allocation else 0,
                revision=self._engine.revision,
            )
        )

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def finished(task: m.StartRollout) -> m.TrajectoryFinished:
    """Word that the task's trajectory waits for its score."""
    return m.TrajectoryFinished(
        sender=task.sender,
        job_uid=task.job_uid,
        step=task.step,
        group=task.group,
        sample=task.sample,
        attempt=task.attempt,
    )


def settled_as_failed(task: m.StartRollout) -> m.TrajectorySettled:
    """Word that the task's trajectory has failed for good."""
    return m.TrajectorySettled(
        sender=task.sender,
        job_uid=task.job_uid,
        step=task.step,
        group=task.group,
        sample=task.sample,
        state="failed",
        attempt=task.attempt,
    )
