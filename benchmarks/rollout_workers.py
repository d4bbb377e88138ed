"""Rollout services as real processes, between a trainer's own gathering and servers of their own, for measurements.

There is no scheduler: the measurement says what each instance may use, so that what moves where is its choice alone. A
step's trajectories are issued, watched over and announced again by the trainer's :class:`Gatherer`, as in a job. Nothing is
scored.
"""

import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import anyio
import psutil
from anyio.abc import TaskGroup

from libs.common import manifest, subjects
from libs.common import messages as m
from libs.common.bus import Bus
from libs.common.errors import JigsawError
from libs.common.job import Job
from libs.common.logging import configure
from libs.common.policy_store import PolicyStore
from libs.common.settings import Addresses, NodeSettings, default_settings
from libs.common.store import TrajectoryStore
from libs.common.tokens import PolicyVersion
from libs.common.trajectory import Record, TrajectoryId, TrajectorySpec
from libs.environments.registry import make_environment
from libs.node.processes import planned
from libs.node.servers import start_nats, start_valkey
from services.trainer.gather import Gatherer, Waits
from services.trainer.job_data import JobData
from services.trainer.steps import StepLedger

POLICY = PolicyVersion(0)  # of no incarnation: no trainer holds the job
READY_S = 180.0
LOOK_S = 0.001
"""Between two looks into the store."""
ASK_S = 30.0

Condition = Callable[[list[Record]], bool]


class RolloutWorkers:
    """A job's rollout instances, one per core of this machine, and the job's step that they work on."""

    def __init__(self, uid: str, job: Job, *, cores: Sequence[int], bus: Bus, store: TrajectoryStore, model: Path) -> None:
        self.uid, self.job, self.cores, self.bus, self.store = uid, job, cores, bus, store
        self.instances = [f"rollout-{index}" for index in range(len(self.cores))]
        self._revision = 0
        environment = make_environment(job.environment, allow=[])
        self._data = JobData(
            job, job_uid=uid, model=model, environment=environment, max_context=job.model.max_context or 512
        )
        self._log = configure(instance="benchmark", level="error")

    async def allow(self, instance: str, *, max_running: int) -> None:
        """Let an instance take so many trajectories, on the core that is its own; returns once it is in force there."""
        self._revision += 1
        revision, unit = self._revision, self.instances.index(instance)
        allocation = m.Allocation(
            sender="benchmark",
            instance=instance,
            job_uid=self.uid,
            units=(unit,),
            memory_mb=self.job.rollout.kv_memory_mb,
            max_running=max_running,
            revision=revision,
        )
        await (await self.bus.table(m.Allocation)).put(subjects.allocation_key(instance, self.uid), allocation)
        await self.engine_ready(instance, revision=revision)

    async def engine_ready(self, instance: str, *, revision: int = 1) -> None:
        """Wait until an instance has an engine with the allocation of this revision or a later one."""
        workers = await self.bus.table(m.Worker)
        with _within(READY_S, f"{instance} has no engine"):
            async for change in workers.watch(instance):
                if change.value is not None and change.value.revisions.get(self.uid, 0) >= revision:
                    return

    @asynccontextmanager
    async def step(self) -> AsyncIterator[list[TrajectoryId]]:
        """A step's trajectories, issued and looked after as long as the context lasts; then forgotten."""
        specs = self._data.training_groups(self.job.rollout.batch, step=POLICY.step)
        ids = [spec.id for group in specs for spec in group]
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._gather, StepLedger(step=POLICY.step, replacements=0), specs)
                yield ids
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await self.bus.purge(m.StartRollout, job_uid=self.uid)
                await self.bus.purge(m.TrajectoryFinished, job_uid=self.uid)
                await self.store.forget(ids, incarnation=0)

    async def _gather(self, ledger: StepLedger, specs: Sequence[Sequence[TrajectorySpec]]) -> None:
        gatherer = Gatherer(
            bus=self.bus,
            store=self.store,
            job_uid=self.uid,
            instance="benchmark",
            waits=Waits.of(self.job.rollout.lease_s),
            log=self._log,
        )
        settled = await self.bus.pull(m.TrajectorySettled, subjects.settled_consumer(self.uid))
        await gatherer.gather(ledger, specs, data=self._data, policy=POLICY, settled=settled, on_progress=lambda: None)

    async def ask(self, instance: str, request: m.Message) -> None:
        """Ask an instance for something and wait for its answer."""
        await self.bus.request(instance, request, timeout_s=ASK_S)

    async def records(self, ids: Sequence[TrajectoryId]) -> list[Record]:
        """What the store has of them; those that aren't issued yet are left out."""
        return [record for record in await self.store.read(ids) if record is not None]

    async def until(self, ids: Sequence[TrajectoryId], condition: Condition, *, look_s: float = LOOK_S) -> float:
        """Look into the store until the condition holds of all of them; returns when that was seen (monotonic seconds)."""
        with _within(READY_S, "the trajectories don't get as far as they should"):
            while True:
                records = await self.records(ids)
                if len(records) == len(ids) and condition(records):
                    return time.monotonic()
                await anyio.sleep(look_s)

    def process(self, instance: str) -> psutil.Process:
        """The service process of an instance."""
        for child in psutil.Process().children():
            if instance in child.cmdline():
                return child
        raise JigsawError(f"{instance} isn't running")


