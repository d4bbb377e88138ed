"""Trainers as processes: one is frozen in the middle of a job, another goes on with it, the first wakes up.

The test plays the scheduler, the rollout workers and the scorers; training is a replay, whose policy is a digest of all that
it was trained on.
"""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from redis.asyncio import Redis

from libs.common import messages as m
from libs.common import subjects
from libs.common.bus import Bus
from libs.common.job import Job, job_from
from libs.common.settings import Addresses, default_settings
from libs.common.store import TrajectoryStore
from libs.common.tokens import sampled
from libs.common.trajectory import Claim, Finish, Score, TrajectoryId
from services.trainer.checkpoints import Checkpoints
from tests.service_processes import Services, services
from tests.tiny_model import build_tiny_model
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)

ROWS, BATCH, GROUP, STEPS, CHECKPOINT = 4, 2, 2, 4, 2


def job_of(model: Path, folder: Path) -> Job:
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": str(row), "answer": str(row)}) + "\n" for row in range(ROWS)))
    raw = {
        "name": "small",
        "model": {"path": str(model)},
        "data": {"path": str(data)},
        "rollout": {"engine": "replay", "batch": BATCH, "group": GROUP},
        "train": {"engine": "replay", "steps": STEPS, "checkpoint_every": CHECKPOINT, "keep_last": 9},
    }
    return job_from(raw, file="test")


class World:
    """Everything around the trainers of one job."""

    def __init__(self, bus: Bus, store: TrajectoryStore, uid: str, job: Job, trainers: Services) -> None:
        self.bus, self.store, self.uid, self.job, self.trainers = bus, store, uid, job, trainers
        self.allowed = 0
        self.waiting: dict[int, int] = {}
        self.rows: dict[int, set[str]] = {}

    async def give_to(self, trainer: str, *, revision: int) -> None:
        """As the scheduler does."""
        record = m.JobRecord(
            sender="s", job_uid=self.uid, job=self.job, state=m.JobState.RUNNING, submitted_at=0.0, trainer=trainer
        )
        await (await self.bus.table(m.JobRecord)).put(self.uid, record)
        allocation = m.Allocation(
            sender="s", instance=trainer, job_uid=self.uid, units=(0,), memory_mb=100, max_running=1, revision=revision
        )
        await (await self.bus.table(m.Allocation)).put(subjects.allocation_key(trainer, self.uid), allocation)

    async def take_from(self, trainer: str) -> None:
        await (await self.bus.table(m.Allocation)).delete(subjects.allocation_key(trainer, self.uid))

    async def clean_up(self) -> None:
        """As the scheduler does when a job has ended."""
        record = await (await self.bus.table(m.JobRecord)).get(self.uid)
        assert record is not None
        await (await self.bus.table(m.JobRecord)).put(self.uid, msgspec.structs.replace(record, state=m.JobState.ENDED))
        await self.bus.drop_consumer(m.StartRollout, subjects.tasks_consumer(self.uid))
        await self.bus.drop_consumer(m.TrajectorySettled, subjects.settled_consumer(self.uid))
        for kind in (m.StartRollout, m.TrajectoryFinished, m.TrajectorySettled):
            await self.bus.purge(kind, job_uid=self.uid)
        await self.store.forget_job(self.uid)

    async def play(self) -> None:
        """Generate and score what is asked for, of the steps that are allowed; the others' tasks wait."""
        puller = await self.bus.pull(m.StartRollout, subjects.tasks_consumer(self.uid))
        while True:
            for delivery in await puller.fetch(16, wait_s=1.0):
                task = delivery.message
                assert isinstance(task, m.StartRollout)
                self.waiting[task.step] = task.policy.incarnation
                if task.step >= self.allowed:
                    await delivery.retry(after_s=0.1)
                    continue
                await self._settle(task)
                await delivery.ack()

    async def _settle(self, task: m.StartRollout) -> None:
        id = TrajectoryId(self.uid, task.group, task.sample)
        (claim,) = await self.store.claim([id], owner="w", ttl_ms=5000)
        if not isinstance(claim, Claim):
            return
        self.rows.setdefault(task.step, set()).add(claim.spec.answer)
        tokens = sampled([task.group, task.sample, 7], [-1.0] * 3, task.policy)
        reward = float(task.sample % 2)
        await self.store.write([Finish(id, claim.epoch, 0, tokens, "stop", "text", 1), Score(id, claim.epoch, reward, "")])
        await self.bus.publish(m.following(task, m.TrajectorySettled, sender="w", state="scored"))

    async def until_step_waits(self, step: int, *, incarnation: int) -> None:
        await until(lambda: self.waiting.get(step) == incarnation, 30.0)

    async def endings(self, *, count: int = 1) -> list[m.TrainingEnded]:
        """What trainers have said about the job's end, once so many have."""
        puller = await self.bus.pull(m.SubmitJob, subjects.jobs_consumer(1))
        found: list[Any] = []
        async with asyncio.timeout(30.0):
            while len(found) < count:
                for delivery in await puller.fetch(8, wait_s=1.0):
                    found.append(delivery.message)
                    await delivery.ack()
        return [*found, *[delivery.message for delivery in await puller.fetch(8, wait_s=0.1)]]

    async def pointer(self) -> m.PolicyPublished | None:
        return await (await self.bus.table(m.PolicyPublished)).get(self.uid)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("job")
    return job_of(build_tiny_model(folder / "model"), folder)


