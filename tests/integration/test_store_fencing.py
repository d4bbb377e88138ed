"""Several workers write to one record in every order, and the store does what its rules say: nothing stale gets through.

The server carries out one function at a time, so every interleaving of concurrent workers is some sequence of calls. Random
sequences, each from its seed, are played against a real server and against :mod:`tests.trajectory_model`; after every call
the whole record must be what the model says. No time passes: a lease or a wait ends because a call ends it. Hundreds of
sequences, each with a record of its own, advance in step, so that a round trip carries one call of each.
"""

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence

import pytest
from redis.asyncio import Redis

from libs.common.errors import StaleEpochError, TokensLost
from libs.common.store import TrajectoryStore
from libs.common.trajectory import (
    Alone,
    Append,
    Die,
    Fail,
    Finish,
    Offer,
    Release,
    Renew,
    Restart,
    Score,
    TrajectoryId,
    Transfer,
    Write,
)
from tests.trajectory_calls import LONG_MS, Call, Life, Wrong, sequence
from tests.trajectory_model import Answer, Refused

SEQUENCES, CALLS = 300, 60
OFTEN = {
    **{(kind.__name__, "OVERTAKEN"): 30 for kind in (Append, Finish, Renew, Release, Restart, Alone, Transfer, Fail, Die)},
    **{(kind.__name__, "done"): 50 for kind in (Append, Finish, Renew, Release, Restart, Alone, Transfer)},
    **{(kind.__name__, "pending"): 50 for kind in (Fail, Die)},
    **{("claim", answer): 50 for answer in ("claimed", "held", "later", "failed", "finished", "scored")},
    **{("adopt", answer): 10 for answer in ("claimed", "held", "failed", "finished", "scored")},
    **{("Append", "LENGTH"): 30, ("Finish", "LENGTH"): 30, ("Finish", "0"): 30, ("Score", "done"): 30},
    **{("claim", "poisoned"): 5, ("Die", "failed"): 20, ("Fail", "failed"): 10},
}
"""How often the sequences must bring about what, at least; overtaken: while another runs it under a later epoch."""


