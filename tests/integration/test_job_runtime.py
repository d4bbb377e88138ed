"""One job on rollout instances, with real servers and a replay engine: taking in, handing over, adopting, suspects."""

import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from libs.common import messages as m
from libs.common import subjects
from libs.common.bus import Bus
from libs.common.errors import NodeError
from libs.common.job import Job, job_from
from libs.common.store import TrajectoryStore
from libs.common.tokens import PolicyVersion, sampled
from libs.common.trajectory import Append, Claim, Record, Release
from tests.rollouts import Rollouts, V

LENGTH = 60
SLOW = {"decode_ms": 10.0}


def job_of(**sections: Any) -> Job:
    """Responses of exactly LENGTH tokens, stored every 4 of them."""
    engine_args = {"lengths": {"kind": "uniform", "low": LENGTH, "high": LENGTH}, "vocab_size": 512}
    raw = {
        "name": "small",
        "model": {"path": "m"},
        "data": {"task": "t"},
        "rollout": {"engine": "replay", "max_new_tokens": 100, "checkpoint_tokens": 4, "lease_s": 0.9, "max_turns": 1},
    }
    merged = {name: {**raw.get(name, {}), **section} for name, section in ({"rollout": {}} | sections).items()}  # type: ignore[dict-item]
    merged["rollout"]["engine_args"] = engine_args | merged["rollout"].get("engine_args", {})
    return job_from(raw | merged, file="test")


Open = Callable[[Job], Awaitable[Rollouts]]


@pytest.fixture
def rollouts(bus: Bus, store: TrajectoryStore, job_uid: str, tmp_path: Path) -> Open:
    async def opened(job: Job) -> Rollouts:
        await bus.ensure_consumer(m.StartRollout, subjects.tasks_consumer(job_uid), job_uid=job_uid)
        world = Rollouts(bus, store, job_uid, tmp_path, job)
        await world.publish_policy()
        return world

    return opened


def ids_of(records: Sequence[Record]) -> list[list[int]]:
    return [record.tokens["id"].tolist() for record in records]


async def undisturbed(world: Rollouts, count: int) -> list[list[int]]:
    """What the trajectories are when nothing happens to them."""
    async with world.instance("calm"):
        await world.issue(count)
        return ids_of(await world.all_finished())


def begun(records: list[Record]) -> bool:
    return all(len(record.tokens) >= 8 for record in records)


async def test_what_is_drained_goes_on_elsewhere_from_its_last_token(rollouts: Open) -> None:
    world = await rollouts(job_of(rollout={"engine_args": SLOW}))
    async with world.instance("first"):
        await world.issue(4)
        await world.until(begun)
    stored = await world.records()
    assert {record.state for record in stored} == {"pending"}
    async with world.instance("second"):
        done = await world.all_finished()
    assert [len(record.tokens) for record in done] == [LENGTH] * 4
    for before, after in zip(stored, done, strict=True):
        assert (after.tokens[: len(before.tokens)] == before.tokens).all()  # ids, log-probs and versions
    assert [(record.claims, record.deaths, record.resumes) for record in done] == [(2, 0, 1)] * 4
    assert all(record.recomputed >= len(before.tokens) for record, before in zip(done, stored, strict=True))


async def test_moved_trajectories_equal_undisturbed_ones(rollouts: Open) -> None:
    world = await rollouts(job_of(rollout={"engine_args": SLOW}))
    async with world.instance("source", max_running=4) as source, world.instance("target", max_running=0) as target:
        await world.in_force(target)
        await world.issue(4)
        await world.until(begun)
        assert await source.release(3, target=f"target-{world.uid}") == 3
        moved = await world.until(lambda records: sum(record.owner.startswith("target") for record in records) == 3)
        assert {record.state for record in moved} == {"running"}
        assert await target.release(2, target=f"source-{world.uid}") == 2
        done = await world.all_finished()
    assert sorted(record.moves for record in done) == [0, 1, 2, 2]
    assert all(record.claims == 1 and record.deaths == 0 for record in done)
    other = await rollouts(job_of())
    other.uid = f"{world.uid}-calm"
    await other.bus.ensure_consumer(m.StartRollout, subjects.tasks_consumer(other.uid), job_uid=other.uid)
    await other.publish_policy()
    assert ids_of(done) == await undisturbed(other, 4)


async def test_a_planned_move_is_told_and_is_no_loss(rollouts: Open) -> None:
    world = await rollouts(job_of(rollout={"engine_args": SLOW}))
    with capture_logs() as lines:
        async with world.instance("source") as source, world.instance("target", max_running=0) as target:
            await world.in_force(target)
            await world.issue(2)
            await world.until(begun)
            await source.release(2, target=f"target-{world.uid}")
            await world.until(lambda records: all(record.owner.startswith("target") for record in records))
    told = [(line["log_level"], line["to"]) for line in lines if line["event"] == "trajectory_given_away"]
    assert told[:2] == [("info", f"target-{world.uid}")] * 2
    assert [line for line in lines if line["log_level"] == "warning"] == []


