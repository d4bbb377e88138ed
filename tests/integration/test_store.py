"""The trajectory store against real servers: one life of a trajectory, and everyone who may not write."""

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from libs.common.errors import JigsawError, StaleEpochError, TokensLost
from libs.common.store import TrajectoryStore
from libs.common.tokens import PolicyVersion, TokenArray, join, observed, sampled
from libs.common.trajectory import (
    Alone,
    Append,
    Claim,
    Die,
    Fail,
    Finish,
    NotClaimed,
    Offer,
    Record,
    Release,
    Renew,
    Restart,
    Score,
    TrajectoryId,
    TrajectorySpec,
    Transfer,
    Write,
)
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


async def read_one(store: TrajectoryStore, id: TrajectoryId) -> Record:
    (record,) = await store.read([id])
    assert record is not None
    return record


@pytest.fixture
def redis_url(every_redis_url: str) -> str:
    """Each of the servers that the store has to work on, in turn."""
    return every_redis_url


async def test_a_whole_life(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid)
    assert await store.create([one]) == 1
    assert await store.create([one, spec(job_uid, 1)]) == 1
    claim = await claim_one(store, one.id)
    assert (claim.spec, claim.failures, claim.deaths, claim.alone) == (one, 0, 0, False)
    assert len(claim.tokens) == 0
    first, second = tokens(11, 12), join(observed([13], ONE), tokens(14))
    assert await store.write([Append(one.id, claim.epoch, 0, first), Renew(one.id, claim.epoch, 5000)]) == [1, 1]
    assert await store.write([Finish(one.id, claim.epoch, 2, second, "stop", "six", 2)]) == [1]
    assert await store.states([one.id]) == ["finished"]
    assert await store.write([Score(one.id, claim.epoch, 0.5, "close")]) == [1]
    (record,) = await store.read([one.id])
    assert record is not None
    assert record.spec == one
    assert (record.state, record.text, record.turns, record.stop_reason) == ("scored", "six", 2, "stop")
    assert (record.reward, record.reason, record.owner, record.claims) == (0.5, "close", "w", 1)
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
    claim = await claim_one(store, one.id)
    first, second = Append(one.id, claim.epoch, 0, tokens(1)), Append(one.id, claim.epoch, 1, tokens(2))
    assert await store.write([first, second, first, second, first]) == [1] * 5  # a pipeline whose answers were lost
    finish = Finish(one.id, claim.epoch, 2, tokens(3), "stop", "t", 1)
    assert await store.write([finish, finish]) == [1, 0]
    assert await store.write([Score(one.id, claim.epoch, 1.0, "right"), Score(one.id, claim.epoch, 0.0, "late")]) == [1, 0]
    (record,) = await store.read([one.id])
    assert record is not None
    assert record.tokens["id"].tolist() == [1, 2, 3]
    assert record.reward == 1.0


async def test_an_append_at_the_wrong_length_is_refused(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid)
    await store.create([one])
    claim = await claim_one(store, one.id)
    await store.write([Append(one.id, claim.epoch, 0, tokens(1, 2))])
    wrong = [(3, tokens(9)), (0, tokens(1, 9)), (1, tokens(7, 8)), (0, tokens(1, 2, 3))]
    answers = await store.write([Append(one.id, claim.epoch, at, new) for at, new in wrong])
    assert [type(answer) for answer in answers] == [TokensLost] * 4
    (record,) = await store.read([one.id])
    assert record is not None
    assert record.tokens["id"].tolist() == [1, 2]


async def test_a_lease_keeps_others_out_until_it_expires(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid)
    await store.create([one])
    claim = await claim_one(store, one.id, owner="slow", ttl_ms=150)
    await store.write([Append(one.id, claim.epoch, 0, tokens(1))])
    assert await store.claim([one.id], owner="other", ttl_ms=150) == [NotClaimed("held")]
    assert await store.states([one.id]) == ["running"]
    await asyncio.sleep(0.2)
    assert await store.states([one.id]) == ["expired"]
    taken = await claim_one(store, one.id, owner="other")
    assert taken.epoch > claim.epoch
    assert (taken.deaths, taken.tokens["id"].tolist()) == (1, [1])
    stale = [
        Append(one.id, claim.epoch, 1, tokens(2)),
        Renew(one.id, claim.epoch, 1000),
        Release(one.id, claim.epoch),
        Restart(one.id, claim.epoch),
        Transfer(one.id, claim.epoch, "friend", 1000),
        Alone(one.id, claim.epoch),
        Fail(one.id, claim.epoch, "late", 0),
        Die(one.id, claim.epoch, "late"),
        Finish(one.id, claim.epoch, 1, tokens(2), "stop", "", 1),
    ]
    answers = await store.write([*stale, Append(one.id, taken.epoch, 1, tokens(3))])
    assert all(isinstance(answer, StaleEpochError) for answer in answers[:-1])
    assert answers[-1] == 1
    (record,) = await store.read([one.id])
    assert record is not None
    assert (record.owner, record.tokens["id"].tolist()) == ("other", [1, 3])


