"""The reward service against a real bus and store: what it settles, what it refuses to be stopped by."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from libs.common import messages as m
from libs.common import subjects
from libs.common.bus import Bus
from libs.common.job import job_from
from libs.common.settings import PluginSettings, default_settings
from libs.common.store import TrajectoryStore
from libs.common.tokens import TOKEN
from libs.common.trajectory import Claim, Finish, Record, TrajectoryId
from services.reward.service import serve
from tests.contexts import context_of
from tests.trajectories import spec_of

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

    async def finished(self, sample: int, text: str) -> TrajectoryId:
        """A trajectory that has just finished, and the word of it."""
        id = TrajectoryId(self.uid, 0, sample)
        await self.store.create([spec_of(id, answer="42")])
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


@pytest.fixture
async def scoring(bus: Bus, store: TrajectoryStore, job_uid: str, tmp_path: Path) -> AsyncIterator[Scoring]:
    await bus.ensure_consumer(m.TrajectorySettled, subjects.settled_consumer(job_uid), job_uid=job_uid)
    settings = msgspec.structs.replace(
        default_settings(tmp_path), plugins=PluginSettings(allow=["jigsaw_test_rewards.*"], folders=[str(PLUGINS)])
    )
    context = await context_of("reward-0", settings, bus, store)
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
    puller = await scoring.bus.pull(m.TrajectorySettled, subjects.settled_consumer(scoring.uid))
    told = set()
    while len(told) < 2:
        for delivery in await puller.fetch(2):
            assert isinstance(delivery.message, m.TrajectorySettled)
            told.add((delivery.message.sample, delivery.message.state))
            await delivery.ack()
    assert told == {(0, "scored"), (1, "scored")}


async def test_a_word_that_comes_twice_is_told_again_and_scored_once(scoring: Scoring) -> None:
    await scoring.job(function="last_number")
    id = await scoring.finished(0, "42")
    before = await scoring.settled(id)
    await scoring.announce(0, attempt=1)
    puller = await scoring.bus.pull(m.TrajectorySettled, subjects.settled_consumer(scoring.uid))
    attempts = set()
    while attempts != {0, 1}:
        for delivery in await puller.fetch(2):
            assert isinstance(delivery.message, m.TrajectorySettled)
            attempts.add(delivery.message.attempt)
            await delivery.ack()
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
