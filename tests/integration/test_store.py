"""The trajectory store against a real Valkey server: one life of a trajectory, and everyone who may not write."""

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from libs.common.errors import JigsawError, StaleEpochError
from libs.common.store import (
    Append,
    Claim,
    Fail,
    Finish,
    NotClaimed,
    Release,
    Renew,
    Restart,
    Score,
    TrajectoryId,
    TrajectorySpec,
    TrajectoryStore,
)
from libs.common.tokens import PolicyVersion, TokenArray, join, observed, sampled
from tests.trajectories import spec_of

ONE = PolicyVersion(1)


def spec(job_uid: str, sample: int = 0, **changes: Any) -> TrajectorySpec:
    fields: dict[str, Any] = {"step": 1, "prompt": "2 × 3?", "prompt_ids": [5, 6, 7], "answer": "6", "seed": 2**62}
    fields |= {"row": {"nested": {"numbers": [1, 2.5]}, "text": "é"}, "max_new_tokens": 32}
    return spec_of(TrajectoryId(job_uid, 0, sample), **(fields | changes))


def tokens(*ids: int) -> TokenArray:
    return sampled(ids, [-0.5] * len(ids), ONE)


async def claim_one(store: TrajectoryStore, id: TrajectoryId, *, owner: str = "w", ttl_ms: int = 5000) -> Claim:
    (claim,) = await store.claim([id], owner=owner, ttl_ms=ttl_ms)
    assert isinstance(claim, Claim)
    return claim


async def test_a_whole_life(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid)
    assert await store.create([one]) == 1
    assert await store.create([one, spec(job_uid, 1)]) == 1
    claim = await claim_one(store, one.id)
    assert (claim.spec, claim.epoch, claim.attempt, len(claim.tokens)) == (one, 1, 1, 0)
    first, second = tokens(11, 12), join(observed([13], ONE), tokens(14))
    assert await store.write([Append(one.id, 1, 0, first), Renew(one.id, 1, 5000)]) == [1, 1]
    assert await store.write([Finish(one.id, 1, 2, second, "stop", "six", 2)]) == [1]
    assert await store.states([one.id]) == ["finished"]
    assert await store.write([Score(one.id, 0.5, "close")]) == [1]
    (record,) = await store.read([one.id])
    assert record is not None
    assert record.spec == one
    assert (record.state, record.text, record.turns, record.stop_reason) == ("scored", "six", 2, "stop")
    assert (record.reward, record.reason, record.owner, record.attempts) == (0.5, "close", "w", 1)
    assert record.tokens.tobytes() == join(first, second).tobytes()
    assert await store.members(job_uid) == [one.id, TrajectoryId(job_uid, 0, 1)]
    await store.forget([one.id], incarnation=await store.hold_job(job_uid, owner="t"))
    assert await store.members(job_uid) == [TrajectoryId(job_uid, 0, 1)]
    assert await store.read([one.id]) == [None]
    await store.forget_job(job_uid)
    assert await store.members(job_uid) == []


async def test_repeated_writes_change_nothing(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid)
    await store.create([one])
    await claim_one(store, one.id)
    for _ in range(2):
        assert await store.write([Append(one.id, 1, 0, tokens(1, 2))]) == [1]
    finish = Finish(one.id, 1, 2, tokens(3), "stop", "t", 1)
    assert await store.write([finish, finish]) == [1, 0]
    assert await store.write([Score(one.id, 1.0, "right"), Score(one.id, 0.0, "late")]) == [1, 0]
    (record,) = await store.read([one.id])
    assert record is not None
    assert record.tokens["id"].tolist() == [1, 2, 3]
    assert record.reward == 1.0


async def test_an_append_at_the_wrong_length_is_refused(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid)
    await store.create([one])
    await claim_one(store, one.id)
    await store.write([Append(one.id, 1, 0, tokens(1, 2))])
    for wrong in (Append(one.id, 1, 3, tokens(9)), Append(one.id, 1, 0, tokens(1, 9)), Append(one.id, 1, 1, tokens(7, 8))):
        with pytest.raises(JigsawError, match="LENGTH"):
            await store.write([wrong])
    (record,) = await store.read([one.id])
    assert record is not None
    assert record.tokens["id"].tolist() == [1, 2]