async def test_what_a_target_does_not_adopt_is_anyones_after_a_moment(rollouts: Open) -> None:
    world = await rollouts(job_of(rollout={"engine_args": SLOW}))
    async with world.instance("source") as source:
        await world.issue(2)
        await world.until(begun)
        assert await source.release(2, target="nobody") == 2
        owners = {record.owner for record in await world.records()}
        assert owners == {"nobody"}
        await anyio.sleep(2.1)
        assert await world.store.states(world.ids) == ["expired", "expired"]
        await world.announce(world.ids, attempt=1)
        done = await world.all_finished()
    assert [len(record.tokens) for record in done] == [LENGTH] * 2


async def test_an_instance_that_cannot_run_a_job_adopts_nothing(rollouts: Open) -> None:
    world = await rollouts(job_of())
    async with world.instance("idle") as runtime:
        await runtime.stop()
        with pytest.raises(NodeError, match="no engine"):
            await runtime.adopt([m.Offer(0, 0, 1)])


async def test_a_paused_instance_keeps_what_it_has_and_goes_on(rollouts: Open) -> None:
    world = await rollouts(job_of(rollout={"engine_args": SLOW}))
    async with world.instance("one") as runtime:
        await world.issue(2)
        await world.until(begun)
        await world.allocate(runtime, (), revision=2)
        await world.in_force(runtime, revision=2)
        await anyio.sleep(0.1)
        paused = await world.records()
        await anyio.sleep(1.2)  # longer than a lease
        assert ids_of(await world.records()) == ids_of(paused)
        await world.allocate(runtime, (0,), revision=3)
        done = await world.all_finished()
    assert all(record.claims == 1 for record in done)


async def test_an_engine_that_is_killed_is_a_death_to_those_in_it_and_they_go_on(rollouts: Open) -> None:
    world = await rollouts(job_of(rollout={"engine_args": SLOW}))
    async with world.instance("one"):
        await world.issue(3)
        await world.until(begun)
        kill_engine()
        done = await world.all_finished()
    assert [(record.deaths, record.failures, record.resumes) for record in done] == [(1, 0, 1)] * 3
    assert [len(record.tokens) for record in done] == [LENGTH] * 3


async def test_one_that_waits_for_a_tool_does_not_die_with_the_engine(rollouts: Open) -> None:
    environment = {"name": "scripted", "args": {"replies": ["more"], "latency_s": [3.0, 3.0]}}
    world = await rollouts(job_of(environment=environment, rollout={"max_turns": 2, "max_new_tokens": 200}))
    async with world.instance("one"):
        await world.issue(2, max_new_tokens=200)
        await world.until(lambda records: all(len(record.tokens) == LENGTH for record in records))
        kill_engine()
        done = await world.all_finished()
    assert [(record.deaths, record.claims, record.turns) for record in done] == [(0, 1, 2)] * 2


async def test_a_suspect_runs_alone(rollouts: Open) -> None:
    world = await rollouts(job_of(rollout={"engine_args": SLOW}))
    await world.issue(5)
    for _ in range(2):  # two workers that are never heard of again
        (claim,) = await world.store.claim(world.ids[:1], owner="dead", ttl_ms=-1)
        assert isinstance(claim, Claim)
    beside: set[str] = set()

    def watched(records: list[Record]) -> bool:
        suspect, *others = records
        if suspect.state == "running" and len(suspect.tokens):
            beside.update(record.state for record in others)
        return all(record.state == "finished" for record in records)

    async with world.instance("one"):
        done = await world.until(watched)
    assert beside
    assert "running" not in beside
    assert [record.deaths for record in done] == [2, 0, 0, 0, 0]


async def test_one_that_kills_its_engine_alone_is_failed_and_the_others_go_on(rollouts: Open) -> None:
    world = await rollouts(job_of(rollout={"engine_args": SLOW | {"deadly_seeds": [1]}}))
    async with world.instance("one"):
        await world.issue(3)
        one, poison, other = await world.until(
            lambda records: [record.state for record in records] == ["finished", "failed", "finished"], within_s=60
        )
    assert (
        poison.error
        == "killed its worker twice while it ran alone; last error: engine: the engine process ended: exit code 1"
    )
    assert poison.deaths == 4
    assert [(record.failures, len(record.tokens)) for record in (one, other)] == [(0, LENGTH)] * 2
    assert all(1 <= record.deaths <= 2 for record in (one, other))  # not beside it again unless they were taken in with it


