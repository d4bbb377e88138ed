"""The trajectory store: the truth about every trajectory, in Redis or Valkey.

The rules (who may write, in which state, after which token) live in ``trajectories.lua`` inside the server; this module
speaks them. Everything is batched: one call is one pipelined round trip however many trajectories it carries. Keys of a
job share a hash tag, so that they stay together on a cluster::

    jigsaw:{job_uid}:records                 set of members "group.sample"
    jigsaw:{job_uid}:hold                    hash: owner, incarnation of the job's trainer
    jigsaw:{job_uid}:group.sample            hash: spec, state, epoch, owner, expires, attempts, text, reward, reason, ...
    jigsaw:{job_uid}:group.sample:tokens     string: libs.common.tokens.TOKEN records, appended
"""

from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Literal, Self

import msgspec
import numpy as np
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from libs.common.errors import JigsawError, StaleEpochError
from libs.common.tokens import TOKEN, TokenArray, from_bytes

TERMINAL = frozenset({"scored", "failed"})

State = Literal["pending", "running", "finished", "scored", "failed"]


class TrajectoryId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The identity of a trajectory; a job's groups are numbered once over its whole life."""

    job_uid: str
    group: int
    sample: int

    @property
    def member(self) -> str:
        """Name within the job."""
        return f"{self.group}.{self.sample}"

    def __str__(self) -> str:
        return f"{self.job_uid}/{self.member}"


class TrajectorySpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a trajectory starts from; never changes.

    Attributes:
        step: of the job that trains (or evaluates) its group. purpose: trained on, or held-out evaluation.
        prompt: the question as text, for people. prompt_ids: the rendered opening prompt.
        answer, row: what scorer and environment need. seed: of all randomness in this trajectory.
        max_new_tokens: sampled tokens over all turns. max_turns: model turns.
    """

    id: TrajectoryId
    step: int
    purpose: Literal["train", "eval"] = "train"
    prompt: str
    prompt_ids: list[int]
    answer: str
    row: dict[str, Any]
    seed: int
    temperature: float
    max_new_tokens: int
    max_turns: int
    max_attempts: int


class Claim(msgspec.Struct, frozen=True):
    """A trajectory that this worker owns until its lease runs out: what to continue, and the epoch to write with."""

    spec: TrajectorySpec
    epoch: int
    attempt: int
    tokens: TokenArray


class NotClaimed(msgspec.Struct, frozen=True):
    """Why a claim wasn't given.

    ``held`` by another, ``later`` (backing off), ``exhausted`` (just failed for good), ``gone``, or the state it is in.
    """

    why: str
    wait_ms: int = 0


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory as stored."""

    spec: TrajectorySpec
    state: State
    epoch: int
    attempts: int
    tokens: TokenArray
    text: str = ""
    turns: int = 0
    stop_reason: str = ""
    reward: float | None = None
    reason: str = ""
    error: str = ""
    owner: str = ""


class Append(msgspec.Struct, frozen=True):
    """New tokens of a running trajectory, after the ``expected_length`` already stored."""

    id: TrajectoryId
    epoch: int
    expected_length: int
    tokens: TokenArray


class Finish(msgspec.Struct, frozen=True):
    """The last tokens of a trajectory, with its final text: state *finished*."""

    id: TrajectoryId
    epoch: int
    expected_length: int
    tokens: TokenArray
    stop_reason: str
    text: str
    turns: int


class Renew(msgspec.Struct, frozen=True):
    """Keep the lease for another ``ttl_ms``."""

    id: TrajectoryId
    epoch: int
    ttl_ms: int


class Release(msgspec.Struct, frozen=True):
    """Give a trajectory back; anyone may claim it, and it doesn't count as an attempt."""

    id: TrajectoryId
    epoch: int


class Restart(msgspec.Struct, frozen=True):
    """Begin again: what it has so far can't be continued. The claim and its epoch stay."""

    id: TrajectoryId
    epoch: int


class Fail(msgspec.Struct, frozen=True):
    """An attempt failed. It is tried again after ``backoff_ms`` while attempts remain; None never tries again."""

    id: TrajectoryId
    epoch: int
    error: str
    backoff_ms: int | None


class Score(msgspec.Struct, frozen=True):
    """A score for a finished trajectory; None if it can't be scored, which fails the sample."""

    id: TrajectoryId
    reward: float | None
    reason: str


Write = Append | Finish | Renew | Release | Restart | Fail | Score

_RECORD_FIELDS = ("spec", "state", "epoch", "attempts", "text", "turns", "stop_reason", "reward", "reason", "error", "owner")
_spec_encoder = msgspec.msgpack.Encoder()
_spec_decoder = msgspec.msgpack.Decoder(TrajectorySpec)


