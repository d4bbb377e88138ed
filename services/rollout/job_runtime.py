"""One job on one rollout instance: its engine process, its policy, its running trajectories.

Lives while the instance has an allocation for the job. How trajectories come in is in :mod:`services.rollout.intake`, how
they leave in :mod:`services.rollout.handover`, which are here in :mod:`services.rollout.leases`; this module joins them to
the engine, the policy and the allocation.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import anyio
import msgspec
from anyio.abc import TaskGroup
from structlog.typing import FilteringBoundLogger

from libs.common import messages as m
from libs.common.changes import Changes
from libs.common.chat import ChatTokenizer
from libs.common.errors import NodeError, StaleEpochError
from libs.common.group_commit import GroupCommit
from libs.common.policy_store import PolicyStore
from libs.common.service import Context
from libs.common.tokens import PolicyVersion
from libs.common.trajectory import Alone, Claim, Offer, Release, Restart, TrajectoryId
from libs.environments.registry import make_environment
from services.rollout import wire
from services.rollout.engine_link import EngineLink
from services.rollout.handover import Handover
from services.rollout.intake import Intake
from services.rollout.leases import Leases
from services.rollout.policy_feed import PolicyFeed
from services.rollout.runner import EngineLost, GivenAway, Lost, Tools, Trajectory


class JobRuntime:
    """Runs a job's trajectories on this instance until :meth:`run` is cancelled or asked to stop."""

    def __init__(self, context: Context, record: m.JobRecord, policies: PolicyStore) -> None:
        self._context, self._job, self._uid = context, record.job, record.job_uid
        self._log: FilteringBoundLogger = context.log.bind(job=record.job_uid)
        self._policies = PolicyFeed(context.bus, policies, record.job_uid, log=self._log)
        self._commits = GroupCommit(context.store)
        self._engine = EngineLink(record.job, cores=context.settings.device.cores, receiver=self._receive, log=self._log)
        lease_s = self._job.rollout.lease_s
        self._leases = Leases(context.store, commits=self._commits, engine=self._engine, ttl_s=lease_s, log=self._log)
        self._handover = Handover(context, self._uid, leases=self._leases, engine=self._engine, log=self._log)
        self._changes = Changes()
        self._intake = Intake(context, self._uid, taker=self, changed=self._changes, lease_s=lease_s)
        self._allocation: m.Allocation | None = None
        self._tasks: TaskGroup | None = None
        self._tools: Tools | None = None
        self._step = 0
        self.closing = False

    @property
    def revision(self) -> int:
        """Revision of the allocation in force."""
        return self._engine.revision

    @property
    def broken(self) -> str:
        """Why no engine can be loaded here, or ""."""
        return self._engine.broken

    @property
    def version(self) -> PolicyVersion:
        """The policy in force."""
        return self._engine.version

    async def allocate(self, allocation: m.Allocation) -> None:
        """A newer allocation arrived; it is applied at the engine's next step boundary."""
        if self._allocation is None or allocation.revision > self._allocation.revision:
            self._allocation = allocation
            self._changes.notify()

    async def stop(self) -> None:
        """Take no more work; :meth:`run` gives back what is running and returns."""
        self.closing = True
        self._changes.notify()

    async def run(self) -> bool:
        """Until stopped, or until the job's queue is gone; nothing is left to do then."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            for task in (self._commits.run, self._engine.run, self._leases.renew, self._follow_policy):
                tasks.start_soon(task)
            tasks.start_soon(self._apply_allocations)
            tasks.start_soon(self._unload_when_idle)
            try:
                async with anyio.create_task_group() as taking:
                    taking.start_soon(self._take_in)
                    await self._changes.until(lambda: self.closing)
                    await self._handover.hand_back()  # at once, while the last look into the queue comes to its end
                    await self._engine.stop()  # its memory is somebody else's now
            finally:
                with anyio.CancelScope(shield=True):
                    await self._handover.hand_back()
                    await self._engine.stop()
                    await self._policies.forget()
                tasks.cancel_scope.cancel()
        return False

    async def _take_in(self) -> None:
        await self._intake.run()
        await self.stop()

    # --- policy and units --------------------------------------------------------------------------------------------

    async def _follow_policy(self) -> None:
        """Load the first policy, then switch to each newer one."""
        async for version, folder in self._policies.versions():
            if self._tools is None:
                await self._prepare(folder)
            another_step = version.step != self._engine.version.step
            self._engine.want_policy(version, folder)
            if another_step:  # what was begun under another policy isn't continued under this one
                await self._handover.hand_back(announce=False)  # whoever comes to that step again announces it
            await self._engine.switch_policy()
            await self._policies.prune(before=version)
            self._changes.notify()

    async def _prepare(self, folder: Path) -> None:
        chat = await anyio.to_thread.run_sync(ChatTokenizer, folder)
        environment = make_environment(self._job.environment, allow=self._context.settings.plugins.allow)
        self._tools = Tools(self._job, self._engine, chat, environment, self._commits)

    async def _apply_allocations(self) -> None:
        applied: m.Allocation | None = None
        while True:
            await self._changes.until(lambda known=applied: self._allocation is not known)  # type: ignore[misc]
            applied = self._allocation
            if applied is not None:
                await self._engine.set_units(applied.units, revision=applied.revision, memory_mb=applied.memory_mb)

    async def _unload_when_idle(self) -> None:
        """Free the memory of an engine that has been paused for long; the next units load it again."""
        limit_s = self._context.settings.rollout.unload_after_s
        while True:
            await self._changes.until(self._paused)
            with anyio.move_on_after(limit_s):
                await self._changes.until(lambda: not self._paused())
                continue
            await self._handover.hand_back()
            await self._engine.unload()
            await self._changes.until(lambda: not self._paused())

    def _paused(self) -> bool:
        return self._allocation is not None and not self._allocation.units

    # --- trajectories ------------------------------------------------------------------------------------------------

    def room(self) -> int:
        """How many more trajectories may be started now."""
        if self._allocation is None or not self._allocation.units or self._tools is None or not self._engine.ready:
            return 0
        if self._leases.any_suspect:
            return 0
        return self._allocation.max_running - len(self._leases)

    async def start(self, claim: Claim) -> None:
        """Run a trajectory that this instance has claimed or adopted, unless it has lost it since."""
        assert self._tools is not None and self._tasks is not None
        try:
            trajectory = Trajectory(await self._of_one_version(claim), self._tools)
        except Lost as lost:
            self._log.warning("trajectory_lost", trajectory=str(claim.spec.id), reason=str(lost))
            return
        if claim.spec.step != self.version.step:  # the policy has changed since it was asked for
            await asyncio.gather(*self._commits.put([Release(trajectory.id, trajectory.claim.epoch)]))
            return
        if self._leases.get(trajectory.key) is not None:
            return  # its adoption was asked for twice, because the answer was lost
        self._step = claim.spec.step
        self._leases.add(trajectory)
        self._tasks.start_soon(self._drive, trajectory)

    async def release(self, count: int, *, target: str) -> int:
        """As :meth:`Handover.release`."""
        return await self._handover.release(count, target=target)

    async def adopt(self, offers: Sequence[m.Offer]) -> int:
        """Go on with trajectories that another instance has handed over; returns with how many.

        Raises:
            NodeError: this instance can't run any now.
        """
        if self.closing or self._tools is None or not self._engine.ready or self._leases.any_suspect:
            raise NodeError(f"{self._context.instance} has no engine for {self._uid} now")
        claims = await self._context.store.adopt(
            [Offer(TrajectoryId(self._uid, offer.group, offer.sample), offer.epoch) for offer in offers],
            owner=self._context.instance,
            ttl_ms=int(self._job.rollout.lease_s * 1000),
        )
        adopted = [claim for claim in claims if isinstance(claim, Claim)]
        for claim in adopted:
            await self.start(claim)
        return len(adopted)

    async def _of_one_version(self, claim: Claim) -> Claim:
        """The claim; without its tokens if they came from another step's policy, with which the rest can't be continued.

        Raises:
            Lost: the store says that somebody else owns it by now.
        """
        if not len(claim.tokens) or set(claim.tokens["step"].tolist()) == {claim.spec.step}:
            return claim
        (restarted,) = self._commits.put([Restart(claim.spec.id, claim.epoch)])
        epoch = await restarted
        if isinstance(epoch, StaleEpochError):
            raise Lost(str(epoch))
        return msgspec.structs.replace(claim, epoch=int(epoch), tokens=claim.tokens[:0])

    async def _drive(self, trajectory: Trajectory) -> None:
        """Run a trajectory and tell how it ended."""
        bus, sender = self._context.bus, self._context.instance
        try:
            await self._alone_if_suspect(trajectory)
            await trajectory.run()
            (state,) = await self._context.store.states([trajectory.id])
            task = self._handover.task(trajectory.claim)
            if state == "finished":
                await bus.publish(m.following(task, m.TrajectoryFinished, sender=sender))
            elif state == "pending":
                await bus.publish(task)
            elif state == "failed":
                await bus.publish(m.following(task, m.TrajectorySettled, sender=sender, state="failed"))
        except GivenAway as away:
            self._log.info("trajectory_given_away", trajectory=str(trajectory.id), to=str(away))
        except Lost as lost:
            self._log.warning("trajectory_lost", trajectory=str(trajectory.id), reason=str(lost))
        finally:
            self._leases.remove(trajectory)
            self._changes.notify()
            if trajectory.in_turn:  # it ended in the middle of one: lost, or past its deadline
                await self._engine.drop([trajectory.key])

    async def _alone_if_suspect(self, trajectory: Trajectory) -> None:
        """One that was on two workers that died runs with nothing else on its engine, which shows whether it is to blame."""
        if trajectory.claim.alone:
            await self._changes.until(lambda: self._leases.only_suspects and next(iter(self._leases)) is trajectory)
            await asyncio.gather(*self._commits.put([Alone(trajectory.id, trajectory.claim.epoch)]))

    # --- from the engine ---------------------------------------------------------------------------------------------

    async def _receive(self, message: wire.FromEngine) -> None:
        """Tokens go to their trajectories and to the store in one write; the rest is telemetry."""
        match message:
            case wire.Progress(version=version, segments=segments):
                self._store_tokens(version, segments)
            case wire.StepFailed(error=error):
                self._leases.fail_turns(EngineLost(error))
                self._changes.notify()
            case wire.Window():
                await self._report(message)
            case wire.Entered(sub_stage=sub_stage):
                await self._context.bus.publish(
                    m.SubStageEntered(sender=self._context.instance, job_uid=self._uid, step=self._step, sub_stage=sub_stage)
                )
            case wire.Started() | wire.Loaded() | wire.PolicySwitched() | wire.UnitsApplied() | wire.Dropped():
                self._changes.notify()

    def _store_tokens(self, version: PolicyVersion, segments: list[wire.Segment]) -> None:
        """Hand new tokens to their trajectories, and checkpoint those of turns that go on."""
        for segment in segments:
            trajectory = self._leases.get(segment.key)
            if trajectory is None:
                continue
            stopped = segment.stopped
            trajectory.take(ids=segment.ids, logprobs=segment.logprobs, version=version, stopped=stopped)
            if stopped is None:
                self._leases.store(trajectory)

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
