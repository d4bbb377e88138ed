"""A server whose disk is full is waited for like one that is away, and goes on by itself once there is room."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
import structlog

from libs.common import messages as m
from libs.common import subjects
from libs.common.bus import Bus
from libs.common.errors import Unreachable
from libs.common.store import TrajectoryStore
from libs.common.tokens import PolicyVersion
from libs.common.trajectory import TrajectoryId, TrajectorySpec
from libs.node.servers import Server, end_when_stuck, start_nats, start_valkey
from tests.small_disk import SmallDisk, small_disk
from tests.trajectories import spec_of
from tests.waiting import at_work, until

JOB = "job"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", size_mb=32) as mounted:
        yield mounted


def specs(first: int, count: int) -> list[TrajectorySpec]:
    return [spec_of(TrajectoryId(JOB, group, 0), prompt="p" * 10_000) for group in range(first, first + count)]


async def test_the_store_is_waited_for_until_there_is_room(disk: SmallDisk) -> None:
    with start_valkey(disk.path) as server:
        server.wait_until_answers()
        store = await TrajectoryStore.connect(server.url)
        await store.install(replace=True)
        await store.create(specs(0, 10))
        disk.fill()
        impatient = await TrajectoryStore.connect(server.url, patience_s=3.0)
        with pytest.raises(Unreachable, match="No space left on device"):
            for number in range(100):  # what the server had promised to write within a second shows then
                await impatient.create(specs(10 + number, 1))
                await asyncio.sleep(0.1)
        creating = asyncio.create_task(store.create(specs(200, 10)))
        await asyncio.sleep(0.2)
        assert not creating.done()
        disk.make_room()
        assert await asyncio.wait_for(creating, 10) == 10
        members = set(await store.members(JOB))
        assert {spec.id for spec in [*specs(0, 10), *specs(200, 10)]} <= members
        server.stop()
        server.start_again()
        server.wait_until_answers()
        assert set(await store.members(JOB)) == members
        await impatient.close()
        await store.close()


@asynccontextmanager
async def nats_on(disk: SmallDisk) -> AsyncIterator[Server]:
    """A server that is kept running as a node does it."""
    with start_nats(disk.path) as server:
        server.wait_until_answers()

        async def keep_running() -> None:
            while True:
                await server.ended()
                server.start_again()

        async def end_when() -> None:
            await end_when_stuck(server, home=disk.path, log=structlog.get_logger(), look_s=0.2)

        async with at_work(keep_running, end_when):
            yield server


async def test_the_bus_goes_on_where_it_was_when_there_is_room(disk: SmallDisk) -> None:
    confirmed: list[int] = []
    async with nats_on(disk) as nats:
        bus = await Bus.connect(nats.url, instance="test", log=structlog.get_logger())
        await bus.set_up()
        await bus.ensure_consumer(m.StartRollout, subjects.tasks_consumer(JOB), job_uid=JOB)

        async def publish() -> None:
            for sample in range(1_000_000):
                task = m.StartRollout(sender="t", job_uid=JOB, step=0, group=0, sample=sample, policy=PolicyVersion(0))
                await bus.publish(task)
                confirmed.append(sample)

        pid = nats.pid
        async with at_work(publish):
            await until(lambda: len(confirmed) > 50)
            disk.fill()
            await until(lambda: "write error" in nats.trouble())
            before = len(confirmed)
            await anyio.sleep(0.5)
            assert nats.pid == pid, "without any room it would only run out of it again"
            disk.make_room()
            await until(lambda: len(confirmed) > before + 50)
        assert nats.pid != pid
        assert set(confirmed) <= await queued(bus)
        await bus.close()


async def queued(bus: Bus) -> set[int]:
    """The samples of all tasks on the bus."""
    found: set[int] = set()
    puller = await bus.pull(m.StartRollout, subjects.tasks_consumer(JOB))
    while deliveries := await puller.fetch(256, wait_s=0.5):
        for delivery in deliveries:
            assert isinstance(delivery.message, m.StartRollout)
            found.add(delivery.message.sample)
            await delivery.ack()
    return found