class TrajectoryStore:
    """Client of the trajectory store; safe to share between tasks of one event loop."""

    def __init__(self, redis: "Redis") -> None:
        self._redis = redis

    @classmethod
    async def connect(cls, url: str, *, connections: int = 16) -> Self:
        """Connect.

        Raises:
            JigsawError: no server at the url.
        """
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=connections,
            retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), retries=6),
            retry_on_error=[RedisConnectionError, RedisTimeoutError],
            socket_timeout=10.0,
            socket_connect_timeout=5.0,
        )
        store = cls(Redis(connection_pool=pool))
        try:
            await store.ping()
        except RedisError as error:
            await store.close()
            raise JigsawError(f"the trajectory store at {url} doesn't answer: {error}") from None
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

    async def hold_job(self, job_uid: str, *, owner: str) -> int:
        """Take a job as its trainer; returns the new, strictly growing incarnation."""
        return int(await self._redis.fcall("jigsaw_hold", 1, _hold(job_uid), owner))

    async def holder(self, job_uid: str) -> int:
        """The incarnation that holds the job now."""
        return int(await self._redis.hget(_hold(job_uid), "incarnation") or 0)

    async def create(self, specs: Sequence[TrajectorySpec]) -> int:
        """Create records that aren't there yet; returns how many were new. Repeating it is safe."""
        pipe = self._redis.pipeline(transaction=False)
        for spec in specs:
            record, tokens, index = *_keys(spec.id), _index(spec.id.job_uid)
            fields = ("spec", _spec_encoder.encode(spec), "max_attempts", spec.max_attempts)
            pipe.fcall("jigsaw_create", 3, record, tokens, index, spec.id.member, *fields)
        return sum(await pipe.execute())

    async def claim(self, ids: Sequence[TrajectoryId], *, owner: str, ttl_ms: int) -> list[Claim | NotClaimed]:
        """Take the leases of trajectories, in order of ``ids``."""
        pipe = self._redis.pipeline(transaction=False)
        for id in ids:
            pipe.fcall("jigsaw_claim", 2, *_keys(id), owner, ttl_ms)
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
        """Delete everything of an ended job."""
        await self._forget(await self.members(job_uid), "")
        await self._redis.delete(_hold(job_uid), _index(job_uid))

    async def _forget(self, ids: Sequence[TrajectoryId], incarnation: str) -> None:
        pipe = self._redis.pipeline(transaction=False)
        for start in range(0, len(ids), 1000):
            part = ids[start : start + 1000]
            uid = part[0].job_uid
            keys = [_index(uid), _hold(uid), *(key for id in part for key in _keys(id))]
            pipe.fcall("jigsaw_forget", len(keys), *keys, incarnation, *(id.member for id in part))
        for reply in await pipe.execute(raise_on_error=False):
            if isinstance(answer := _answer(reply), StaleEpochError):
                raise answer


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
        case Restart(epoch=epoch):
            pipe.fcall("jigsaw_restart", 2, record, tokens, epoch)
        case Fail(epoch=epoch, error=error, backoff_ms=backoff_ms):
            pipe.fcall("jigsaw_fail", 1, record, epoch, error, -1 if backoff_ms is None else backoff_ms)
        case Score(reward=reward, reason=reason):
            valid = reward is not None
            pipe.fcall("jigsaw_score", 1, record, repr(reward) if valid else "", reason, "1" if valid else "0")


def _answer(reply: Any) -> "int | str | StaleEpochError":
    match reply:
        case ResponseError() if str(reply).startswith("STALE"):
            return StaleEpochError(str(reply))
        case Exception():
            raise JigsawError(f"the trajectory store refused a write: {reply}") from reply
        case bytes():
            return reply.decode()
        case _:
            return int(reply)


def _claimed(reply: list[Any]) -> Claim | NotClaimed:
    why = reply[0].decode()
    if why != "claimed":
        return NotClaimed(why, int(reply[1]) if why == "later" else 0)
    _, epoch, attempt, spec, tokens = reply
    return Claim(_spec_decoder.decode(spec), int(epoch), int(attempt), from_bytes(tokens))


def _record(values: list[Any], tokens: bytes | None) -> Record | None:
    fields = dict(zip(_RECORD_FIELDS, values, strict=True))
    if fields["spec"] is None:
        return None
    text = {name: (value or b"").decode() for name, value in fields.items() if name != "spec"}
    return Record(
        spec=_spec_decoder.decode(fields["spec"]),
        state=text["state"],  # type: ignore[arg-type]  # only the Lua functions write it
        epoch=int(text["epoch"]),
        attempts=int(text["attempts"]),
        tokens=from_bytes(tokens) if tokens else np.zeros(0, TOKEN),
        text=text["text"],
        turns=int(text["turns"] or 0),
        stop_reason=text["stop_reason"],
        reward=float(text["reward"]) if text["reward"] else None,
        reason=text["reason"],
        error=text["error"],
        owner=text["owner"],
    )
