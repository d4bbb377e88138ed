"""The reward service against a real bus and store: what it settles, what it refuses to be stopped by."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from libs.common import messages as m
from libs.common import subjects
from libs.common.bus import ACK_WAIT_S, Bus
from libs.common.job import job_from
from libs.common.settings import Addresses, NodeSettings, PluginSettings, default_settings
from libs.common.store import TrajectoryStore
from libs.common.tokens import TOKEN
from libs.common.trajectory import Claim, Finish, Record, Score, TrajectoryId
from services.reward.service import serve
from tests.contexts import context_of
from tests.service_processes import Services, services
from tests.trajectories import spec_of
from tests.waiting import until

PLUGINS = Path(__file__).parents[1] / "plugins"
pytestmark = pytest.mark.timeout(120)


class Scoring:
    """A running reward service and one job."""

    def __init__(self, bus: Bus, store: TrajectoryStore, job_uid: str) -> None:
        self.bus, self.store, self.uid = bus, store, job_uid

    async def job(self, state: m.JobState = m.JobState.RUNNING, **reward: Any) -> None:
        raw = {"name": "t", "model": {"path": "m"}, "data": {"path": "d.jsonl"}, "reward": reward}
        table = await self.bus.table(m.JobRecord)
        await table.put(
            self.uid, m.JobRecord(sender="s", job_uid=self.uid, job=job_from(raw, file="t"), state=state, submitted_at=0.0)
        )

    async def finished(self, sample: int, text: str, **row: Any) -> TrajectoryId:
        """A trajectory that has just finished, and the word of it."""
        id = TrajectoryId(self.uid, 0, sample)
        await self.store.create([spec_of(id, answer="42", row=row)])
        (claim,) = await self.store.claim([id], owner="w", ttl_ms=5000)
        assert isinstance(claim, Claim)
        await self.store.write([Finish(id, claim.epoch, 0, np.zeros(0, TOKEN), "stop", text, 1)])
        await self.announce(sample)
        return id

    async def announce(self, sample: int, attempt: int = 0) -> None:
        await self.bus.publish(
            m.TrajectoryFinished(sender="r", job_uid=self.uid, step=0, group=0, sample=sample, attempt=attempt)
        )

    async def settled(self, id: TrajectoryId) -> Record:
        for _ in range(600):
            (record,) = await self.store.read([id])
            assert record is not None
            if record.state in ("scored", "failed"):
                return record
            await asyncio.sleep(0.1)
        raise AssertionError(f"{id} isn't settled")

    async def told(self, *, count: int) -> list[m.TrajectorySettled]:
        """What the trainer hears, once it has heard so much."""
        puller = await self.bus.pull(m.TrajectorySettled, subjects.settled_consumer(self.uid))
        told: list[m.TrajectorySettled] = []
        while len(told) < count:
            for delivery in await puller.fetch(count):
                assert isinstance(delivery.message, m.TrajectorySettled)
                told.append(delivery.message)
                await delivery.ack()
        return told


def settings_of(folder: Path) -> NodeSettings:
    return msgspec.structs.replace(
        default_settings(folder), plugins=PluginSettings(allow=["jigsaw_test_rewards.*"], folders=[str(PLUGINS)])
    )


@pytest.fixture
async def scoring(bus: Bus, store: TrajectoryStore, job_uid: str, tmp_path: Path) -> AsyncIterator[Scoring]:
    await bus.ensure_consumer(m.TrajectorySettled, subjects.settled_consumer(job_uid), job_uid=job_uid)
    context = await context_of("reward-0", settings_of(tmp_path), bus, store)
    serving = asyncio.create_task(serve(context))
    yield Scoring(bus, store, job_uid)
    assert not serving.done(), "the service has ended"
    context.stopping.set()
    await asyncio.wait_for(serving, 20)


async def test_right_and_wrong_answers_are_scored_and_the_trainer_is_told(scoring: Scoring) -> None:
    await scoring.job(function="last_number")
    right, wrong = await scoring.finished(0, "it is 42"), await scoring.finished(1, "it is 41")
    assert (await scoring.settled(right)).reward == 1.0
    assert (await scoring.settled(wrong)).reward == 0.0
    assert {(told.sample, told.state) for told in await scoring.told(count=2)} == {(0, "scored"), (1, "scored")}


async def test_a_word_that_comes_twice_is_told_again_and_scored_once(scoring: Scoring) -> None:
    await scoring.job(function="last_number")
    id = await scoring.finished(0, "42")
    before = await scoring.settled(id)
    await scoring.announce(0, attempt=1)
    assert {told.attempt for told in await scoring.told(count=2)} == {0, 1}
    after = await scoring.settled(id)
    assert (after.state, after.reward, after.reason) == (before.state, before.reward, before.reason)


@pytest.mark.parametrize("function", ["jigsaw_test_rewards:nothing", "jigsaw_test_nowhere:f"])
async def test_a_scorer_that_cannot_be_loaded_fails_the_sample_and_not_the_service(scoring: Scoring, function: str) -> None:
    await scoring.job(function=function)
    record = await scoring.settled(await scoring.finished(0, "42"))
    assert record.state == "failed"
    assert "can't be loaded" in record.error


async def test_a_job_that_ends_while_it_is_scored_holds_nothing_up(scoring: Scoring) -> None:
    await scoring.job(function="jigsaw_test_rewards:endless", timeout_s=600.0)
    id = await scoring.finished(0, "42")
    await asyncio.sleep(3.0)  # the scorer runs
    started = time.monotonic()
    await scoring.job(state=m.JobState.ENDED, function="last_number")
    other = Scoring(scoring.bus, scoring.store, f"{scoring.uid}-other")
    await other.job(function="last_number")
    assert (await other.settled(await other.finished(0, "42"))).reward == 1.0
    assert time.monotonic() - started < 30
    assert await scoring.store.states([id]) == ["finished"]


@pytest.fixture
async def rewards(tmp_path: Path, nats_url: str, redis_url: str) -> AsyncIterator[Services]:
    """Reward services as processes; none is there yet."""
    async with services(tmp_path, settings_of(tmp_path), Addresses(nats_url, redis_url)) as processes:
        yield processes


async def being_scored(job: Scoring, folder: Path) -> TrajectoryId:
    """A trajectory in whose scorer a worker is, and stays until a file "go" is there."""
    await job.job(function="jigsaw_test_rewards:gated", timeout_s=60.0)
    id = await job.finished(0, "42", folder=str(folder))
    await until((folder / "call-0").exists, 20.0)
    return id


async def test_a_scorer_that_is_killed_at_work_is_called_once_more(scoring: Scoring, tmp_path: Path) -> None:
    id = await being_scored(scoring, tmp_path)
    for worker in workers_of(psutil.Process()):
        worker.kill()
    await until((tmp_path / "call-1").exists, 20.0)
    (tmp_path / "go").touch()
    record = await scoring.settled(id)
    assert (record.state, record.reward) == ("scored", 1.0)
    assert [told.state for told in await scoring.told(count=1)] == ["scored"]


async def test_what_a_killed_service_was_scoring_is_scored_once_by_another(
    bus: Bus, store: TrajectoryStore, job_uid: str, rewards: Services, tmp_path: Path
) -> None:
    await bus.ensure_consumer(m.TrajectorySettled, subjects.settled_consumer(job_uid), job_uid=job_uid)
    job = Scoring(bus, store, job_uid)
    await rewards.start("reward", "r0")
    id = await being_scored(job, tmp_path)
    workers = workers_of(psutil.Process(rewards.processes["r0"].pid))
    rewards.send("r0", signal.SIGKILL)
    await asyncio.gather(rewards.ended("r0"), rewards.start("reward", "r1"))
    await job.announce(0, attempt=1)  # as the trainer does; it would be delivered again, but later
    await until((tmp_path / "call-1").exists, 20.0)
    (tmp_path / "go").touch()
    record = await job.settled(id)
    assert (record.state, record.reward) == ("scored", 1.0)
    assert [(told.sender, told.state) for told in await job.told(count=1)] == [("r1", "scored")]
    await until(lambda: not any(worker.is_running() for worker in workers), 5.0)


async def test_what_a_service_was_scoring_as_it_was_told_to_end_goes_to_another_at_once(
    bus: Bus, store: TrajectoryStore, job_uid: str, rewards: Services, tmp_path: Path
) -> None:
    await bus.ensure_consumer(m.TrajectorySettled, subjects.settled_consumer(job_uid), job_uid=job_uid)
    job = Scoring(bus, store, job_uid)
    await rewards.start("reward", "r0")
    id = await being_scored(job, tmp_path)
    await rewards.start("reward", "r1")
    rewards.send("r0", signal.SIGTERM)
    await until((tmp_path / "call-1").exists, ACK_WAIT_S / 2)
    (tmp_path / "go").touch()
    assert (await job.settled(id)).reward == 1.0
    assert await rewards.ended("r0") == 0
    assert [(told.sender, told.state) for told in await job.told(count=1)] == [("r1", "scored")]


async def test_the_verdict_of_a_service_that_was_frozen_over_another_ones_changes_nothing(
    bus: Bus, store: TrajectoryStore, job_uid: str, rewards: Services, tmp_path: Path
) -> None:
    await bus.ensure_consumer(m.TrajectorySettled, subjects.settled_consumer(job_uid), job_uid=job_uid)
    job = Scoring(bus, store, job_uid)
    await rewards.start("reward", "r0")
    id = await being_scored(job, tmp_path)
    rewards.send("r0", signal.SIGSTOP)
    (record,) = await store.read([id])
    assert record is not None
    assert await store.write([Score(id, record.epoch, 1.0, "the other's")]) == [1]
    (tmp_path / "go").touch()
    rewards.send("r0", signal.SIGCONT)
    assert [(told.sender, told.state) for told in await job.told(count=1)] == [("r0", "scored")]
    (record,) = await store.read([id])
    assert record is not None
    assert (record.state, record.reward, record.reason) == ("scored", 1.0, "the other's")


def workers_of(service: psutil.Process) -> list[psutil.Process]:
    """The processes that its scorers run in."""
    return [child for child in service.children(recursive=True) if "spawn_main" in " ".join(child.cmdline())]
