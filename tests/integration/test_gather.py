"""Issuing and gathering a step against a real bus and store, with messages that come late, twice or never."""

import asyncio
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import structlog

from libs.common import messages as m
from libs.common import subjects
from libs.common.bus import Bus
from libs.common.store import TrajectoryStore
from libs.common.tokens import TOKEN, PolicyVersion
from libs.common.trajectory import Claim, Fail, Finish, Record, Renew, Score, TrajectoryId, TrajectorySpec
from services.trainer.gather import Gatherer, Waits
from services.trainer.hold import Superseded
from services.trainer.steps import StepLedger
from tests.trajectories import spec_of

V = PolicyVersion(0, 1)


class FakeData:
    """Hands out numbered groups of two samples."""

    def __init__(self, job_uid: str) -> None:
        self._uid, self._next = job_uid, 0

    def training_groups(self, count: int, *, step: int) -> list[list[TrajectorySpec]]:
        groups = range(self._next, self._next + count)
        self._next += count
        return [[spec_of(TrajectoryId(self._uid, group, sample), step=step) for sample in range(2)] for group in groups]


async def settle(store: TrajectoryStore, id: TrajectoryId, reward: float | None) -> None:
    """A trajectory's whole life at once; no reward: it fails for good."""
    (claim,) = await store.claim([id], owner="worker", ttl_ms=5000)
    assert isinstance(claim, Claim)
    none = np.zeros(0, TOKEN)
    if reward is None:
        await store.write([Fail(id, claim.epoch, "it broke", None)])
        return
    await store.write([Finish(id, claim.epoch, 0, none, "stop", "text", 1), Score(id, claim.epoch, reward, "fine")])


class Step:
    """One step being gathered."""

    def __init__(self, bus: Bus, store: TrajectoryStore, job_uid: str) -> None:
        self.bus, self.store, self.uid = bus, store, job_uid
        self.ledger = StepLedger(step=0, replacements=2)
        self.data = FakeData(job_uid)
        self.waits = Waits(look=0.2, second_look=0.1, quiet=0.4)
        self.gathered: list[Record] = []

    async def gather(self, groups: Sequence[Sequence[TrajectorySpec]]) -> None:
        gatherer = Gatherer(
            bus=self.bus,
            store=self.store,
            job_uid=self.uid,
            instance="trainer-0",
            waits=self.waits,
            log=structlog.get_logger(),
        )
        settled = await self.bus.pull(m.TrajectorySettled, subjects.settled_consumer(self.uid))
        self.gathered = await gatherer.gather(
            self.ledger,
            groups,
            data=self.data,  # type: ignore[arg-type]  # a fake
            policy=V,
            settled=settled,
            on_progress=lambda: None,
        )

    async def tasks(self, count: int) -> list[m.StartRollout]:
        puller = await self.bus.pull(m.StartRollout, subjects.tasks_consumer(self.uid))
        found: list[m.StartRollout] = []
        while len(found) < count:
            for delivery in await puller.fetch(count, wait_s=2.0):
                assert isinstance(delivery.message, m.StartRollout)
                found.append(delivery.message)
                await delivery.ack()
        return found

    def word(self, group: int, sample: int) -> m.TrajectorySettled:
        return m.TrajectorySettled(sender="reward-0", job_uid=self.uid, step=0, group=group, sample=sample, state="scored")


@pytest.fixture
async def step(bus: Bus, store: TrajectoryStore, job_uid: str) -> Step:
    await bus.ensure_consumer(m.StartRollout, subjects.tasks_consumer(job_uid), job_uid=job_uid)
    await bus.ensure_consumer(m.TrajectorySettled, subjects.settled_consumer(job_uid), job_uid=job_uid)
    await store.hold_job(job_uid, owner="trainer-0")
    return Step(bus, store, job_uid)


async def test_every_sample_is_announced_once_with_its_policy(step: Step) -> None:
    gathering = asyncio.create_task(step.gather(step.data.training_groups(2, step=0)))
    tasks = await step.tasks(4)
    assert {(task.group, task.sample) for task in tasks} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert {task.policy for task in tasks} == {V}
    for task in tasks:
        await settle(step.store, TrajectoryId(step.uid, task.group, task.sample), 1.0)
        await step.bus.publish(step.word(task.group, task.sample))
    await asyncio.wait_for(gathering, 10)
    assert step.ledger.valid_groups() == [0, 1]


