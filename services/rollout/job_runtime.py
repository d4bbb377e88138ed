"""One job on one rollout instance: its engine process, its policy, its running trajectories.

Lives while the instance has an allocation for the job. Pulls tasks as far as the allocation allows, claims their records,
runs them, keeps their leases, hands them back when it ends.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import anyio
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
from libs.common.store import Append, Claim, NotClaimed, Release, Renew, TrajectoryId, Write
from libs.environments.registry import make_environment
from services.rollout import wire
from services.rollout.engine_link import EngineLink
from services.rollout.runner import EngineLost, Lost, Tools, Trajectory

NO_WORK_WAIT_S = 2.0
CONSUMER_PATIENCE_S = 30.0


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
                with anyio.CancelScope(shield=True), anyio.move_on_after(10.0):
                    await self._hand_back()
                    await self._engine.stop()
                tasks.cancel_scope.cancel()

    # --- policy and units --------------------------------------------------------------------------------------------

    async def _follow_policy(self) -> None:
        """Load the first policy, then switch to each newer one."""
        table = await self._context.bus.table(m.PolicyPublished)
        async for change in table.watch(self._uid):
            published = change.value
            if published is None:
                continue
            try:
                folder = await anyio.to_thread.run_sync(self._fetch, published)
            except JigsawError as error:
                # One that was slow may find its version gone; the next one is on its way then.
                self._log.warning("policy_not_fetched", policy=str(published.version), reason=str(error))
                continue
            if self._tools is None:
                await self._prepare(folder)
            await self._engine.use_policy(published.version, folder)
            self._notify()

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
                await self._engine.set_units(self._allocation.units, revision=applied)
            await changed.wait()

    # --- tasks -------------------------------------------------------------------------------------------------------

    async def _pull(self, tasks: TaskGroup) -> None:
        """Take tasks while there is room."""
        name = subjects.tasks_consumer(self._uid)
        with anyio.fail_after(CONSUMER_PATIENCE_S):
            while True:
                try:
                    puller = await self._context.bus.pull(m.StartRollout, name)
                    break
                except QueueGone:
                    await anyio.sleep(0.1)
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
        finally:
            await puller.close()

    def _room(self) -> int:
        if self._allocation is None or not self._allocation.units or self._tools is None or not self._engine.ready:
            return 0
        return self._allocation.max_running - len(self._running)

    async def _take(self, deliveries: Sequence[Delivery], tasks: TaskGroup) -> None:
        """Claim the records of tasks, acknowledge, and start what was claimed."""
        work: list[tuple[Delivery, m.StartRollout]] = []
        for delivery in deliveries:
            task = delivery.message
            if not isinstance(task, m.StartRollout):
                raise JigsawError(f"{type(task).__name__} on a task subject")
            if task.policy > self._engine.version or self._stopping:
                await delivery.retry(after_s=0.05)
            else:
                work.append((delivery, task))
        ids = [TrajectoryId(task.job_uid, task.group, task.sample) for _, task in work]
        if not ids:
            return
        ttl_ms = int(self._job.rollout.lease_s * 1000)
        claims = await self._context.store.claim(ids, owner=self._context.instance, ttl_ms=ttl_ms)
        for (delivery, task), claim in zip(work, claims, strict=True):
            if isinstance(claim, Claim):
                self._start(claim, tasks)
                await delivery.ack()
            else:
                await self._not_claimed(delivery, task, claim)

    async def _not_claimed(self, delivery: Delivery, task: m.StartRollout, why: NotClaimed) -> None:
        if why.why == "later":
            await delivery.retry(after_s=why.wait_ms / 1000)
            return
        if why.why == "exhausted":
            await self._context.bus.publish(settled_as_failed(task))
        await delivery.ack()  # held by another, or past this state already: nothing to do here

    def _start(self, claim: Claim, tasks: TaskGroup) -> None:
        assert self._tools is not None
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
            await self._engine.drop([trajectory.key])
        finally:
            self._running.pop(trajectory.key, None)
            self._notify()

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
        """Give back what is running, with every token that it has, and announce it to the others."""
        held = list(self._running.values())
        if not held:
            return
        await self._engine.drop([trajectory.key for trajectory in held])
        writes: list[Write] = []
        for trajectory in held:
            writes += trajectory.checkpoint()
            writes.append(Release(trajectory.id, trajectory.claim.epoch))
        await asyncio.gather(*self._commits.put(writes))
        await self._context.bus.publish_all([self._task(trajectory) for trajectory in held])
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
