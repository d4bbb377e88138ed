"""The bus against a real NATS server: what is stored, delivered once, refused, watched and buried."""

import asyncio
import time

import pytest

from libs.common import messages as m
from libs.common import subjects
from libs.common.bus import Bus
from libs.common.errors import MessageError, NodeError, QueueGone
from libs.common.streams import stream_of
from libs.common.tokens import PolicyVersion

ONE = PolicyVersion(1)


def task(job_uid: str, sample: int, *, attempt: int = 0) -> m.StartRollout:
    return m.StartRollout(sender="trainer-0", job_uid=job_uid, step=1, group=0, sample=sample, policy=ONE, attempt=attempt)


def ended(job_uid: str, outcome: m.Outcome) -> m.JobEnded:
    return m.JobEnded(sender="scheduler-0", job_uid=job_uid, outcome=outcome, ended_at=time.time())


def policy(job_uid: str, step: int) -> m.PolicyPublished:
    return m.PolicyPublished(sender="trainer-0", job_uid=job_uid, version=PolicyVersion(step), url="/p", digest="d")


async def test_set_up_can_be_repeated(bus: Bus) -> None:
    await bus.set_up()
    await bus.wait_until_set_up(1.0)


async def test_how_long_what_a_reward_service_fetched_waits_can_be_changed(bus: Bus) -> None:
    await bus.set_up(reward_ack_wait_s=2.0)
    info = await bus.js.consumer_info("TRAJECTORIES", subjects.REWARD_CONSUMER)
    await bus.set_up()
    assert info.config.ack_wait == 2.0


async def test_waiting_for_a_set_up_that_never_comes_ends(bus: Bus) -> None:
    for stream in await bus.client.jetstream().streams_info():
        await bus.client.jetstream().delete_stream(str(stream.config.name))
    with pytest.raises(NodeError, match="no scheduler"):
        await bus.wait_until_set_up(0.2)


async def test_an_acknowledged_task_is_delivered_once(bus: Bus, job_uid: str) -> None:
    name = subjects.tasks_consumer(job_uid)
    await bus.ensure_consumer(m.StartRollout, name, job_uid=job_uid)
    await bus.ensure_consumer(m.StartRollout, name, job_uid=job_uid)
    await bus.publish_all([task(job_uid, sample) for sample in range(5)])
    pull = await bus.pull(m.StartRollout, name)
    first = await pull.fetch(10, wait_s=1.0)
    assert [delivery.message for delivery in first] == [task(job_uid, sample) for sample in range(5)]
    for delivery in first:
        await delivery.ack()
    assert await pull.fetch(10, wait_s=0.3) == []


async def test_a_task_handed_back_comes_again(bus: Bus, job_uid: str) -> None:
    name = subjects.tasks_consumer(job_uid)
    await bus.ensure_consumer(m.StartRollout, name, job_uid=job_uid)
    await bus.publish(task(job_uid, 0))
    pull = await bus.pull(m.StartRollout, name)
    (first,) = await pull.fetch(1, wait_s=1.0)
    await first.retry(0.1)
    (again,) = await pull.fetch(1, wait_s=2.0)
    assert again.message == first.message
    assert (first.deliveries, again.deliveries) == (1, 2)


async def test_repeats_are_dropped_and_new_attempts_are_not(bus: Bus, job_uid: str) -> None:
    name = subjects.tasks_consumer(job_uid)
    await bus.ensure_consumer(m.StartRollout, name, job_uid=job_uid)
    await bus.publish(task(job_uid, 0))
    await bus.publish(task(job_uid, 0))
    await bus.publish(task(job_uid, 0, attempt=1))
    pull = await bus.pull(m.StartRollout, name)
    deliveries = await pull.fetch(10, wait_s=0.5)
    assert [delivery.message for delivery in deliveries] == [task(job_uid, 0), task(job_uid, 0, attempt=1)]


async def test_waiting_for_work_that_does_not_come_is_no_error(bus: Bus, job_uid: str) -> None:
    name = subjects.tasks_consumer(job_uid)
    await bus.ensure_consumer(m.StartRollout, name, job_uid=job_uid)
    pull = await bus.pull(m.StartRollout, name)
    assert [await pull.fetch(8, wait_s=0.02) for _ in range(40)] == [[]] * 40


