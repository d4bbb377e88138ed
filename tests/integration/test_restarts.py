"""Servers that go away and come back under those who use them: everyone goes on, and nothing that was confirmed is lost."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest
import structlog

from libs.common import messages as m
from libs.common import subjects
from libs.common.bus import ACK_WAIT_S, Bus
from libs.common.errors import NodeError, Unreachable
from libs.common.store import TrajectoryStore
from libs.common.tokens import PolicyVersion
from libs.common.trajectory import TrajectoryId, TrajectorySpec
from libs.node.servers import Server, start_nats, start_valkey
from tests.trajectories import spec_of
from tests.waiting import at_work, until

JOB = "job"
AWAY_S = 1.5
ENDINGS = [signal.SIGTERM, signal.SIGKILL]

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[Server]:
    """A NATS server of the test's own."""
    with start_nats(tmp_path) as server:
        server.wait_until_answers()
        yield server


@pytest.fixture
def valkey_server(tmp_path: Path, store_binary: Path) -> Iterator[Server]:
    """A Valkey or Redis server of the test's own."""
    with start_valkey(tmp_path, binary=store_binary) as server:
        server.wait_until_answers()
        yield server


@pytest.fixture
async def bus(nats_server: Server) -> AsyncIterator[Bus]:
    """A bus on it, set up."""
    bus = await connected(nats_server)
    await bus.set_up()
    await bus.ensure_consumer(m.StartRollout, subjects.tasks_consumer(JOB), job_uid=JOB)
    yield bus
    await bus.close()


@pytest.fixture
async def store(valkey_server: Server) -> AsyncIterator[TrajectoryStore]:
    """A trajectory store on it."""
    store = await TrajectoryStore.connect(valkey_server.url)
    await store.install(replace=True)
    yield store
    await store.close()


async def connected(server: Server) -> Bus:
    return await Bus.connect(server.url, instance="test", log=structlog.get_logger())


async def restart(server: Server, ending: signal.Signals, *, away_s: float = AWAY_S) -> None:
    """End a server, leave it away for a while, start it again."""
    if ending is signal.SIGKILL:
        server.kill()
    else:
        await asyncio.to_thread(server.stop)
    await server.ended()
    await asyncio.sleep(away_s)
    server.start_again()
    await asyncio.to_thread(server.wait_until_answers)


def task(sample: int) -> m.StartRollout:
    return m.StartRollout(sender="t", job_uid=JOB, step=0, group=0, sample=sample, policy=PolicyVersion(0))


def policy(step: int) -> m.PolicyPublished:
    return m.PolicyPublished(sender="t", job_uid=JOB, version=PolicyVersion(step), url="/p", digest="d")


def spec(group: int) -> TrajectorySpec:
    return spec_of(TrajectoryId(JOB, group, 0))


@pytest.mark.parametrize("ending", ENDINGS)
async def test_everyone_on_the_bus_goes_on(nats_server: Server, bus: Bus, ending: signal.Signals) -> None:
    confirmed: list[int] = []
    taken: set[int] = set()
    told: list[int] = []

    async def publish() -> None:
        for number in range(1_000_000):
            if number % 2:
                await bus.publish(task(number))
            else:
                await bus.publish_all([task(number)])
            confirmed.append(number)
            await asyncio.sleep(0.002)

    async def pull() -> None:
        puller = await bus.pull(m.StartRollout, subjects.tasks_consumer(JOB))
        while True:
            for delivery in await puller.fetch(8, wait_s=2.0):
                assert isinstance(delivery.message, m.StartRollout)
                taken.add(delivery.message.sample)
                await delivery.ack()

    async def put() -> None:
        table = await bus.table(m.PolicyPublished)
        revision = 0
        for step in range(1_000_000):
            revision = await table.swap(JOB, policy(step), expected_revision=revision)
            assert revision, "nobody else moves it"
            await asyncio.sleep(0.005)

    async def watch() -> None:
        async for change in (await watching.table(m.PolicyPublished)).watch():
            assert change.value is not None
            told.append(change.value.version.step)

    watching = await connected(nats_server)
    async with at_work(publish, pull, put, watch):
        for _ in range(2):
            await until(lambda before=len(confirmed): len(confirmed) > before + 50)  # type: ignore[misc]
            await restart(nats_server, ending)
            back = time.monotonic()
            await until(lambda seen=(len(confirmed), len(told)): len(confirmed) > seen[0] and len(told) > seen[1])  # type: ignore[misc]
            assert time.monotonic() - back < 3.0, "the outage is over when the server is back"
        last = confirmed[-1]
        # What was fetched as the server went comes again.
        await until(lambda: taken.issuperset(range(last + 1)), within_s=2 * ACK_WAIT_S)
    await watching.close()
    assert told == sorted(set(told)), "a watch repeats nothing and goes back nowhere"