async def test_without_a_single_message_the_store_tells(step: Step) -> None:
    gathering = asyncio.create_task(step.gather(step.data.training_groups(1, step=0)))
    for task in await step.tasks(2):
        await settle(step.store, TrajectoryId(step.uid, task.group, task.sample), 0.0)
    await asyncio.wait_for(gathering, 10)
    assert step.ledger.valid_groups() == [0]


async def test_what_nobody_claimed_or_lost_is_announced_again(step: Step) -> None:
    gathering = asyncio.create_task(step.gather(step.data.training_groups(1, step=0)))
    first, second = await step.tasks(2)  # taken off the queue and forgotten: the workers died
    lost = TrajectoryId(step.uid, first.group, first.sample)
    await step.store.claim([lost], owner="worker", ttl_ms=50)
    seen: set[int] = set()
    while seen != {first.sample, second.sample}:  # the lost one sooner than the one that may still be on its way to someone
        seen |= {task.sample for task in await step.tasks(1)}
    for sample in range(2):
        await settle(step.store, TrajectoryId(step.uid, 0, sample), 1.0)
    await asyncio.wait_for(gathering, 10)


async def test_a_lease_that_is_renewed_late_keeps_its_trajectory(step: Step) -> None:
    step.waits = msgspec.structs.replace(step.waits, second_look=0.5)
    gathering = asyncio.create_task(step.gather(step.data.training_groups(1, step=0)))
    await step.tasks(2)
    ids = [TrajectoryId(step.uid, 0, sample) for sample in range(2)]
    claims = await step.store.claim(ids, owner="worker", ttl_ms=-1)
    await asyncio.sleep(0.4)  # a look has seen them run out
    late = [Renew(claim.spec.id, claim.epoch, 60_000) for claim in claims if isinstance(claim, Claim)]
    assert await step.store.write(late) == [1, 1]
    puller = await step.bus.pull(m.StartRollout, subjects.tasks_consumer(step.uid))
    assert await puller.fetch(1, wait_s=1.0) == []
    for claim in claims:
        assert isinstance(claim, Claim)
        end = Finish(claim.spec.id, claim.epoch, 0, claim.tokens, "stop", "text", 1)
        assert await step.store.write([end, Score(claim.spec.id, claim.epoch, 1.0, "")]) == [1, 1]
    await asyncio.wait_for(gathering, 10)


async def test_what_messages_told_and_the_store_has_lost_is_done_again(step: Step) -> None:
    gathering = asyncio.create_task(step.gather(step.data.training_groups(1, step=0)))
    await step.tasks(2)
    await settle(step.store, TrajectoryId(step.uid, 0, 0), 1.0)
    for sample in range(2):  # the second one's score went with the server's last second
        await step.bus.publish(step.word(0, sample))
    (again,) = await step.tasks(1)
    assert again.sample == 1
    assert not gathering.done()
    await settle(step.store, TrajectoryId(step.uid, 0, 1), 0.0)
    await asyncio.wait_for(gathering, 10)


async def test_a_finished_trajectory_whose_word_was_lost_is_sent_to_be_scored_again(step: Step) -> None:
    gathering = asyncio.create_task(step.gather(step.data.training_groups(1, step=0)))
    await step.tasks(2)
    scores: list[Score] = []
    for sample in range(2):
        id = TrajectoryId(step.uid, 0, sample)
        (claim,) = await step.store.claim([id], owner="worker", ttl_ms=5000)
        assert isinstance(claim, Claim)
        await step.store.write([Finish(id, claim.epoch, 0, np.zeros(0, TOKEN), "stop", "text", 1)])
        scores.append(Score(id, claim.epoch, 1.0, "fine"))
    puller = await step.bus.pull(m.TrajectoryFinished, subjects.REWARD_CONSUMER)
    seen: set[int] = set()
    while seen != {0, 1}:
        for delivery in await puller.fetch(4, wait_s=5.0):
            assert isinstance(delivery.message, m.TrajectoryFinished)
            seen.add(delivery.message.sample)
            await delivery.ack()
    await step.store.write(scores)
    await asyncio.wait_for(gathering, 10)


