"""A leading and a standing-by scheduler, as processes: however the leader goes, the other goes on where it was."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from libs.common import messages as m
from libs.common.bus import Bus
from libs.common.settings import Addresses, SchedulerSettings, default_settings
from libs.common.store import TrajectoryStore
from libs.common.subjects import LEADER_KEY
from services.scheduler.core import REVISIONS_PER_TERM
from services.scheduler.service import Tables
from tests.scheduling import job, worker
from tests.service_processes import START_S, Services, services
from tests.waiting import until

LEASE_S = 2.0
HANDLED_S = 8.0

pytestmark = pytest.mark.timeout(180)


class Schedulers:
    """Scheduler processes, and what a test sees of the world around them."""

    def __init__(self, bus: Bus, tables: Tables, services: Services) -> None:
        self.bus, self.tables, self.services = bus, tables, services

    async def start(self, instance: str) -> None:
        await self.services.start("scheduler", instance, said="standing_by")

    async def leader(self) -> m.Leadership | None:
        return await (await self.bus.table(m.Leadership)).get(LEADER_KEY)

    async def until_led_by(self, instance: str, within_s: float) -> None:
        async def leads() -> bool:
            leader = await self.leader()
            return leader is not None and (leader.sender, leader.held) == (instance, True)

        await until(leads, within_s)

    async def until_decided_by(self, instance: str, within_s: float) -> None:
        async def decided() -> bool:
            return any(decision.sender == instance for decision in await self.bus.history(m.Decision))

        await until(decided, within_s)

    async def until_states(self, uids: list[str], *states: m.JobState, within_s: float) -> None:
        async def reached() -> bool:
            records = await self.tables.jobs.all()
            return all(uid in records and records[uid].state in states for uid in uids)

        await until(reached, within_s)

    async def submit(self, *uids: str) -> None:
        for uid in uids:
            await self.bus.publish(m.SubmitJob(sender="cli", job_uid=uid, job=job(), submitted_at=time.time()))

    async def announce(self) -> None:
        """Keep the presence of a trainer and two rollout workers fresh."""
        while True:
            for some in (worker("r0", m.Role.ROLLOUT), worker("r1", m.Role.ROLLOUT), worker("t0", m.Role.TRAINER)):
                await self.tables.workers.put(some.sender, some)
            await anyio.sleep(1.0)

    async def end_all(self, uids: list[str]) -> None:
        """Cancel jobs; each has exactly one terminal event."""
        for uid in uids:
            await self.bus.publish(m.CancelJob(sender="cli", job_uid=uid))
        await self.until_states(uids, m.JobState.ENDED, within_s=HANDLED_S)
        ended = await self.bus.history(m.JobEnded)
        assert sorted(event.job_uid for event in ended) == sorted(uids)


@pytest.fixture
async def schedulers(
    bus: Bus, store: TrajectoryStore, tmp_path: Path, nats_url: str, redis_url: str
) -> AsyncIterator[Schedulers]:
    """Two schedulers, ``a`` leading and ``b`` standing by, and workers for them."""
    settings = default_settings(tmp_path)
    settings = msgspec.structs.replace(settings, scheduler=SchedulerSettings(lease_s=LEASE_S))
    context: Any = type("Context", (), {"bus": bus})
    async with services(tmp_path, settings, Addresses(nats_url, redis_url)) as processes:
        found = Schedulers(bus, await Tables.open(context), processes)
        announcing = asyncio.create_task(found.announce())
        try:
            await found.start("a")
            await found.until_led_by("a", START_S)
            await found.start("b")
            yield found
        finally:
            announcing.cancel()


@asynccontextmanager
async def submitting(schedulers: Schedulers) -> AsyncIterator[list[str]]:
    """Jobs are handed in all the while; yields their ids."""
    uids: list[str] = []

    async def submit() -> None:
        while True:
            uids.append(uid := f"job{len(uids)}")
            await schedulers.submit(uid)
            await anyio.sleep(0.2)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(submit)
        yield uids
        tasks.cancel_scope.cancel()


async def test_a_killed_leader_is_replaced_and_no_job_is_lost(schedulers: Schedulers) -> None:
    async with submitting(schedulers) as uids:
        await schedulers.until_decided_by("a", 20.0)
        schedulers.services.send("a", signal.SIGKILL)
        await schedulers.until_decided_by("b", LEASE_S + 2.0)
        await anyio.sleep(0.5)
    await schedulers.until_states(uids, m.JobState.QUEUED, m.JobState.RUNNING, within_s=HANDLED_S)
    assert {a.sender for a in (await schedulers.tables.allocations.all()).values()} == {"b"}
    await schedulers.end_all(uids)


async def test_a_leader_that_was_frozen_wakes_up_and_does_nothing(schedulers: Schedulers) -> None:
    await schedulers.submit("first", "second")
    await schedulers.until_states(["second"], m.JobState.QUEUED, within_s=20.0)
    schedulers.services.send("a", signal.SIGSTOP)
    gone = msgspec.structs.replace(worker("r1", m.Role.ROLLOUT), draining=True)
    await schedulers.tables.workers.put("r1", gone)  # it would have to decide about that, and the job's end
    await schedulers.bus.publish(m.TrainingEnded(sender="t0", incarnation=1, job_uid="first", outcome=m.Outcome.SUCCEEDED))
    await schedulers.until_led_by("b", LEASE_S + 2.0)
    await schedulers.until_decided_by("b", 2.0)
    await schedulers.submit("third")
    await schedulers.until_states(["third"], m.JobState.QUEUED, m.JobState.RUNNING, within_s=HANDLED_S)
    before = len([decision for decision in await schedulers.bus.history(m.Decision) if decision.sender == "a"])
    schedulers.services.send("a", signal.SIGCONT)
    assert await schedulers.services.ended("a") == 1
    assert "it no longer leads" in schedulers.services.log("a")
    await anyio.sleep(0.5)
    assert len([decision for decision in await schedulers.bus.history(m.Decision) if decision.sender == "a"]) == before
    held = (await schedulers.tables.allocations.all()).values()
    assert {allocation.sender for allocation in held} == {"b"}
    assert min(allocation.revision for allocation in held) > 2 * REVISIONS_PER_TERM
    await schedulers.until_states(["first"], m.JobState.ENDED, within_s=HANDLED_S)
    assert [ended.sender for ended in await schedulers.bus.history(m.JobEnded)] == ["b"]


async def test_a_leader_that_ends_in_order_hands_over_at_once(schedulers: Schedulers) -> None:
    async with submitting(schedulers) as uids:
        await schedulers.until_decided_by("a", 20.0)
        schedulers.services.send("a", signal.SIGTERM)
        await schedulers.until_led_by("b", 1.0)
        assert await schedulers.services.ended("a") == 0
    await schedulers.start("a")
    leader = await schedulers.leader()
    assert leader is not None and (leader.sender, leader.term) == ("b", 2)
    await schedulers.end_all(uids)