@pytest.mark.parametrize("ending", ENDINGS)
async def test_everyone_at_the_store_goes_on(valkey_server: Server, store: TrajectoryStore, ending: signal.Signals) -> None:
    written: list[tuple[float, TrajectoryId]] = []

    async def write() -> None:
        for group in range(1_000_000):
            new = spec(group)
            await store.create([new])
            written.append((time.monotonic(), new.id))
            await asyncio.sleep(0.002)

    async def read() -> None:
        while True:
            await store.members(JOB)
            await asyncio.sleep(0.002)

    async with at_work(write, *[read] * 20):  # more than there are connections
        await until(lambda: len(written) > 200)
        ended = time.monotonic()
        await restart(valkey_server, ending)
        await until(lambda seen=len(written): len(written) > seen + 20)  # type: ignore[misc]
    # With appendfsync everysec, a violent death may cost what was written while the disk was busy, two seconds at most.
    safe = [id for at, id in written if ending is signal.SIGTERM or not ended - 2.0 < at < ended + AWAY_S]
    assert len(safe) > 20
    assert set(safe) <= set(await store.members(JOB))


async def test_a_store_that_still_loads_its_files_is_waited_for(tmp_path: Path, store_binary: Path) -> None:
    with start_valkey(tmp_path, binary=store_binary) as quick:
        quick.wait_until_answers()
        store = await TrajectoryStore.connect(quick.url)
        await store.install(replace=True)
        await store.create([spec(group) for group in range(500)])
        quick.stop()
        command = [*quick.command, "--key-load-delay", "1000"]  # microseconds for each command of its file
        with Server(name="Valkey", scheme="redis", port=quick.port, log=tmp_path / "slow.log", command=command):
            began = time.monotonic()
            assert len(await store.members(JOB)) == 500
            assert time.monotonic() - began > 1.0
        await store.close()


async def test_a_swap_whose_answer_was_lost_is_no_failure(nats_server: Server, bus: Bus) -> None:
    """The value gets through as the connection is lost, time after time."""
    table = await bus.table(m.PolicyPublished)
    revision = await table.swap(JOB, policy(0), expected_revision=0)
    client = bus.client
    for step in range(1, 20):
        swap = asyncio.create_task(table.swap(JOB, policy(step), expected_revision=revision))
        for _ in range(step % 7):
            await asyncio.sleep(0)
        await client.force_reconnect()
        assert (await swap) > revision
        revision = (await table.entry(JOB)).revision  # type: ignore[union-attr]
        assert await table.get(JOB) == policy(step)
    assert not await table.swap(JOB, policy(99), expected_revision=revision - 1)


async def test_a_terminal_event_whose_answer_was_lost_is_no_second_one(bus: Bus) -> None:
    for number in range(10):
        ended = m.JobEnded(sender="s", job_uid=f"j{number}", outcome=m.Outcome.FAILED, ended_at=1.0)
        publishing = asyncio.create_task(bus.publish(ended))
        for _ in range(number % 5):
            await asyncio.sleep(0)
        await bus.client.force_reconnect()
        assert await publishing
        assert await bus.history(m.JobEnded, job_uid=ended.job_uid) == [ended]


async def test_servers_that_are_frozen_for_ten_seconds_are_waited_for(
    nats_server: Server, valkey_server: Server, bus: Bus, store: TrajectoryStore
) -> None:
    table = await bus.table(m.PolicyPublished)
    await bus.publish(task(0))
    pull = await bus.pull(m.StartRollout, subjects.tasks_consumer(JOB))
    for server in (nats_server, valkey_server):
        os.kill(server.pid, signal.SIGSTOP)
    began = time.monotonic()

    async def thaw() -> None:
        await asyncio.sleep(10.5)
        for server in (nats_server, valkey_server):
            os.kill(server.pid, signal.SIGCONT)

    async def fetch() -> None:
        while not (deliveries := await pull.fetch(8, wait_s=1.0)):
            pass
        assert deliveries[0].message == task(0)

    async with anyio.create_task_group() as group:
        for todo in (thaw, fetch, lambda: bus.publish(task(1)), lambda: table.put(JOB, policy(0))):
            group.start_soon(todo)
        for number in range(3):
            group.start_soon(store.create, [spec(number)])
    assert time.monotonic() - began < 15.0
    assert await table.get(JOB) == policy(0)
    assert len(await store.members(JOB)) == 3


async def test_patience_ends_with_one_clear_line(
    nats_server: Server, valkey_server: Server, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await TrajectoryStore.connect(valkey_server.url, patience_s=0.5)
    monkeypatch.setattr("libs.common.connection.PATIENCE_S", 0.5)
    for server in (nats_server, valkey_server):
        server.kill()
        await server.ended()
    with pytest.raises(Unreachable, match=r"^NATS at nats://.* doesn't answer, for 0.5 s now: the connection was lost$"):
        await bus.publish(task(0))
    with pytest.raises(Unreachable, match=r"^the trajectory store at redis://.* doesn't answer, for 0.5 s now: "):
        await store.members(JOB)
    await store.close()


async def test_what_is_not_allowed_any_more_is_not_done(bus: Bus) -> None:
    def refuse() -> None:
        raise NodeError("too late")

    table = await bus.table(m.PolicyPublished)
    with bus.only_while(refuse):
        for forbidden in (bus.publish(task(0)), table.put(JOB, policy(0)), bus.purge(m.StartRollout, job_uid=JOB)):
            with pytest.raises(NodeError, match="too late"):
                await forbidden
    assert await bus.publish(task(0))