async def test_a_puller_never_holds_more_than_it_asked_for(bus: Bus, job_uid: str) -> None:
    """Whatever came of earlier fetches, and also what comes only after a fetch has waited for a while, or has given up."""
    name = subjects.tasks_consumer(job_uid)
    await bus.ensure_consumer(m.StartRollout, name, job_uid=job_uid)
    pull = await bus.pull(m.StartRollout, name)
    for round in range(8):
        for _ in range(2):
            assert await pull.fetch(2, wait_s=0.02) == []
        fetching = asyncio.create_task(pull.fetch(2, wait_s=2.0))
        await asyncio.sleep(0.02)
        await bus.publish_all([task(job_uid, 5 * round + number) for number in range(5)])
        got = await fetching
        await asyncio.sleep(0.02)  # for what is on its way
        held = (await bus.js.consumer_info(stream_of(m.StartRollout), name)).num_ack_pending
        assert 1 <= len(got) <= 2
        assert held == len(got)
        for delivery in [*got, *await pull.fetch(5 - len(got), wait_s=1.0)]:
            await delivery.ack()
        await bus.purge(m.StartRollout, job_uid=job_uid)


async def test_jobs_have_separate_queues(bus: Bus, job_uid: str) -> None:
    for uid in (job_uid, "other"):
        await bus.ensure_consumer(m.StartRollout, subjects.tasks_consumer(uid), job_uid=uid)
        await bus.publish(task(uid, 0))
    pull = await bus.pull(m.StartRollout, subjects.tasks_consumer("other"))
    assert [delivery.message for delivery in await pull.fetch(10, wait_s=0.5)] == [task("other", 0)]
    await bus.purge(m.StartRollout, job_uid=job_uid)
    gone = await bus.pull(m.StartRollout, subjects.tasks_consumer(job_uid))
    assert await gone.fetch(1, wait_s=0.3) == []
    await bus.drop_consumer(m.StartRollout, subjects.tasks_consumer(job_uid))
    await bus.drop_consumer(m.StartRollout, subjects.tasks_consumer(job_uid))


async def test_a_second_terminal_event_is_refused(bus: Bus, job_uid: str) -> None:
    assert await bus.publish(ended(job_uid, m.Outcome.SUCCEEDED))
    assert not await bus.publish(ended(job_uid, m.Outcome.FAILED))
    assert [event.outcome for event in await bus.history(m.JobEnded, job_uid=job_uid)] == [m.Outcome.SUCCEEDED]


async def test_history_holds_everything_in_order(bus: Bus) -> None:
    assert await bus.history(m.JobEnded) == []
    for number in range(300):
        await bus.publish(ended(f"j{number}", m.Outcome.SUCCEEDED))
    assert [event.job_uid for event in await bus.history(m.JobEnded)] == [f"j{number}" for number in range(300)]
    assert len(await bus.history(m.JobEnded, job_uid="j7")) == 1


async def test_what_cannot_be_decoded_becomes_a_dead_letter_once(bus: Bus, job_uid: str) -> None:
    name = subjects.tasks_consumer(job_uid)
    await bus.ensure_consumer(m.StartRollout, name, job_uid=job_uid)
    await bus.client.jetstream().publish(f"tasks.{job_uid}", b"\xc1 rubbish")
    await bus.publish(task(job_uid, 1))
    pull = await bus.pull(m.StartRollout, name)
    assert [delivery.message for delivery in await pull.fetch(10, wait_s=0.5)] == [task(job_uid, 1)]
    (letter,) = await bus.history(m.DeadLetter)
    assert (letter.subject, letter.payload) == (f"tasks.{job_uid}", b"\xc1 rubbish")
    assert "undecodable" in letter.reason
    assert await pull.fetch(10, wait_s=0.3) == []