class Player:
    """Plays sequences of calls; ``seen`` counts each kind of call with its answer."""

    def __init__(self, store: TrajectoryStore, redis: "Redis", job_uid: str) -> None:
        self._store, self._redis, self._uid = store, redis, job_uid
        self._groups = 0
        self.seen: Counter[tuple[str, str]] = Counter()

    async def play(self, sequences: Sequence[Sequence[Call]]) -> None:
        """Each on a record of its own, call by call.

        Raises:
            Wrong: a record isn't what it should be.
        """
        self._groups += 1
        lives = [Life(TrajectoryId(self._uid, self._groups, n), calls) for n, calls in enumerate(sequences)]
        await self._store.create([life.spec for life in lives])
        await self._check(lives)
        for step in range(max(len(life.calls) for life in lives)):
            await self._step([life for life in lives if step < len(life.calls)])
        for life, stored in zip(lives, await self._store.read([life.id for life in lives]), strict=True):
            life.check_as_read(stored)

    async def _step(self, lives: Sequence[Life]) -> None:
        takers: defaultdict[tuple[str, str, int], list[Life]] = defaultdict(list)
        writers, clocks = list[Life](), list[Life]()
        for life in lives:
            life.begun += 1
            if life.call.kind in ("claim", "adopt"):
                takers[life.call.kind, life.taker, LONG_MS if life.call.lasts else 0].append(life)
            else:
                (clocks if life.call.kind in ("lease_ends", "wait_ends") else writers).append(life)
        for (kind, worker, ttl_ms), takes in takers.items():
            await (self._claim if kind == "claim" else self._adopt)(takes, worker, ttl_ms)
        await self._write(writers)
        await self._let_time_pass(clocks)
        await self._check(lives)

    async def _claim(self, lives: Sequence[Life], worker: str, ttl_ms: int) -> None:
        answers = [life.model.claim(worker, ttl_ms=ttl_ms) for life in lives]
        got = await self._store.claim([life.id for life in lives], owner=worker, ttl_ms=ttl_ms)
        for life, claim, answer in zip(lives, got, answers, strict=True):
            self.seen["claim", answer] += 1
            life.check_given(claim, answer)

    async def _adopt(self, lives: Sequence[Life], worker: str, ttl_ms: int) -> None:
        offers = [Offer(life.id, life.epoch) for life in lives]
        answers = [life.model.adopt(life.epoch, worker, ttl_ms=ttl_ms) for life in lives]
        got = await self._store.adopt(offers, owner=worker, ttl_ms=ttl_ms)
        for life, claim, answer in zip(lives, got, answers, strict=True):
            self.seen["adopt", answer] += 1
            life.check_given(claim, answer)

    async def _write(self, lives: Sequence[Life]) -> None:
        together: list[tuple[Life, Write, Answer]] = []
        for life in lives:
            together += [(life, write, self._expected(life, write)) for write in life.writes()]
        got = await self._store.write([write for _, write, _ in together])
        for (life, write, answer), told in zip(together, got, strict=True):
            life.must(f"answer to {type(write).__name__}", _said(told), answer)

    def _expected(self, life: Life, write: Write) -> Answer:
        record = life.model
        overtaken = not isinstance(write, Score) and record.state == "running" and write.epoch < record.epoch
        answer = record.write(write)
        kind = answer.name if isinstance(answer, Refused) else "done" if isinstance(answer, int) and answer else str(answer)
        self.seen[type(write).__name__, "OVERTAKEN" if overtaken else kind] += 1
        return answer

    async def _let_time_pass(self, lives: Sequence[Life]) -> None:
        pipe = self._redis.pipeline(transaction=False)
        for life in lives:
            if life.call.kind == "lease_ends":
                life.model.leased = False
                pipe.hset(life.key, "expires", "0")
            else:
                life.model.waiting = False
                pipe.hset(life.key, "not_before", "0")
        await pipe.execute()

    async def _check(self, lives: Sequence[Life]) -> None:
        pipe = self._redis.pipeline(transaction=False)
        for life in lives:
            pipe.hgetall(life.key)
            pipe.get(f"{life.key}:tokens")
            pipe.fcall_ro("jigsaw_state", 1, life.key)
        replies = await pipe.execute()
        for index, life in enumerate(lives):
            life.check(*replies[3 * index : 3 * index + 3])


def _said(told: int | str | StaleEpochError) -> Answer:
    """The store's answer as the model would give it."""
    if isinstance(told, StaleEpochError):
        return Refused.LENGTH if isinstance(told, TokensLost) else Refused.STALE
    return told


async def shortest(wrong: Wrong, player: Player) -> Wrong:
    """The same failure, or another, without any call that it can do without."""
    at = 0
    while at < len(wrong.calls):
        try:
            await player.play([[*wrong.calls[:at], *wrong.calls[at + 1 :]]])
            at += 1
        except Wrong as again:
            wrong = again
    return wrong


@pytest.fixture
def redis_url(every_redis_url: str) -> str:
    """Each of the servers that the store has to work on, in turn."""
    return every_redis_url


@pytest.fixture
async def player(store: TrajectoryStore, redis_url: str, job_uid: str) -> AsyncIterator[Player]:
    """On the run's server."""
    redis = Redis.from_url(redis_url)
    yield Player(store, redis, job_uid)
    await store.forget_job(job_uid)
    await redis.aclose()


@pytest.mark.timeout(180)  # a failure is made short before it is told
async def test_no_interleaving_of_workers_gets_a_stale_write_through(player: Player) -> None:
    try:
        await player.play([sequence(seed, length=CALLS) for seed in range(SEQUENCES)])
    except Wrong as wrong:
        least = await shortest(wrong, player)
        calls = "\n".join(map(str, least.calls))
        pytest.fail(f"seed {wrong.seed}: {least}, after\n{calls}", pytrace=False)
    assert {what: player.seen[what] for what, least in OFTEN.items() if player.seen[what] < least} == {}
