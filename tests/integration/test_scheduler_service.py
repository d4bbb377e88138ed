"""The scheduler service on a real bus and store: from a submitted job to its one terminal event, and through a restart."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from nats.js.errors import NotFoundError

from libs.common import messages as m
from libs.common import subjects
from libs.common.bus import Bus
from libs.common.service import Context
from libs.common.settings import NodeSettings, default_settings
from libs.common.store import TrajectoryStore
from libs.common.tokens import PolicyVersion
from libs.common.trajectory import TrajectoryId, TrajectorySpec
from services.scheduler.service import Tables, serve
from tests.contexts import context_of
from tests.scheduling import job, progress, worker

PATIENCE_S = 15.0


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    """Wait for something to become so."""
    with anyio.fail_after(PATIENCE_S):
        while not await true():
            await anyio.sleep(0.02)


class Node:
    """What a test sees of the world around a scheduler."""

    def __init__(self, context: Context, tables: Tables) -> None:
        self.context, self.bus, self.tables = context, context.bus, tables

    async def announce(self) -> None:
        """A trainer and two rollout workers on one device of two units."""
        for some in (worker("r0", m.Role.ROLLOUT), worker("r1", m.Role.ROLLOUT), worker("t0", m.Role.TRAINER)):
            await self.tables.workers.put(some.sender, some)

    async def submit(self, uid: str) -> None:
        await self.bus.publish(m.SubmitJob(sender="cli", job_uid=uid, job=job(), submitted_at=time.time()))

    async def told(self, uid: str, phase: m.Phase) -> None:
        await self.tables.progress.put(uid, progress(uid, phase).progress)

    async def state(self, uid: str) -> m.JobState | None:
        record = await self.tables.jobs.get(uid)
        return record.state if record else None

    async def units(self, uid: str) -> dict[str, tuple[int, ...]]:
        held = await self.tables.allocations.all()
        return {a.instance: a.units for _, a in sorted(held.items()) if a.job_uid == uid}

    async def until_state(self, uid: str, state: m.JobState) -> None:
        async def reached() -> bool:
            return await self.state(uid) is state

        await until(reached)

    async def until_units(self, uid: str, units: dict[str, tuple[int, ...]]) -> None:
        async def reached() -> bool:
            return await self.units(uid) == units

        await until(reached)


@asynccontextmanager
async def serving(node: Node) -> AsyncIterator[None]:
    """The scheduler service at work; it has stopped cleanly at the end."""
    node.context.stopping = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve, node.context)
        yield
        node.context.stopping.set()


@pytest.fixture
async def node(bus: Bus, store: TrajectoryStore, tmp_path: Path) -> Node:
    context = await context_of("scheduler-0", default_settings(tmp_path), bus, store)
    return Node(context, await Tables.open(context))


async def test_a_job_runs_through_its_stages_to_one_terminal_event(node: Node, store: TrajectoryStore, job_uid: str) -> None:
    next_uid = f"{job_uid}-next"
    async with serving(node):
        await node.submit(job_uid)
        await node.until_state(job_uid, m.JobState.QUEUED)
        await node.announce()
        await node.until_units(job_uid, {"r0": (), "r1": (), "t0": (0, 1)})
        await node.submit(next_uid)
        await node.told(job_uid, m.Phase.ROLLOUT)
        await node.until_units(job_uid, {"r0": (0,), "r1": (1,), "t0": ()})
        await leave_things_behind(node, store, job_uid)
        await node.bus.publish(m.TrainingEnded(sender="t0", incarnation=1, job_uid=job_uid, outcome=m.Outcome.SUCCEEDED))
        await node.until_state(job_uid, m.JobState.ENDED)
        await node.until_units(next_uid, {"r0": (), "r1": (), "t0": (0, 1)})
    assert await node.units(job_uid) == {}
    assert [ended.outcome for ended in await node.bus.history(m.JobEnded, job_uid=job_uid)] == [m.Outcome.SUCCEEDED]
    with pytest.raises(NotFoundError):
        await node.bus.client.jetstream().consumer_info("TASKS", subjects.tasks_consumer(job_uid))
    assert await node.bus.history(m.Decision, device="cpu")
    assert await store.members(job_uid) == []
    info = await node.bus.client.jetstream().stream_info("TASKS", subjects_filter=f"tasks.{job_uid}")
    assert not info.state.subjects


async def leave_things_behind(node: Node, store: TrajectoryStore, uid: str) -> None:
    """A task on the bus and a record in the store, reachable through the consumers of a running job."""
    spec = TrajectorySpec(
        id=TrajectoryId(uid, 0, 0), step=0, prompt="", prompt_ids=[1], answer="", row={}, seed=0, temperature=1.0,
        max_new_tokens=1, max_turns=1, max_attempts=1,
    )  # fmt: skip
    await store.create([spec])
    await node.bus.publish(m.StartRollout(sender="t0", job_uid=uid, step=0, group=0, sample=0, policy=PolicyVersion(0)))
    pull = await node.bus.pull(m.StartRollout, subjects.tasks_consumer(uid))
    assert len(await pull.fetch(1, wait_s=2.0)) == 1
    await node.bus.pull(m.TrajectorySettled, subjects.settled_consumer(uid))


async def test_a_cancelled_job_is_over_within_seconds(node: Node, job_uid: str) -> None:
    async with serving(node):
        await node.announce()
        await node.submit(job_uid)
        await node.until_state(job_uid, m.JobState.RUNNING)
        started = time.monotonic()
        await node.bus.publish(m.CancelJob(sender="cli", job_uid=job_uid, reason="enough"))
        await node.until_state(job_uid, m.JobState.ENDED)
        assert time.monotonic() - started < 3.0
    record = await node.tables.jobs.get(job_uid)
    assert record is not None
    assert (record.outcome, record.reason) == (m.Outcome.CANCELLED, "enough")
    assert await node.units(job_uid) == {}


async def test_a_restarted_scheduler_goes_on_where_it_was(node: Node, job_uid: str) -> None:
    async with serving(node):
        await node.announce()
        await node.submit(job_uid)
        await node.until_state(job_uid, m.JobState.RUNNING)
    before = await node.tables.allocations.all()
    await node.submit(job_uid)
    await node.told(job_uid, m.Phase.ROLLOUT)
    async with serving(node):
        await node.until_units(job_uid, {"r0": (0,), "r1": (1,), "t0": ()})
        after = await node.tables.allocations.all()
        await node.bus.publish(
            m.TrainingEnded(sender="t0", incarnation=1, job_uid=job_uid, outcome=m.Outcome.FAILED, reason="disk full")
        )
        await node.until_state(job_uid, m.JobState.ENDED)
    assert min(a.revision for a in after.values()) > max(a.revision for a in before.values())
    assert [ended.reason for ended in await node.bus.history(m.JobEnded, job_uid=job_uid)] == ["disk full"]


async def test_an_ending_that_a_crash_cut_short_is_completed(node: Node, job_uid: str) -> None:
    async with serving(node):
        await node.announce()
        await node.submit(job_uid)
        await node.until_state(job_uid, m.JobState.RUNNING)
    ended = m.JobEnded(sender="s", job_uid=job_uid, outcome=m.Outcome.FAILED, reason="stalled", ended_at=time.time())
    await node.bus.publish(ended)
    async with serving(node):
        await node.until_state(job_uid, m.JobState.ENDED)
    assert await node.units(job_uid) == {}
    assert await node.bus.history(m.JobEnded, job_uid=job_uid) == [ended]


async def test_an_impossible_message_becomes_a_dead_letter_and_holds_nobody_up(node: Node, job_uid: str) -> None:
    async with serving(node):
        await node.submit(job_uid)
        await node.until_state(job_uid, m.JobState.QUEUED)
        await node.bus.publish(m.TrainingEnded(sender="t0", incarnation=1, job_uid=job_uid, outcome=m.Outcome.SUCCEEDED))
        await node.submit("not/a.uid")
        await node.submit(f"{job_uid}-next")
        await node.until_state(f"{job_uid}-next", m.JobState.QUEUED)
    (letter,) = await node.bus.history(m.DeadLetter, sender="scheduler-0")
    assert "is queued" in letter.reason
    assert await node.state("not/a.uid") is None


async def test_a_worker_that_falls_silent_is_gone(bus: Bus, store: TrajectoryStore, tmp_path: Path, job_uid: str) -> None:
    impatient = NodeSettings(
        home=str(tmp_path),
        device=default_settings(tmp_path).device,
        rollout=default_settings(tmp_path).rollout,
        worker_lost_s=1.0,
    )
    context = await context_of("scheduler-0", impatient, bus, store)
    node = Node(context, await Tables.open(context))
    async with serving(node):
        await node.announce()
        await node.submit(job_uid)

        async def all_gone() -> bool:
            return await node.tables.workers.all() == {}

        await until(all_gone)
        await node.until_units(job_uid, {})
        assert await node.state(job_uid) is m.JobState.RUNNING