async def test_a_failure_that_the_store_has_lost_replaces_no_group(step: Step) -> None:
    gathering = asyncio.create_task(step.gather(step.data.training_groups(1, step=0)))
    await step.tasks(2)
    await settle(step.store, TrajectoryId(step.uid, 0, 0), 1.0)
    failed = msgspec.structs.replace(step.word(0, 1), state="failed")
    await step.bus.publish(step.word(0, 0))
    await step.bus.publish(failed)
    (again,) = await step.tasks(1)
    assert (again.group, again.sample) == (0, 1)
    await settle(step.store, TrajectoryId(step.uid, 0, 1), 0.0)
    await asyncio.wait_for(gathering, 10)
    assert [record.state for record in step.gathered] == ["scored", "scored"]


async def test_a_useless_group_is_replaced_by_the_next_prompt(step: Step) -> None:
    gathering = asyncio.create_task(step.gather(step.data.training_groups(1, step=0)))
    await step.tasks(2)
    await settle(step.store, TrajectoryId(step.uid, 0, 0), 1.0)
    await settle(step.store, TrajectoryId(step.uid, 0, 1), None)
    replacement = await step.tasks(2)
    assert {task.group for task in replacement} == {1}
    for sample in range(2):
        await settle(step.store, TrajectoryId(step.uid, 1, sample), 1.0)
    await asyncio.wait_for(gathering, 10)
    assert step.ledger.valid_groups() == [1]


async def test_a_restarted_trainer_finds_what_is_there_and_generates_nothing(step: Step) -> None:
    groups = step.data.training_groups(2, step=0)
    await step.store.create([spec for group in groups for spec in group])
    for group in range(2):
        for sample in range(2):
            await settle(step.store, TrajectoryId(step.uid, group, sample), 0.5)
    await asyncio.wait_for(step.gather(groups), 10)
    assert step.ledger.valid_groups() == [0, 1]


async def test_of_ten_ready_groups_a_step_of_eight_takes_its_own_and_the_next_one_finds_the_other_two(step: Step) -> None:
    """As when a trainer that had begun the next step starts over at its checkpoint."""
    ready = step.data.training_groups(10, step=0)
    await step.store.create([spec for group in ready for spec in group])
    for group in ready:
        for spec in group:
            await settle(step.store, spec.id, 1.0)
            await step.bus.publish(step.word(spec.id.group, spec.id.sample))
    await asyncio.wait_for(step.gather(ready[:8]), 10)
    assert step.ledger.valid_groups() == list(range(8))
    assert step.ledger.present() == [(group, sample) for group in range(8) for sample in range(2)]
    step.ledger = StepLedger(step=1, replacements=2)
    following = [*ready[8:], *step.data.training_groups(6, step=1)]
    gathering = asyncio.create_task(step.gather(following))
    for group in following[2:]:
        for spec in group:
            while await step.store.states([spec.id]) == ["gone"]:
                await asyncio.sleep(0.01)
            await settle(step.store, spec.id, 1.0)
    await asyncio.wait_for(gathering, 10)
    assert step.ledger.valid_groups() == list(range(8, 16))
    early = [record for record in await step.store.read([spec.id for group in ready for spec in group]) if record]
    assert [record.claims for record in early] == [1] * 20  # nobody was asked to generate them again


async def test_a_replaced_trainer_brings_no_record_back_that_its_successor_has_forgotten(step: Step) -> None:
    groups = step.data.training_groups(1, step=0)
    gathering = asyncio.create_task(step.gather(groups))
    await step.tasks(2)
    successor = await step.store.hold_job(step.uid, owner="trainer-1")
    await step.store.forget([spec.id for spec in groups[0]], incarnation=successor)
    with pytest.raises(Superseded):
        await asyncio.wait_for(gathering, 10)
    assert await step.store.members(step.uid) == []
