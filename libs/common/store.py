"""The trajectory store: the truth about every trajectory, in Redis or Valkey.

The rules (who may write, in which state, after which token) live in ``trajectories.lua`` inside the server; this module
speaks them. Everything is safe to repeat, and is repeated while the server is away: :mod:`libs.common.store_connection`.
Everything is batched: one call is one pipelined round trip however many trajectories it carries. Keys of a job share a hash
tag, so that they stay together on a cluster::

    jigsaw:{job_uid}:records                 set of members "group.sample"
    jigsaw:{job_uid}:hold                    hash: owner, incarnation of the job's trainer
    jigsaw:{job_uid}:group.sample            hash: the record, see below
    jigsaw:{job_uid}:group.sample:tokens     string: libs.common.tokens.TOKEN records, appended; none until the first

The fields of a record; times are milliseconds of the server's clock, counts are decimal numbers::

    spec             msgpack of TrajectorySpec; never changes
    max_failures     the spec's max_attempts. prompt_tokens: length of its prompt_ids; both for the server's rules
    state            pending | running | finished | scored | failed
    epoch            fencing epoch: grows with every claim, transfer, restart and giving back; what a worker writes must name
                     it
    owner, expires   of the last lease; a running record whose lease has run out may be claimed
    not_before       a pending record isn't given before this time
    claims           claims given
    failures         attempts that failed in an ordinary way; max_failures of them fail the record
    deaths           times that its worker, or the worker's engine, died under it; from 2 on it has to run alone
    lonely           1 once it runs alone in this claim
    lonely_deaths    deaths alone that came before a single new token; 2 fail the record
    base             tokens at the claim or adoption; 0 after a restart
    resumes          claims that found tokens. moves: transfers
    recomputed       prompt and response tokens whose KV resumes and moves had to compute again
    error            of the last failure or death
    offered          1 while it is transferred and not adopted yet: its death then is nobody's
    claimed_by       name of the call that claimed it. ended_by, ended_answer: the write that ended an epoch last, and what
                     was answered; so a call that is repeated is answered as the first time
    stop_reason, text, turns     of a finished one
    reward, reason               of a scored one; reward as repr(float)
"""

from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Literal, Self
from uuid import uuid4

import msgspec
import numpy as np
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from libs.common.errors import JigsawError, StaleEpochError, TokensLost, Unreachable
from libs.common.patience import PATIENCE_S
from libs.common.store_connection import open_store
from libs.common.tokens import TOKEN, from_bytes
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
    State,
    TrajectoryId,
    TrajectorySpec,
    Transfer,
    Write,
)

_TEXTS = ("text", "stop_reason", "reason", "error", "owner")
_NUMBERS = ("epoch", "turns", "claims", "failures", "deaths", "resumes", "moves", "recomputed")
_RECORD_FIELDS = ("spec", "state", "reward", *_TEXTS, *_NUMBERS)
_spec_encoder = msgspec.msgpack.Encoder()
_spec_decoder = msgspec.msgpack.Decoder(TrajectorySpec)