@pytest.fixture
def addresses(nats_url: str, redis_url: str) -> Addresses:
    return Addresses(nats_url, redis_url)


@pytest.fixture
async def world(bus: Bus, store: TrajectoryStore, job: Job, tmp_path: Path, addresses: Addresses) -> AsyncIterator[World]:
    """Two trainers on one home, the first of which has the job."""
    uid = f"job-{uuid4().hex[:8]}"
    await bus.take_job_queue(subjects.jobs_consumer(1))
    await bus.ensure_consumer(m.StartRollout, subjects.tasks_consumer(uid), job_uid=uid)
    await bus.ensure_consumer(m.TrajectorySettled, subjects.settled_consumer(uid), job_uid=uid)
    async with services(tmp_path, default_settings(tmp_path), addresses) as trainers:
        found = World(bus, store, uid, job, trainers)
        playing = asyncio.create_task(found.play())
        await asyncio.gather(trainers.start("trainer", "t0"), trainers.start("trainer", "t1"))
        await found.give_to("t0", revision=1)
        yield found
        playing.cancel()


async def replace(world: World) -> None:
    """Let the first trainer come to the middle of the step after a checkpoint, freeze it, and give the job to the other."""
    world.allowed = CHECKPOINT
    await world.until_step_waits(CHECKPOINT, incarnation=1)
    world.trainers.send_all("t0", signal.SIGSTOP)
    await world.give_to("t1", revision=2)
    await world.until_step_waits(CHECKPOINT, incarnation=2)


async def check_that_all_is_the_successors(world: World, folder: Path) -> None:
    (ended,) = await world.endings()
    assert (ended.sender, ended.incarnation, ended.outcome) == ("t1", 2, m.Outcome.SUCCEEDED)
    job = folder / "jobs" / world.uid
    versions = [(version.step, version.incarnation) for version in Checkpoints(job / "checkpoints").versions()]
    assert versions == [(CHECKPOINT, 1), (STEPS, 2)]
    assert json.loads((job / "model" / "replay.json").read_text())["step"] == STEPS
    steps = [json.loads(line)["step"] for line in (job / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(STEPS))
    for first in (0, 2):  # two steps are an epoch
        assert world.rows[first] | world.rows[first + 1] == {str(row) for row in range(ROWS)}


async def test_one_that_wakes_while_its_successor_works_publishes_and_deletes_nothing(world: World, tmp_path: Path) -> None:
    await replace(world)
    world.allowed = CHECKPOINT + 1
    await world.until_step_waits(CHECKPOINT + 1, incarnation=2)
    records = await world.store.members(world.uid)
    world.trainers.send_all("t0", signal.SIGCONT)
    await until(lambda: "superseded" in world.trainers.log("t0"), 20.0)
    await world.take_from("t0")
    published = await world.pointer()
    assert published is not None
    assert (published.version.step, published.version.incarnation) == (CHECKPOINT + 1, 2)
    assert set(records) <= set(await world.store.members(world.uid))
    world.allowed = STEPS
    await check_that_all_is_the_successors(world, tmp_path)


async def test_one_that_wakes_after_the_end_brings_nothing_back(world: World, tmp_path: Path, redis_url: str) -> None:
    await replace(world)
    world.allowed = STEPS
    await check_that_all_is_the_successors(world, tmp_path)
    await world.take_from("t1")
    await world.clean_up()
    world.trainers.send_all("t0", signal.SIGCONT)
    await until(lambda: "superseded" in world.trainers.log("t0"), 20.0)
    await world.take_from("t0")
    async with Redis.from_url(redis_url) as client:
        assert await client.keys(f"*{world.uid}*") == []


async def test_a_training_process_that_dies_while_rollout_goes_on_is_replaced_meanwhile(world: World) -> None:
    world.allowed = CHECKPOINT
    await world.until_step_waits(CHECKPOINT, incarnation=1)
    (child,) = world.trainers.children("t0")
    child.kill()
    await world.until_step_waits(CHECKPOINT, incarnation=2)
    world.allowed = STEPS
    (ended,) = await world.endings()
    assert (ended.sender, ended.incarnation, ended.outcome) == ("t0", 2, m.Outcome.SUCCEEDED)


async def test_one_whose_training_process_is_gone_when_it_wakes_does_not_take_the_job_back(world: World) -> None:
    await replace(world)
    for child in world.trainers.children("t0"):
        child.kill()
    world.trainers.send_all("t0", signal.SIGCONT)
    await until(lambda: "superseded" in world.trainers.log("t0"), 20.0)
    assert await world.store.holder(world.uid) == 2