async def test_table_swaps_only_at_the_expected_revision(bus: Bus, job_uid: str) -> None:
    table = await bus.table(m.PolicyPublished)
    assert await table.get(job_uid) is None
    assert await table.swap(job_uid, policy(job_uid, 0), expected_revision=0)
    assert not await table.swap(job_uid, policy(job_uid, 9), expected_revision=0)
    entry = await table.entry(job_uid)
    assert entry is not None
    assert await table.swap(job_uid, policy(job_uid, 1), expected_revision=entry.revision)
    assert not await table.swap(job_uid, policy(job_uid, 9), expected_revision=entry.revision)
    assert await table.all() == {job_uid: policy(job_uid, 1)}
    await table.delete(job_uid)
    await table.delete(job_uid)
    assert await table.get(job_uid) is None
    assert await table.all() == {}
    assert await table.swap(job_uid, policy(job_uid, 2), expected_revision=0), "a deleted key counts as absent"


async def test_watch_tells_what_is_there_and_what_changes(bus: Bus) -> None:
    table = await bus.table(m.PolicyPublished)
    await table.put("a", policy("a", 0))
    heard: asyncio.Queue[tuple[str, int | None]] = asyncio.Queue()

    async def listen() -> None:
        async for change in table.watch():
            heard.put_nowait((change.key, change.value.version.step if change.value else None))

    listener = asyncio.create_task(listen())
    first = await asyncio.wait_for(heard.get(), 5.0)
    await table.put("b", policy("b", 1))
    await table.put("a", policy("a", 2))
    await table.delete("b")
    later = [await asyncio.wait_for(heard.get(), 5.0) for _ in range(3)]
    assert [first, *later] == [("a", 0), ("b", 1), ("a", 2), ("b", None)]
    listener.cancel()
    await asyncio.gather(listener, return_exceptions=True)


async def test_a_renewed_watch_repeats_nothing_and_misses_nothing(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libs.common.tables.REWATCH_S", 0.3)
    table = await bus.table(m.PolicyPublished)
    await table.put("kept", policy("kept", 0))
    heard: list[tuple[str, int | None]] = []

    async def listen() -> None:
        async for change in table.watch():
            heard.append((change.key, change.value.version.step if change.value else None))

    listener = asyncio.create_task(listen())
    await asyncio.sleep(1.0)
    await table.put("late", policy("late", 1))
    await table.delete("kept")
    await asyncio.sleep(0.5)
    assert heard == [("kept", 0), ("late", 1), ("kept", None)]
    listener.cancel()
    await asyncio.gather(listener, return_exceptions=True)


async def test_telemetry_reaches_whoever_listens(bus: Bus) -> None:
    entered = m.SubStageEntered(sender="rollout-0", job_uid="j", step=3, sub_stage=m.SubStage.TAIL_DECODE)
    heard: asyncio.Queue[m.AnyMessage] = asyncio.Queue()

    async def listen() -> None:
        async for message in bus.telemetry():
            heard.put_nowait(message)

    listener = asyncio.create_task(listen())
    await asyncio.sleep(0.1)
    await bus.client.publish("telemetry.rollout-0", b"rubbish")
    await bus.publish(entered)
    assert await asyncio.wait_for(heard.get(), 2.0) == entered
    listener.cancel()
    await asyncio.gather(listener, return_exceptions=True)


async def test_request_to_nobody_is_one_clear_line(bus: Bus) -> None:
    with pytest.raises(NodeError, match=r"rollout-9 doesn't answer 'ping'"):
        await bus.request("rollout-9", m.Ping(sender="t"), timeout_s=0.5)


async def test_a_table_with_a_foreign_value_says_so(bus: Bus) -> None:
    kv = await bus.client.jetstream().key_value(subjects.BUCKETS[m.PolicyPublished])
    await kv.put("x", m.encode(ended("x", m.Outcome.FAILED)))
    table = await bus.table(m.PolicyPublished)
    with pytest.raises(MessageError, match="PolicyPublished expected"):
        await table.get("x")


async def test_a_consumer_that_is_deleted_under_a_puller_is_gone(bus: Bus, job_uid: str) -> None:
    name = subjects.tasks_consumer(job_uid)
    with pytest.raises(QueueGone):
        await bus.pull(m.StartRollout, name)
    await bus.ensure_consumer(m.StartRollout, name, job_uid=job_uid)
    puller = await bus.pull(m.StartRollout, name)
    await bus.drop_consumer(m.StartRollout, name)
    with pytest.raises(QueueGone):
        await puller.fetch(1, wait_s=1.0)