class TrajectoryStore:
    """Client of the trajectory store; safe to share between tasks of one event loop."""

    def __init__(self, redis: "Redis") -> None:
        self._redis = redis

    @classmethod
    async def connect(cls, url: str, *, patience_s: float = PATIENCE_S) -> Self:
        """Connect. From then on everything is repeated until it is answered or patience is over.

        Args:
            patience_s: how long the server may be away, now and later.

        Raises:
            JigsawError: no server at the url that lets us in.
        """
        store = cls(open_store(url, patience_s=patience_s))
        try:
            await store.ping()
        except (Unreachable, RedisError) as error:
            await store.close()
            raise JigsawError(str(error)) from None
        return store

    async def close(self) -> None:
        """Close all connections."""
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()

    async def ping(self) -> None:
        """Raises if the server doesn't answer."""
        await self._redis.ping()

    async def install(self, *, replace: bool) -> None:
        """Make sure that the server has the functions.

        Args:
            replace: those of another version. One service does this, the scheduler, or an instance that was left behind by
                an upgrade would bring its own version back.

        Raises:
            JigsawError: the server refuses them.
        """
        try:
            await self._redis.function_load(_functions(), replace=replace)
        except ResponseError as error:
            if replace or "already exists" not in str(error):
                raise JigsawError(f"the trajectory store doesn't take its functions: {error}") from None

    async def hold_job(self, job_uid: str, *, owner: str, above: int = 0, still: bool = False) -> int:
        """Take a job as its trainer; returns the new, strictly growing incarnation.

        Args:
            above: an incarnation that is known to have been; in a crash the server may have lost that it was.
            still: go on holding it, in another life of the same trainer.

        Raises:
            StaleEpochError: ``still``, but another trainer holds it.
        """
        pipe = self._redis.pipeline(transaction=False)
        pipe.fcall("jigsaw_hold", 1, _hold(job_uid), owner, above, int(still))
        (incarnation,) = _counts(await pipe.execute(raise_on_error=False))
        return incarnation

    async def holder(self, job_uid: str) -> int:
        """The incarnation that holds the job now."""
        return int(await self._redis.hget(_hold(job_uid), "incarnation") or 0)

    async def create(self, specs: Sequence[TrajectorySpec], *, incarnation: int | None = None) -> int:
        """Create records that aren't there yet; returns how many were new. Repeating it is safe.

        Args:
            incarnation: of the trainer that creates them; None for one that nobody can have replaced.

        Raises:
            StaleEpochError: another trainer holds the job, or it has ended.
        """
        pipe, holder = self._redis.pipeline(transaction=False), "" if incarnation is None else str(incarnation)
        for spec in specs:
            uid = spec.id.job_uid
            keys = (*_keys(spec.id), _index(uid), _hold(uid))
            bounds = ("max_failures", spec.max_attempts, "prompt_tokens", len(spec.prompt_ids))
            fields = ("spec", _spec_encoder.encode(spec), *bounds)
            pipe.fcall("jigsaw_create", len(keys), *keys, holder, spec.id.member, *fields)
        return sum(_counts(await pipe.execute(raise_on_error=False)))

    async def claim(self, ids: Sequence[TrajectoryId], *, owner: str, ttl_ms: int) -> list[Claim | NotClaimed]:
        """Take the leases of trajectories, in order of ``ids``. A claim whose answer was lost is given again."""
        pipe, call = self._redis.pipeline(transaction=False), uuid4().hex
        for index, id in enumerate(ids):
            pipe.fcall("jigsaw_claim", 2, *_keys(id), owner, ttl_ms, f"{call}.{index}")
        return [_claimed(reply) for reply in await pipe.execute()]

    async def adopt(self, offers: Sequence[Offer], *, owner: str, ttl_ms: int) -> list[Claim | NotClaimed]:
        """Take over trajectories that were transferred to ``owner``, in order of ``offers``. Repeating it is safe."""
        pipe = self._redis.pipeline(transaction=False)
        for offer in offers:
            pipe.fcall("jigsaw_adopt", 2, *_keys(offer.id), offer.epoch, owner, ttl_ms)
        return [_claimed(reply) for reply in await pipe.execute()]

    async def write(self, writes: Sequence[Write]) -> list["int | str | StaleEpochError"]:
        """Carry out all writes in one round trip.

        Returns:
            Per write, in order: what the server answered, or the :class:`StaleEpochError` with which it was refused (the
            caller has lost that trajectory and must drop it; the others went through).

        Raises:
            JigsawError: the store refused a write for another reason, which is a bug in the caller.
        """
        pipe = self._redis.pipeline(transaction=False)
        for write in writes:
            _queue(pipe, write)
        return [_answer(reply) for reply in await pipe.execute(raise_on_error=False)]

    async def states(self, ids: Sequence[TrajectoryId]) -> list[State | Literal["expired", "gone"]]:
        """The states of records; ``expired`` for a running one whose lease has run out, ``gone`` for none at all."""
        pipe = self._redis.pipeline(transaction=False)
        for id in ids:
            pipe.fcall("jigsaw_state", 1, _keys(id)[0])
        return [reply.decode() for reply in await pipe.execute()]

    async def read(self, ids: Sequence[TrajectoryId]) -> list[Record | None]:
        """Whole records, None for ones that don't exist."""
        pipe = self._redis.pipeline(transaction=False)
        for id in ids:
            record, tokens = _keys(id)
            pipe.hmget(record, _RECORD_FIELDS)
            pipe.get(tokens)
        replies = await pipe.execute()
        return [_record(*pair) for pair in zip(replies[::2], replies[1::2], strict=True)]

    async def members(self, job_uid: str) -> list[TrajectoryId]:
        """All trajectories of a job that the store holds, in order."""
        names: set[bytes] = await self._redis.smembers(_index(job_uid))  # type: ignore[assignment]  # never decodes here
        pairs = (name.decode().split(".") for name in names)
        return sorted(TrajectoryId(job_uid, int(group), int(sample)) for group, sample in pairs)

    async def forget(self, ids: Sequence[TrajectoryId], *, incarnation: int) -> None:
        """Delete records of one job, their tokens with them, as the trainer that holds it.

        Raises:
            StaleEpochError: another trainer holds the job.
        """
        await self._forget(ids, str(incarnation))

    async def forget_job(self, job_uid: str) -> None:
        """Delete everything of an ended job; its hold first, so that no trainer of it can create anything any more."""
        await self._redis.delete(_hold(job_uid))
        await self._forget(await self.members(job_uid), "")
        await self._redis.delete(_index(job_uid))

    async def _forget(self, ids: Sequence[TrajectoryId], incarnation: str) -> None:
        pipe = self._redis.pipeline(transaction=False)
        for start in range(0, len(ids), 1000):
            part = ids[start : start + 1000]
            uid = part[0].job_uid
            keys = [_index(uid), _hold(uid), *(key for id in part for key in _keys(id))]
            pipe.fcall("jigsaw_forget", len(keys), *keys, incarnation, *(id.member for id in part))
        _counts(await pipe.execute(raise_on_error=False))