async def test_a_lease_keeps_others_out_until_it_expires(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid)
    await store.create([one])
    await claim_one(store, one.id, owner="slow", ttl_ms=150)
    await store.write([Append(one.id, 1, 0, tokens(1))])
    assert await store.claim([one.id], owner="other", ttl_ms=150) == [NotClaimed("held")]
    assert await store.states([one.id]) == ["running"]
    await asyncio.sleep(0.2)
    assert await store.states([one.id]) == ["expired"]
    taken = await claim_one(store, one.id, owner="other")
    assert (taken.epoch, taken.attempt, taken.tokens["id"].tolist()) == (2, 2, [1])
    stale = [
        Append(one.id, 1, 1, tokens(2)),
        Renew(one.id, 1, 1000),
        Release(one.id, 1),
        Fail(one.id, 1, "late", 0),
        Finish(one.id, 1, 1, tokens(2), "stop", "", 1),
    ]
    answers = await store.write([*stale, Append(one.id, 2, 1, tokens(3))])
    assert all(isinstance(answer, StaleEpochError) for answer in answers[:-1])
    assert answers[-1] == 1
    (record,) = await store.read([one.id])
    assert record is not None
    assert (record.owner, record.tokens["id"].tolist()) == ("other", [1, 3])


async def test_renewal_prolongs_a_lease(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid)
    await store.create([one])
    await claim_one(store, one.id, ttl_ms=200)
    await store.write([Renew(one.id, 1, 5000)])
    await asyncio.sleep(0.25)
    assert await store.claim([one.id], owner="other", ttl_ms=100) == [NotClaimed("held")]


async def test_lost_workers_exhaust_a_sample(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid, max_attempts=2)
    await store.create([one])
    for attempt in (1, 2):
        assert (await claim_one(store, one.id, ttl_ms=1)).attempt == attempt
        await asyncio.sleep(0.01)
    assert await store.claim([one.id], owner="w", ttl_ms=1) == [NotClaimed("exhausted")]
    assert await store.claim([one.id], owner="w", ttl_ms=1) == [NotClaimed("failed")]
    (record,) = await store.read([one.id])
    assert record is not None
    assert (record.state, record.error) == ("failed", "its worker was lost 2 times")


async def test_a_released_sample_costs_no_attempt_and_keeps_its_tokens(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid, max_attempts=1)
    await store.create([one])
    for epoch in (1, 3):
        claim = await claim_one(store, one.id)
        assert (claim.epoch, claim.attempt) == (epoch, 1)
        length = len(claim.tokens)
        assert await store.write([Append(one.id, epoch, length, tokens(epoch)), Release(one.id, epoch)]) == [1, 1]
        assert isinstance((await store.write([Append(one.id, epoch, length + 1, tokens(9))]))[0], StaleEpochError)
    assert (await claim_one(store, one.id)).tokens["id"].tolist() == [1, 3]


async def test_failures_are_retried_after_a_wait_and_then_final(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid, max_attempts=2)
    await store.create([one])
    await claim_one(store, one.id)
    assert await store.write([Fail(one.id, 1, "tool crashed", 150)]) == ["pending"]
    (refused,) = await store.claim([one.id], owner="w", ttl_ms=1000)
    assert isinstance(refused, NotClaimed)
    assert refused.why == "later"
    assert 0 < refused.wait_ms <= 150
    await asyncio.sleep(refused.wait_ms / 1000 + 0.01)
    again = await claim_one(store, one.id)
    assert await store.write([Fail(one.id, again.epoch, "tool crashed again", 0)]) == ["failed"]
    (record,) = await store.read([one.id])
    assert record is not None
    assert (record.state, record.error) == ("failed", "tool crashed again")


async def test_a_final_failure_is_final_at_once(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid, max_attempts=5)
    await store.create([one])
    await claim_one(store, one.id)
    assert await store.write([Fail(one.id, 1, "too long", None)]) == ["failed"]


async def test_what_cannot_be_scored_fails(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid)
    await store.create([one])
    assert await store.write([Score(one.id, 1.0, "too early")]) == [0]
    await claim_one(store, one.id)
    await store.write([Finish(one.id, 1, 0, tokens(1), "stop", "t", 1)])
    assert await store.write([Score(one.id, None, "scorer timed out")]) == [1]
    (record,) = await store.read([one.id])
    assert record is not None
    assert (record.state, record.reward, record.error) == ("failed", None, "scorer timed out")


