"""A job's rollout instances on real servers, in the test's own process; each has an engine process of its own."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from libs.common import messages as m
from libs.common import subjects
from libs.common.bus import Bus
from libs.common.job import Job
from libs.common.policy_store import PolicyStore
from libs.common.settings import default_settings
from libs.common.store import TrajectoryStore
from libs.common.streams import stream_of
from libs.common.tokens import PolicyVersion
from libs.common.trajectory import Record, TrajectoryId
from services.rollout.job_runtime import JobRuntime
from tests.contexts import context_of
from tests.tiny_model import build_tiny_model
from tests.trajectories import spec_of

V = PolicyVersion(1, 1)


class Rollouts:
    """A job's rollout instances in this process."""

    def __init__(self, bus: Bus, store: TrajectoryStore, uid: str, folder: Path, job: Job) -> None:
        self.bus, self.store, self.uid, self.folder, self.job = bus, store, uid, folder, job
        self.policies = PolicyStore(str(folder / "policies"), mirror=folder / "mirror")
        self.ids: list[TrajectoryId] = []

    async def publish_policy(self, version: PolicyVersion = V) -> None:
        """Put a version in force."""
        build_tiny_model(self.policies.prepare(self.uid, version))
        digest = self.policies.complete(self.uid, version)
        url = self.policies.url(self.uid, version)
        published = m.PolicyPublished(sender="t", job_uid=self.uid, version=version, url=url, digest=digest)
        await (await self.bus.table(m.PolicyPublished)).put(self.uid, published)

    async def issue(self, count: int, *, policy: PolicyVersion = V, **fields: Any) -> None:
        """Create trajectories and announce them."""
        new = [TrajectoryId(self.uid, 0, sample) for sample in range(len(self.ids), len(self.ids) + count)]
        self.ids += new
        limits = {"max_new_tokens": 100, "max_turns": self.job.rollout.max_turns, "step": policy.step}
        await self.store.create([spec_of(id, **({"seed": id.sample} | limits | fields)) for id in new])
        await self.announce(new, policy=policy)

    async def announce(self, ids: Sequence[TrajectoryId], *, policy: PolicyVersion = V, attempt: int = 0) -> None:
        tasks = [
            m.StartRollout(
                sender="t", job_uid=self.uid, step=policy.step, group=0, sample=id.sample, policy=policy, attempt=attempt
            )
            for id in ids
        ]
        await self.bus.publish_all(tasks)

    @asynccontextmanager
    async def instance(
        self, name: str, *, max_running: int = 64, units: tuple[int, ...] = (0,)
    ) -> AsyncIterator[JobRuntime]:
        """A rollout instance that holds the job."""
        context = await context_of(f"{name}-{self.uid}", default_settings(self.folder), self.bus, self.store)
        record = m.JobRecord(sender="s", job_uid=self.uid, job=self.job, state=m.JobState.RUNNING, submitted_at=0.0)
        runtime = JobRuntime(context, record, self.policies)

        async def adopt(request: m.AdoptTrajectories) -> m.Answer:
            return m.Answer(sender=name, count=await runtime.adopt(request.offers))

        await context.endpoints.answer(m.AdoptTrajectories, adopt)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runtime.run)
            await self.allocate(runtime, units, revision=1, max_running=max_running)
            yield runtime
            await runtime.stop()

    async def allocate(self, runtime: JobRuntime, units: tuple[int, ...], *, revision: int, max_running: int = 64) -> None:
        allocation = m.Allocation(
            sender="s",
            instance="any",
            job_uid=self.uid,
            units=units,
            memory_mb=100,
            max_running=max_running,
            revision=revision,
        )
        await runtime.allocate(allocation)

    async def in_force(self, runtime: JobRuntime, *, revision: int = 1, within_s: float = 20.0) -> None:
        """Until an allocation is applied, so that the instance has an engine and can adopt what it is offered."""
        with anyio.fail_after(within_s):
            while runtime.revision < revision:
                await anyio.sleep(0.01)

    async def records(self) -> list[Record]:
        found = await self.store.read(self.ids)
        return [record for record in found if record is not None]

    async def until(self, condition: Callable[[list[Record]], bool], *, within_s: float = 20.0) -> list[Record]:
        with anyio.fail_after(within_s):
            while not condition(records := await self.records()):
                await anyio.sleep(0.01)
        return records

    async def until_nothing_is_announced(self) -> None:
        """Until the job's instances have dealt with every task that was published."""
        stream, consumer = stream_of(m.StartRollout), subjects.tasks_consumer(self.uid)
        with anyio.fail_after(10.0):
            while (info := await self.bus.js.consumer_info(stream, consumer)).num_pending or info.num_ack_pending:
                await anyio.sleep(0.01)

    async def all_finished(self, *, within_s: float = 20.0) -> list[Record]:
        return await self.until(lambda records: all(record.state == "finished" for record in records), within_s=within_s)