def _functions() -> str:
    return files("libs.common").joinpath("trajectories.lua").read_text(encoding="utf-8")


def _hold(job_uid: str) -> str:
    return f"jigsaw:{{{job_uid}}}:hold"


def _index(job_uid: str) -> str:
    return f"jigsaw:{{{job_uid}}}:records"


def _keys(id: TrajectoryId) -> tuple[str, str]:
    record = f"jigsaw:{{{id.job_uid}}}:{id.member}"
    return record, f"{record}:tokens"


def _queue(pipe: Any, write: Write) -> None:
    record, tokens = _keys(write.id)
    match write:
        case Append(epoch=epoch, expected_length=length, tokens=new):
            pipe.fcall("jigsaw_append", 2, record, tokens, epoch, length, new.tobytes())
        case Finish(epoch=epoch, expected_length=length, tokens=new):
            end = (write.stop_reason, write.text, write.turns)
            pipe.fcall("jigsaw_finish", 2, record, tokens, epoch, length, new.tobytes(), *end)
        case Renew(epoch=epoch, ttl_ms=ttl_ms):
            pipe.fcall("jigsaw_renew", 1, record, epoch, ttl_ms)
        case Release(epoch=epoch):
            pipe.fcall("jigsaw_release", 1, record, epoch)
        case Transfer(epoch=epoch, to=to, ttl_ms=ttl_ms):
            pipe.fcall("jigsaw_transfer", 1, record, epoch, to, ttl_ms)
        case Restart(epoch=epoch):
            pipe.fcall("jigsaw_restart", 2, record, tokens, epoch)
        case Alone(epoch=epoch):
            pipe.fcall("jigsaw_alone", 1, record, epoch)
        case Fail(epoch=epoch, error=error, backoff_ms=backoff_ms):
            pipe.fcall("jigsaw_fail", 1, record, epoch, error, -1 if backoff_ms is None else backoff_ms)
        case Die(epoch=epoch, error=error):
            pipe.fcall("jigsaw_die", 2, record, tokens, epoch, error)
        case Score(epoch=epoch, reward=reward, reason=reason):
            valid = reward is not None
            pipe.fcall("jigsaw_score", 1, record, epoch, repr(reward) if valid else "", reason, "1" if valid else "0")


def _answer(reply: Any) -> "int | str | StaleEpochError":
    match reply:
        case ResponseError() if str(reply).startswith("STALE"):
            return StaleEpochError(str(reply))
        case ResponseError() if str(reply).startswith("LENGTH"):
            return TokensLost(str(reply))
        case Exception():
            raise JigsawError(f"the trajectory store refused a write: {reply}") from reply
        case bytes():
            return reply.decode()
        case _:
            return int(reply)


def _counts(replies: Sequence[Any]) -> list[int]:
    """What was answered to a job's trainer.

    Raises:
        StaleEpochError: it doesn't hold the job.
    """
    counts = []
    for reply in replies:
        if isinstance(answer := _answer(reply), StaleEpochError):
            raise answer
        counts.append(int(answer))
    return counts


def _claimed(reply: list[Any]) -> Claim | NotClaimed:
    why = reply[0].decode()
    if why != "claimed":
        return NotClaimed(why, int(reply[1]) if why == "later" else 0)
    _, epoch, failures, deaths, alone, spec, tokens = reply
    return Claim(
        _spec_decoder.decode(spec), int(epoch), int(failures), int(deaths), alone=bool(alone), tokens=from_bytes(tokens)
    )


def _record(values: list[Any], tokens: bytes | None) -> Record | None:
    fields = dict(zip(_RECORD_FIELDS, values, strict=True))
    if fields["spec"] is None:
        return None
    more: dict[str, Any] = {name: (fields[name] or b"").decode() for name in _TEXTS}
    more |= {name: int(fields[name] or 0) for name in _NUMBERS}
    return Record(
        spec=_spec_decoder.decode(fields["spec"]),
        state=fields["state"].decode(),
        tokens=from_bytes(tokens) if tokens else np.zeros(0, TOKEN),
        reward=float(fields["reward"]) if fields["reward"] else None,
        **more,
    )
