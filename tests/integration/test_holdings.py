"""Following allocations on a real bus: what an instance holds begins, changes and ends with them."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from libs.common import messages as m
from libs.common import subjects
from libs.common.bus import Bus
from libs.common.changes import Changes
from libs.common.holdings import Holdings
from libs.common.service import Context
from libs.common.settings import default_settings
from libs.common.store import TrajectoryStore
from tests.contexts import context_of
from tests.scheduling import job


class FakeHolding:
    """Runs until it is stopped, and no sooner than it is let go."""

    broken = ""

    def __init__(self, record: m.JobRecord) -> None:
        self.uid, self.revision = record.job_uid, 0
        self.changes, self.stopped, self.let_go = Changes(), False, True
        self.anew, self.crash = False, None

    async def allocate(self, allocation: m.Allocation) -> None:
        self.revision = allocation.revision

    async def run(self) -> bool:
        await self.changes.until(lambda: self.stopped and self.let_go)
        if self.crash is not None:
            raise self.crash
        return self.anew

    async def stop(self) -> None:
        self.stopped = True
        self.changes.notify()


class Instance:
    """Holdings under test, with everything that they made."""

    def __init__(self, context: Context) -> None:
        self.made: list[FakeHolding] = []
        self.context, self.bus = context, context.bus
        self.holdings = Holdings(context, m.Role.ROLLOUT, max_units=1, make=self._make)

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.holdings.run)
            yield
            tasks.cancel_scope.cancel()

    def _make(self, record: m.JobRecord) -> FakeHolding:
        self.made.append(FakeHolding(record))
        return self.made[-1]

    async def allocate(self, uid: str, revision: int) -> None:
        allocation = m.Allocation(
            sender="s", instance="r0", job_uid=uid, units=(0,), memory_mb=1, max_running=1, revision=revision
        )
        await (await self.bus.table(m.Allocation)).put(subjects.allocation_key("r0", uid), allocation)

    async def drop(self, uid: str) -> None:
        await (await self.bus.table(m.Allocation)).delete(subjects.allocation_key("r0", uid))

    def revisions(self) -> dict[str, int]:
        return self.holdings.presence().revisions


@pytest.fixture
async def instance(bus: Bus, store: TrajectoryStore, tmp_path: Path) -> Instance:
    """An instance r0; jobs a and b run, c has ended."""
    records = await bus.table(m.JobRecord)
    for uid, state in (("a", m.JobState.RUNNING), ("b", m.JobState.RUNNING), ("c", m.JobState.ENDED)):
        record = m.JobRecord(sender="s", job_uid=uid, job=job(uid), state=state, submitted_at=0.0)
        await records.put(uid, record)
    return Instance(await context_of("r0", default_settings(tmp_path), bus, store))


async def eventually(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not condition():
            await anyio.sleep(0.01)


async def test_a_job_is_held_from_its_first_allocation_to_its_last(instance: Instance) -> None:
    async with instance.following():
        await instance.allocate("a", 1)
        await eventually(lambda: instance.revisions() == {"a": 1})
        await instance.allocate("a", 2)
        await instance.allocate("b", 3)
        await eventually(lambda: instance.revisions() == {"a": 2, "b": 3})
        await instance.drop("a")
        await eventually(lambda: instance.revisions() == {"b": 3})
        assert [held.uid for held in instance.made] == ["a", "b"]


async def test_nothing_is_held_of_a_job_that_has_ended_or_is_unknown(instance: Instance) -> None:
    async with instance.following():
        await instance.allocate("c", 1)
        await instance.allocate("unknown", 2)
        await instance.allocate("a", 3)
        await eventually(lambda: instance.revisions() == {"a": 3})
        assert [held.uid for held in instance.made] == ["a"]


async def test_an_allocation_that_comes_back_while_its_holding_ends_begins_another(instance: Instance) -> None:
    async with instance.following():
        await instance.allocate("a", 1)
        await eventually(lambda: instance.revisions() == {"a": 1})
        first = instance.made[0]
        first.let_go = False
        await instance.drop("a")
        await eventually(lambda: first.stopped)
        await instance.allocate("a", 2)
        await eventually(lambda: first.revision == 2)
        first.let_go = True
        first.changes.notify()
        await eventually(lambda: len(instance.made) == 2 and instance.made[1].revision == 2)


async def test_a_job_that_ended_by_itself_is_not_begun_again(instance: Instance) -> None:
    async with instance.following():
        await instance.allocate("a", 1)
        await eventually(lambda: instance.revisions() == {"a": 1})
        await instance.made[0].stop()
        await eventually(lambda: not instance.revisions())
        await instance.allocate("a", 2)  # by a scheduler that hasn't heard of it yet
        await instance.allocate("b", 3)
        await eventually(lambda: instance.revisions() == {"b": 3})
        assert [held.uid for held in instance.made] == ["a", "b"]


async def test_closing_ends_everything_and_begins_nothing(instance: Instance) -> None:
    async with instance.following():
        await instance.allocate("a", 1)
        await eventually(lambda: instance.revisions() == {"a": 1})
        with anyio.fail_after(5):
            await instance.holdings.close()
        await instance.allocate("b", 2)
        await anyio.sleep(0.2)
        assert not instance.revisions()
        assert len(instance.made) == 1


async def test_presence_tells_what_cannot_be_run(instance: Instance) -> None:
    async with instance.following():
        await instance.allocate("a", 1)
        await eventually(lambda: instance.revisions() == {"a": 1})
        assert not instance.holdings.presence().broken
        instance.made[0].broken = "no memory"  # type: ignore[misc]
        assert instance.holdings.presence().broken == {"a": "no memory"}


async def test_a_drained_instance_holds_nothing_until_that_is_undone(instance: Instance) -> None:
    async with instance.following():
        await instance.allocate("a", 1)
        await eventually(lambda: instance.revisions() == {"a": 1})
        assert (await instance.bus.request("r0", m.Drain(sender="t"))).count == 1
        assert instance.holdings.presence().draining
        await instance.allocate("b", 2)
        await anyio.sleep(0.2)
        assert not instance.revisions()
        await instance.bus.request("r0", m.Drain(sender="t", undo=True))
        assert not instance.holdings.presence().draining
        await eventually(lambda: instance.revisions() == {"a": 1, "b": 2})


async def test_a_change_is_announced_at_once(instance: Instance) -> None:
    table = await instance.bus.table(m.Worker)
    async with instance.following():
        await instance.allocate("a", 1)
        await eventually(lambda: instance.revisions() == {"a": 1})
        await instance.bus.request("r0", m.Drain(sender="t"))
        with anyio.fail_after(1):  # well before the next heartbeat
            while not ((told := await table.get("r0")) and told.draining):
                await anyio.sleep(0.01)


async def test_one_that_asks_for_it_is_begun_anew_while_it_is_allocated(instance: Instance) -> None:
    async with instance.following():
        await instance.allocate("a", 1)
        await eventually(lambda: instance.revisions() == {"a": 1})
        instance.made[0].anew = True
        await instance.made[0].stop()
        await eventually(lambda: len(instance.made) == 2 and instance.revisions() == {"a": 1})


async def test_a_job_that_crashes_is_begun_again_and_then_given_up_without_harm_to_others(instance: Instance) -> None:
    async with instance.following():
        await instance.allocate("b", 1)
        for crashes in range(3):
            await instance.allocate("a", 2 + crashes)
            await eventually(lambda n=crashes: len(instance.made) == n + 2)  # type: ignore[misc]
            instance.made[-1].crash = RuntimeError("a bug in it")
            await instance.made[-1].stop()
        await eventually(lambda: instance.holdings.presence().broken == {"a": "RuntimeError: a bug in it"})
        assert instance.revisions() == {"b": 1}
        await instance.allocate("a", 9)
        await instance.drop("b")
        await eventually(lambda: not instance.revisions())
        assert len(instance.made) == 4
