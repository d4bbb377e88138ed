"""The rollout service: follows its allocations, and runs one :class:`JobRuntime` for each job that it holds one for."""

from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from libs.common import messages as m
from libs.common import subjects
from libs.common.policy_store import PolicyStore
from libs.common.service import Context, heartbeat, now
from services.rollout.job_runtime import JobRuntime


async def serve(context: Context) -> None:
    """Run until told to stop, then give everything back."""
    service = RolloutService(context)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(heartbeat, context, service.presence)
        tasks.start_soon(service.follow_allocations, tasks)
        await context.stopping.wait()
        await service.drain()
        tasks.cancel_scope.cancel()


class RolloutService:
    """The jobs of one rollout instance."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._policies = PolicyStore(context.settings.policies, mirror=Path(context.settings.home) / "mirror")
        self._jobs: dict[str, JobRuntime] = {}
        self._ended = anyio.Event()
        self._started_at = now()

    def presence(self) -> m.Worker:
        """What this instance is and what it holds."""
        device = self._context.settings.device
        return m.Worker(
            sender=self._context.instance,
            role=m.Role.ROLLOUT,
            device=device.id,
            units=len(device.cores),
            max_units=self._context.settings.rollout.max_units,
            memory_mb=device.memory_mb,
            started_at=self._started_at,
            draining=self._context.stopping.is_set(),
            revisions={job_uid: runtime.revision for job_uid, runtime in self._jobs.items()},
        )

    async def follow_allocations(self, tasks: TaskGroup) -> None:
        """Start, adjust and end runtimes as allocations come, change and go."""
        table = await self._context.bus.table(m.Allocation)
        async for change in table.watch(subjects.allocation_key(self._context.instance, "*")):
            await self._follow(change.key.removeprefix(f"{self._context.instance}."), change.value, tasks)

    async def _follow(self, job_uid: str, allocation: m.Allocation | None, tasks: TaskGroup) -> None:
        runtime = self._jobs.get(job_uid)
        if allocation is None:
            if runtime is not None:
                await runtime.stop()
            return
        if runtime is None:
            record = await (await self._context.bus.table(m.JobRecord)).get(job_uid)
            if record is None or record.state is m.JobState.ENDED or self._context.stopping.is_set():
                return
            runtime = self._jobs[job_uid] = JobRuntime(self._context, record, self._policies)
            tasks.start_soon(self._run, job_uid, runtime, tasks)
        runtime.allocate(allocation)

    async def drain(self) -> None:
        """Give back every trajectory."""
        for runtime in list(self._jobs.values()):
            await runtime.stop()
        while self._jobs:
            await self._ended.wait()

    async def _run(self, job_uid: str, runtime: JobRuntime, tasks: TaskGroup) -> None:
        try:
            await runtime.run()
        finally:
            del self._jobs[job_uid]
            self._ended.set()
            self._ended = anyio.Event()
        # An allocation that came back while this runtime was ending went to one that no longer listened.
        table = await self._context.bus.table(m.Allocation)
        again = await table.get(subjects.allocation_key(self._context.instance, job_uid))
        await self._follow(job_uid, again, tasks)