async def test_batches_answer_in_order_whatever_happens_to_one(store: TrajectoryStore, job_uid: str) -> None:
    specs = [spec(job_uid, sample) for sample in range(50)]
    assert await store.create(specs) == 50
    ids = [one.id for one in specs]
    claims = await store.claim([TrajectoryId(job_uid, 9, 9), *ids, ids[0]], owner="w", ttl_ms=5000)
    assert claims[0] == NotClaimed("gone")
    assert claims[-1] == NotClaimed("held")
    assert [claim.spec.id for claim in claims[1:-1] if isinstance(claim, Claim)] == ids
    writes = [Append(id, 7 if id.sample == 20 else 1, 0, tokens(id.sample)) for id in ids]
    answers = await store.write(writes)
    assert isinstance(answers[20], StaleEpochError)
    assert [answer for index, answer in enumerate(answers) if index != 20] == [1] * 49


async def test_many_claims_never_give_one_sample_to_two(store: TrajectoryStore, job_uid: str) -> None:
    specs = [spec(job_uid, sample) for sample in range(40)]
    await store.create(specs)
    ids = [one.id for one in specs]
    replies = await asyncio.gather(*(store.claim(ids, owner=f"w{n}", ttl_ms=5000) for n in range(8)))
    given = [claim.spec.id for reply in replies for claim in reply if isinstance(claim, Claim)]
    assert sorted(given) == ids


async def test_holding_a_job_counts_up(store: TrajectoryStore, job_uid: str) -> None:
    assert await store.holder(job_uid) == 0
    assert [await store.hold_job(job_uid, owner="a"), await store.hold_job(job_uid, owner="b")] == [1, 2]
    assert await store.holder(job_uid) == 2


async def test_a_replaced_trainer_cannot_forget_what_its_successor_needs(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid)
    await store.create([one])
    replaced = await store.hold_job(job_uid, owner="a")
    await store.hold_job(job_uid, owner="b")
    with pytest.raises(StaleEpochError):
        await store.forget([one.id], incarnation=replaced)
    assert await store.members(job_uid) == [one.id]


async def test_beginning_again_drops_the_tokens_and_keeps_the_claim(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid)
    await store.create([one])
    claim = await claim_one(store, one.id)
    await store.write([Append(one.id, claim.epoch, 0, tokens(1, 2, 3))])
    assert await store.write([Restart(one.id, claim.epoch)]) == [1]
    assert await store.write([Append(one.id, claim.epoch, 0, tokens(9))]) == [1]
    (record,) = await store.read([one.id])
    assert record is not None
    assert record.tokens["id"].tolist() == [9]
    (refused,) = await store.write([Restart(one.id, claim.epoch - 1)])
    assert isinstance(refused, StaleEpochError)


async def test_a_lease_that_ran_out_shows(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid)
    await store.create([one])
    assert await store.states([one.id]) == ["pending"]
    await claim_one(store, one.id, ttl_ms=30)
    assert await store.states([one.id]) == ["running"]
    await asyncio.sleep(0.05)
    assert await store.states([one.id]) == ["expired"]


async def test_forgetting_thousands_of_records(store: TrajectoryStore, job_uid: str) -> None:
    await store.create([spec(job_uid, sample) for sample in range(2500)])
    await store.forget_job(job_uid)
    assert await store.members(job_uid) == []
    assert await store.states([TrajectoryId(job_uid, 0, 3)]) == ["gone"]


async def test_no_server_is_one_clear_line() -> None:
    with pytest.raises(JigsawError, match="doesn't answer"):
        await TrajectoryStore.connect("redis://127.0.0.1:1")


async def test_only_who_replaces_brings_in_another_version_of_the_functions(store: TrajectoryStore, redis_url: str) -> None:
    other = "#!lua name=jigsaw_trajectories\nredis.register_function('jigsaw_state', function() return 'other' end)"
    client = Redis.from_url(redis_url)
    await client.function_load(other, replace=True)
    await store.install(replace=False)
    assert await store.states([TrajectoryId("any", 0, 0)]) == ["other"]
    await store.install(replace=True)
    assert await store.states([TrajectoryId("any", 0, 0)]) == ["gone"]
    await client.function_delete("jigsaw_trajectories")
    await store.install(replace=False)
    assert await store.states([TrajectoryId("any", 0, 0)]) == ["gone"]
    await client.aclose()