async def test_renewal_prolongs_a_lease(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid)
    await store.create([one])
    claim = await claim_one(store, one.id, ttl_ms=200)
    await store.write([Renew(one.id, claim.epoch, 5000)])
    await asyncio.sleep(0.25)
    assert await store.claim([one.id], owner="other", ttl_ms=100) == [NotClaimed("held")]


async def test_a_sample_that_was_on_many_lost_workers_never_fails(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid, max_attempts=1)
    await store.create([one])
    for deaths in range(6):
        claim = await claim_one(store, one.id, ttl_ms=0)  # has run out before the next claim
        assert (claim.deaths, claim.alone, claim.failures) == (deaths, deaths >= 2, 0)
    assert await store.write([Die(one.id, claim.epoch, "engine: out of memory")]) == ["pending"]
    record = await read_one(store, one.id)
    assert (record.claims, record.deaths, record.error) == (6, 6, "engine: out of memory")


async def test_a_sample_that_kills_its_worker_twice_alone_is_failed(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid)
    await store.create([one])
    for number, state in enumerate(("pending", "failed")):
        epoch = (await claim_one(store, one.id)).epoch
        assert await store.write([Alone(one.id, epoch), Die(one.id, epoch, f"engine: signal {number}")]) == [1, state]
    record = await read_one(store, one.id)
    assert record.error == "killed its worker twice while it ran alone; last error: engine: signal 1"
    assert (record.deaths, record.failures) == (2, 0)
    assert await store.claim([one.id], owner="w", ttl_ms=1) == [NotClaimed("failed")]


async def test_a_claim_tells_once_that_it_has_failed_a_poisonous_sample(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid)
    await store.create([one])
    for _ in range(2):
        claim = await claim_one(store, one.id, ttl_ms=0)
        await store.write([Alone(one.id, claim.epoch)])
    claims = [(await store.claim([one.id], owner="w", ttl_ms=5000))[0] for _ in range(2)]
    assert claims == [NotClaimed("poisoned"), NotClaimed("failed")]
    assert (await read_one(store, one.id)).error == "killed its worker twice while it ran alone"


async def test_a_new_token_or_company_clears_a_sample_of_a_death(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid)
    await store.create([one])
    for length in range(4):
        claim = await claim_one(store, one.id, ttl_ms=0)
        await store.write([Alone(one.id, claim.epoch), Append(one.id, claim.epoch, length, tokens(length))])
    for _ in range(4):
        await claim_one(store, one.id, ttl_ms=0)  # it isn't alone any more
    claim = await claim_one(store, one.id)
    _, epoch = await store.write([Alone(one.id, claim.epoch), Restart(one.id, claim.epoch)])
    assert isinstance(epoch, int)
    new = Append(one.id, epoch, 0, tokens(5, 6, 7, 8))  # as many as there were at the claim, and new
    assert await store.write([new, Die(one.id, epoch, "engine")]) == [1, "pending"]
    assert (await read_one(store, one.id)).deaths == 9


async def test_a_transferred_sample_is_its_new_owners_alone(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid)
    await store.create([one])
    claim = await claim_one(store, one.id, owner="source")
    writes = [
        Append(one.id, claim.epoch, 0, tokens(1, 2)),
        Transfer(one.id, claim.epoch, "target", 0),
        Append(one.id, claim.epoch, 2, tokens(3)),
    ]
    appended, epoch, refused = await store.write(writes)
    assert (appended, epoch) == (1, claim.epoch + 1)
    assert isinstance(epoch, int)
    assert isinstance(refused, StaleEpochError)
    offers = [Offer(one.id, claim.epoch), Offer(one.id, epoch), Offer(TrajectoryId(job_uid, 7, 7), epoch)]
    assert await store.adopt(offers, owner="source", ttl_ms=5000) == [*[NotClaimed("held")] * 2, NotClaimed("gone")]
    held, adopted, _ = await store.adopt(offers, owner="target", ttl_ms=5000)  # late, but nobody else has taken it
    assert held == NotClaimed("held")
    assert isinstance(adopted, Claim)
    assert (adopted.spec, adopted.epoch, adopted.deaths, adopted.tokens["id"].tolist()) == (one, epoch, 0, [1, 2])
    assert await store.states([one.id]) == ["running"]
    assert await store.write([Finish(one.id, epoch, 2, tokens(3), "stop", "t", 1)]) == [1]
    assert await store.adopt([Offer(one.id, epoch)], owner="target", ttl_ms=5000) == [NotClaimed("finished")]
    record = await read_one(store, one.id)
    assert (record.owner, record.claims, record.moves, record.resumes, record.recomputed) == ("target", 1, 1, 0, 3 + 2)