async def test_tasks_of_a_policy_that_is_still_being_loaded_wait_for_it(rollouts: Open) -> None:
    world = await rollouts(job_of())
    async with world.instance("one"):
        await world.issue(1)
        await world.all_finished()
        later = PolicyVersion(2, 1)
        await world.issue(3, policy=later)
        await anyio.sleep(0.3)
        assert {record.state for record in (await world.records())[1:]} == {"pending"}
        await world.publish_policy(later)
        done = await world.all_finished()
    assert {int(step) for record in done[1:] for step in record.tokens["step"]} == {2}


async def test_tokens_keep_the_version_they_came_from_when_the_trainer_is_another(rollouts: Open) -> None:
    """A trainer that starts over publishes the same step anew: what is running goes on, under the new incarnation."""
    world = await rollouts(job_of(rollout={"engine_args": SLOW}))
    async with world.instance("one"):
        await world.issue(3)
        before = await world.until(begun)
        await world.publish_policy(PolicyVersion(V.step, V.incarnation + 1))
        done = await world.all_finished()
    for record, early in zip(done, before, strict=True):
        assert (record.tokens[: len(early.tokens)] == early.tokens).all()
        incarnations = record.tokens["incarnation"].tolist()
        assert incarnations == sorted(incarnations)
        assert set(incarnations) == {V.incarnation, V.incarnation + 1}
        assert (record.claims, len(record.tokens)) == (1, LENGTH)


async def test_a_task_that_comes_more_than_once_is_one_sample(rollouts: Open) -> None:
    world = await rollouts(job_of(rollout={"engine_args": SLOW}))
    async with world.instance("one"):
        await world.issue(2)
        await world.until(begun)
        await world.announce(world.ids, attempt=1)
        await world.all_finished()
        await world.announce(world.ids, attempt=2)
        await world.until_nothing_is_announced()
        records = await world.records()
    assert [(one.state, one.claims, len(one.tokens)) for one in records] == [("finished", 1, LENGTH)] * 2


async def test_a_job_that_ends_under_its_trajectories_ends_them_and_nothing_of_it_comes_back(
    rollouts: Open, redis_url: str
) -> None:
    """As when a job's last step is done while copies of its tasks are still queued, or running somewhere."""
    world = await rollouts(job_of(rollout={"engine_args": SLOW}))
    async with world.instance("one", max_running=2) as runtime:
        await world.issue(4)
        await world.until(lambda records: begun(records[:2]))
        await world.bus.drop_consumer(m.StartRollout, subjects.tasks_consumer(world.uid))
        await world.bus.purge(m.StartRollout, job_uid=world.uid)
        await world.store.forget_job(world.uid)
        began = time.monotonic()
        await runtime.stop()
    assert time.monotonic() - began < 5.0
    assert not engines()
    async with Redis.from_url(redis_url) as client:
        assert await client.keys(f"*{world.uid}*") == []


async def test_nothing_is_generated_under_the_policy_of_another_step(rollouts: Open) -> None:
    world = await rollouts(job_of())
    later, successors = PolicyVersion(V.step + 1, 1), PolicyVersion(V.step, 2)
    await world.issue(1)
    await world.publish_policy(later)
    async with world.instance("one"):
        await world.announce(world.ids, policy=later, attempt=1)
        await anyio.sleep(0.5)
        assert await world.store.states(world.ids) == ["pending"]
        await world.publish_policy(successors)  # of a trainer that began again at an earlier checkpoint
        await world.announce(world.ids, policy=successors, attempt=2)
        (done,) = await world.all_finished()
    assert set(done.tokens["step"].tolist()) == {V.step}


async def test_one_that_has_tokens_of_another_steps_policy_begins_again_from_its_prompt(rollouts: Open) -> None:
    world = await rollouts(job_of())
    await world.issue(1)
    (claim,) = await world.store.claim(world.ids, owner="before", ttl_ms=5000)
    assert isinstance(claim, Claim)
    other = sampled([1, 2, 3], [-1.0] * 3, PolicyVersion(V.step + 1, 1))
    await world.store.write([Append(world.ids[0], claim.epoch, 0, other), Release(world.ids[0], claim.epoch)])
    async with world.instance("one"):
        (done,) = await world.all_finished()
    assert done.tokens["step"].tolist() == [V.step] * LENGTH
    assert (done.claims, done.failures, done.deaths) == (2, 0, 0)


def kill_engine() -> None:
    """End the replay engine that this process has running."""
    (engine,) = engines()
    engine.kill()


def engines() -> list[psutil.Process]:
    """The engine processes of this test's instances."""
    return [each for each in psutil.Process().children() if "services.rollout.engine_process" in each.cmdline()]
