"""Migration between real engines: a trajectory that was moved about equals the one that was left alone.

Two rollout instances, each with a vLLM engine of its own, hand a batch to and fro by the product's own path: drop at a step
boundary, flush, transfer, adopt, one prefill at the target. The model is fp32, so that equal means the same tokens.
"""

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import structlog

from libs.common import messages as m
from libs.common import subjects
from libs.common.bus import Bus
from libs.common.job import job_from
from libs.common.store import TrajectoryStore
from libs.common.trajectory import Record
from services.rollout.job_runtime import JobRuntime
from tests.rollouts import Rollouts

pytestmark = pytest.mark.timeout(300)

BUSY_S = 150.0
"""Each engine takes about 10 s of its core to load, which is longer on a machine that others use."""

MODES = {"greedy": 0.0, "seeded": 1.0}
SEEDS = (4, 5, 6)
"""Of sampling; each with a prompt of its own, whose answers are long."""
POINTS = (0, 1, 2)
"""Seeds of the points at which a batch is moved."""
MOVES = 3
LONGEST = 300
JOB = {
    "name": "moving",
    "model": {"path": "m", "dtype": "float32"},
    "data": {"task": "t"},
    "rollout": {"max_new_tokens": LONGEST, "kv_memory_mb": 32, "checkpoint_tokens": 4, "checkpoint_ms": 20},
}

Batch = dict[tuple[str, int], Record]
"""The records of one batch, by mode and seed of sampling."""


class Runs(msgspec.Struct, frozen=True):
    """The same batch left alone, and moved at points drawn from each seed."""

    alone: Batch
    moved: dict[int, Batch]


async def play(world: Rollouts, here: str, there: str, runtimes: dict[str, JobRuntime], points: list[int]) -> Batch:
    """Begin a batch on one instance, and move all of it to the other one and back whenever it has come to a point."""
    names = [(mode, seed) for mode in MODES for seed in SEEDS]
    first = len(world.ids)
    for mode, seed in names:
        prompt = [100 + seed, 200, 300, 50, 60, 70]
        await world.issue(1, seed=seed, temperature=MODES[mode], prompt_ids=prompt, max_new_tokens=LONGEST)
    for point in points:
        await world.until(lambda records, at=point: all(len(one.tokens) >= at for one in records[first:]), within_s=BUSY_S)  # type: ignore[misc]
        assert await runtimes[here].release(len(names), target=f"{there}-{world.uid}") == len(names)
        here, there = there, here
    return dict(zip(names, (await world.all_finished(within_s=BUSY_S))[first:], strict=True))


async def play_all(nats_url: str, redis_url: str, folder: Path) -> Runs:
    bus = await Bus.connect(nats_url, instance="test", log=structlog.get_logger())
    store = await TrajectoryStore.connect(redis_url)
    try:
        await bus.set_up()
        await store.install(replace=True)
        uid = "moving"
        await bus.ensure_consumer(m.StartRollout, subjects.tasks_consumer(uid), job_uid=uid)
        world = Rollouts(bus, store, uid, folder, job_from(JOB, file="test"))
        await world.publish_policy()
        other = len(os.sched_getaffinity(0)) - 1
        async with world.instance("a") as a, world.instance("b", max_running=0, units=(other,)) as b:
            for instance in (a, b):
                await world.in_force(instance, within_s=BUSY_S)
            runtimes = {"a": a, "b": b}
            alone = await play(world, "a", "b", runtimes, [])
            shortest = min(len(record.tokens) for record in alone.values())
            moved = {}
            for seed in POINTS:
                points = sorted(random.Random(seed).sample(range(1, shortest * 3 // 4), MOVES))
                moved[seed] = await play(world, "a", "b", runtimes, points)
            return Runs(alone, moved)
    finally:
        await store.close()
        await bus.close()


@pytest.fixture(scope="module")
def runs(nats_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """All of it, with engines that are started once."""
    yield asyncio.run(play_all(nats_url, redis_url, tmp_path_factory.mktemp("moving")))


@pytest.mark.parametrize("points", POINTS)
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_that_was_moved_three_times_equals_the_one_that_was_left_alone(runs: Runs, mode: str, points: int) -> None:
    for seed in SEEDS:
        alone, moved = runs.alone[mode, seed], runs.moved[points][mode, seed]
        assert moved.tokens["id"].tolist() == alone.tokens["id"].tolist()
        np.testing.assert_allclose(moved.tokens["logprob"], alone.tokens["logprob"], rtol=0, atol=1e-4)
        assert (moved.text, moved.stop_reason) == (alone.text, alone.stop_reason)
        assert (moved.moves, moved.claims, moved.deaths, moved.failures) == (MOVES, 1, 0, 0)