async def test_tokens_keep_their_own_version_and_log_prob_whoever_goes_on(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid)
    await store.create([one])
    parts = [
        sampled([1, 2], [-0.5, -0.25], PolicyVersion(1, 1)),
        observed([7], PolicyVersion(1, 1)),
        sampled([3], [-2.0], PolicyVersion(1, 2)),
        sampled([4, 5], [-3.0, -0.125], PolicyVersion(2, 2)),
    ]
    at = 0
    for number, part in enumerate(parts):
        claim = await claim_one(store, one.id, owner=f"w{number}")
        assert (claim.tokens == join(*parts[:number])).all()
        await store.write([Append(one.id, claim.epoch, at, part), Release(one.id, claim.epoch)])
        at += len(part)
    record = await read_one(store, one.id)
    assert record.tokens.tobytes() == join(*parts).tobytes()


async def test_a_transferred_sample_that_nobody_adopts_is_anyones(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid)
    await store.create([one])
    claim = await claim_one(store, one.id, owner="source")
    await store.write(
        [Alone(one.id, claim.epoch), Append(one.id, claim.epoch, 0, tokens(1)), Transfer(one.id, claim.epoch, "target", 0)]
    )
    assert await store.states([one.id]) == ["expired"]
    taken = await claim_one(store, one.id, owner="other")
    assert (taken.tokens["id"].tolist(), taken.deaths) == ([1], 0)  # nobody ran it when its lease ran out
    assert await store.adopt([Offer(one.id, claim.epoch + 1)], owner="target", ttl_ms=5000) == [NotClaimed("held")]
    record = await read_one(store, one.id)
    assert (record.owner, record.moves, record.resumes, record.recomputed) == ("other", 1, 1, 3 + 1)


async def test_a_released_sample_counts_as_no_failure_and_keeps_its_tokens(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid, max_attempts=1)
    await store.create([one])
    for id in (1, 3):
        claim = await claim_one(store, one.id)
        assert (claim.failures, claim.deaths) == (0, 0)
        epoch, length = claim.epoch, len(claim.tokens)
        assert await store.write([Append(one.id, epoch, length, tokens(id)), Release(one.id, epoch)]) == [1, 1]
        assert isinstance((await store.write([Append(one.id, epoch, length + 1, tokens(9))]))[0], StaleEpochError)
    assert (await claim_one(store, one.id)).tokens["id"].tolist() == [1, 3]


async def test_failures_are_retried_after_a_wait_and_then_final(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid, max_attempts=2)
    await store.create([one])
    claim = await claim_one(store, one.id)
    assert await store.write([Fail(one.id, claim.epoch, "tool crashed", 150)]) == ["pending"]
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
    claim = await claim_one(store, one.id)
    assert await store.write([Fail(one.id, claim.epoch, "too long", None)]) == ["failed"]


async def test_what_cannot_be_scored_fails(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid)
    await store.create([one])
    claim = await claim_one(store, one.id)
    assert await store.write([Score(one.id, claim.epoch, 1.0, "too early")]) == [0]
    await store.write([Finish(one.id, claim.epoch, 0, tokens(1), "stop", "t", 1)])
    assert await store.write([Score(one.id, claim.epoch - 1, 1.0, "of another text")]) == [0]
    assert await store.write([Score(one.id, claim.epoch, None, "scorer timed out")]) == [1]
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
    epochs = {claim.spec.id: claim.epoch for claim in claims if isinstance(claim, Claim)}
    writes = [Append(id, 7 if id.sample == 20 else epochs[id], 0, tokens(id.sample)) for id in ids]
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