@asynccontextmanager
async def rollout_workers(home: Path, job: Job, model: Path) -> AsyncIterator[RolloutWorkers]:
    """Servers, one rollout service per core, and the job with a policy: the model's folder as it is.

    Every instance has its engine loaded and may take nothing yet. Call it from the main thread.
    """
    settings = default_settings(home)
    uid = f"{job.name}-0"
    log = configure(instance="benchmark", level="error")
    with start_nats(home) as nats, start_valkey(home) as valkey:
        for server in (nats, valkey):
            await anyio.to_thread.run_sync(server.wait_until_answers)
        addresses = Addresses(nats.url, valkey.url)
        bus = await Bus.connect(nats.url, instance="benchmark", log=log)
        store = await TrajectoryStore.connect(valkey.url)
        try:
            await store.install(replace=True)
            await bus.set_up()
            await _hold(bus, uid, job, PolicyStore(settings.policies, mirror=home / "mirror"), model)
            workers = RolloutWorkers(uid, job, cores=settings.device.cores, bus=bus, store=store, model=model)
            async with anyio.create_task_group() as tasks, _services(tasks, workers, settings, addresses):
                async with anyio.create_task_group() as loading:
                    for instance in workers.instances:
                        loading.start_soon(partial(workers.allow, instance, max_running=0))
                yield workers
        finally:
            with anyio.CancelScope(shield=True):
                await store.close()
                await bus.close()


async def _hold(bus: Bus, uid: str, job: Job, policies: PolicyStore, model: Path) -> None:
    """What scheduler and trainer would have put where the instances look."""
    record = m.JobRecord(sender="benchmark", job_uid=uid, job=job, state=m.JobState.RUNNING, submitted_at=time.time())
    await (await bus.table(m.JobRecord)).put(uid, record)
    await bus.ensure_consumer(m.StartRollout, subjects.tasks_consumer(uid), job_uid=uid)
    await bus.ensure_consumer(m.TrajectorySettled, subjects.settled_consumer(uid), job_uid=uid)
    shutil.copytree(
        model, policies.prepare(uid, POLICY), ignore=shutil.ignore_patterns(manifest.MANIFEST), dirs_exist_ok=True
    )
    digest = policies.complete(uid, POLICY)
    published = m.PolicyPublished(
        sender="benchmark", job_uid=uid, version=POLICY, url=policies.url(uid, POLICY), digest=digest
    )
    await (await bus.table(m.PolicyPublished)).put(uid, published)


@asynccontextmanager
async def _services(
    tasks: TaskGroup, workers: RolloutWorkers, settings: NodeSettings, addresses: Addresses
) -> AsyncIterator[None]:
    """The rollout services, started again when they die, and gone at the end."""
    services = planned(
        ["rollout"] * len(workers.instances), settings, addresses, log=configure(instance="benchmark", level="error")
    )
    for service in services:
        tasks.start_soon(service.keep_running)
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            for service in services:
                service.kill()
                await service.ended()
        tasks.cancel_scope.cancel()


@contextmanager
def _within(seconds: float, otherwise: str) -> Iterator[None]:
    """What takes longer is an error that says so."""
    try:
        with anyio.fail_after(seconds):
            yield
    except TimeoutError:
        raise JigsawError(f"{otherwise}, for {seconds:g} s now") from None