async def test_one_that_was_replaced_does_not_go_on_holding_a_job(store: TrajectoryStore, job_uid: str) -> None:
    await store.hold_job(job_uid, owner="a")
    assert await store.hold_job(job_uid, owner="a", still=True) == 2
    await store.hold_job(job_uid, owner="b")
    with pytest.raises(StaleEpochError):
        await store.hold_job(job_uid, owner="a", still=True)
    await store.forget_job(job_uid)  # as when the job has ended, or the server has lost it
    with pytest.raises(StaleEpochError):
        await store.hold_job(job_uid, owner="a", still=True)
    assert await store.hold_job(job_uid, owner="a", above=7) == 8


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
    claim = await claim_one(store, one.id, owner="w")
    first, restart = Append(one.id, claim.epoch, 0, tokens(1, 2, 3)), Restart(one.id, claim.epoch)
    assert await store.write([first, restart, restart]) == [1, claim.epoch + 1, claim.epoch + 1]
    assert await store.claim([one.id], owner="other", ttl_ms=5000) == [NotClaimed("held")]
    assert await store.write([Append(one.id, claim.epoch + 1, 0, tokens(9))]) == [1]
    record = await read_one(store, one.id)
    assert (record.owner, record.claims, record.tokens["id"].tolist()) == ("w", 1, [9])


async def test_what_a_connection_delivers_late_does_not_touch_what_was_begun_again(
    store: TrajectoryStore, job_uid: str
) -> None:
    one = spec(job_uid)
    await store.create([one])
    claim = await claim_one(store, one.id)
    first, restart = Append(one.id, claim.epoch, 0, tokens(1, 2, 3)), Restart(one.id, claim.epoch)
    await store.write([first, restart])
    (refused, _) = await store.write([first, restart])
    assert isinstance(refused, StaleEpochError)
    assert (await read_one(store, one.id)).tokens["id"].tolist() == []
    again = Append(one.id, claim.epoch + 1, 0, tokens(7, 8, 9))
    await store.write([again, first, restart])
    assert (await read_one(store, one.id)).tokens["id"].tolist() == [7, 8, 9]


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
        await TrajectoryStore.connect("redis://127.0.0.1:1", patience_s=0.2)


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


async def test_an_epoch_of_a_life_that_the_store_has_lost_is_never_good_again(store: TrajectoryStore, job_uid: str) -> None:
    one = spec(job_uid)
    await store.create([one])
    before = await claim_one(store, one.id, owner="old")
    await store.forget_job(job_uid)
    await store.create([one])
    after = await claim_one(store, one.id, owner="new")
    assert after.epoch > before.epoch
    (refused,) = await store.write([Append(one.id, before.epoch, 0, tokens(1))])
    assert isinstance(refused, StaleEpochError)


async def test_what_is_repeated_after_a_lost_answer_is_answered_as_the_first_time(
    store: TrajectoryStore, redis_url: str, job_uid: str
) -> None:
    specs = [spec(job_uid, sample) for sample in range(5)]
    await store.create(specs)
    epochs = [(await claim_one(store, one.id)).epoch for one in specs]
    ids = [one.id for one in specs]
    ends: list[Write] = [
        Release(ids[0], epochs[0]),
        Transfer(ids[1], epochs[1], "friend", 5000),
        Fail(ids[2], epochs[2], "tool", 0),
        Die(ids[3], epochs[3], "engine"),
        Restart(ids[4], epochs[4]),
    ]
    answers = await store.write(ends)
    assert answers == [1, epochs[1] + 1, "pending", "pending", epochs[4] + 1]
    await claim_one(store, ids[0], owner="other")
    assert await store.write(ends) == answers
    assert [record.failures + record.deaths for record in await store.read(ids) if record] == [0, 0, 1, 1, 0]
    late = await store.write([Fail(ids[0], epochs[0], "late", 0), Release(ids[2], epochs[2])])
    assert all(isinstance(answer, StaleEpochError) for answer in late)


async def test_a_claim_whose_answer_was_lost_is_given_again_to_the_same_call_alone(
    store: TrajectoryStore, redis_url: str, job_uid: str
) -> None:
    one = spec(job_uid)
    await store.create([one])
    redis = Redis.from_url(redis_url)
    key = f"jigsaw:{{{one.id.job_uid}}}:{one.id.member}"
    call = ("jigsaw_claim", 2, key, f"{key}:tokens", "w", 5000)
    first, again, other = [await redis.fcall(*call, name) for name in ("first", "first", "other")]
    assert first == again
    assert other == [b"held"]
    record = await read_one(store, one.id)
    assert (record.claims, record.deaths) == (1, 0)
    await redis.aclose()
