"""The trajectory store: the truth about every trajectory, in Redis or Valkey.

The rules (who may write, in which state, after which token) live in ``trajectories.lua`` inside the server; this module
speaks them. Everything is safe to repeat, and is repeated while the server is away: :mod:`libs.common.store_connection`.
Everything is batched: one call is one pipelined round trip however many trajectories it carries. Keys and fields are
documented in :mod:`libs.common.store_schema`.
"""

from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Literal, Self
from uuid import uuid4

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from libs.common.errors import JigsawError, StaleEpochError, Unreachable
from libs.common.patience import PATIENCE_S
from libs.common.store_connection import open_store
from libs.common.store_schema import (
    RECORD_FIELDS,
    answer_of,
    claim_of,
    encoded_spec,
    hold_key,
    index_key,
    queue_write,
    record_keys,
    record_of,
)
from libs.common.trajectory import Claim, NotClaimed, Offer, Record, State, TrajectoryId, TrajectorySpec, Write


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
        pipe.fcall("jigsaw_hold", 1, hold_key(job_uid), owner, above, int(still))
        (incarnation,) = _counts(await pipe.execute(raise_on_error=False))
        return incarnation

    async def holder(self, job_uid: str) -> int:
        """The incarnation that holds the job now."""
        return int(await self._redis.hget(hold_key(job_uid), "incarnation") or 0)

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
            keys = (*record_keys(spec.id), index_key(uid), hold_key(uid))
            bounds = ("max_failures", spec.max_attempts, "prompt_tokens", len(spec.prompt_ids))
            fields = ("spec", encoded_spec(spec), *bounds)
            pipe.fcall("jigsaw_create", len(keys), *keys, holder, spec.id.member, *fields)
        return sum(_counts(await pipe.execute(raise_on_error=False)))

    async def claim(self, ids: Sequence[TrajectoryId], *, owner: str, ttl_ms: int) -> list[Claim | NotClaimed]:
        """Take the leases of trajectories, in order of ``ids``. A claim whose answer was lost is given again."""
        pipe, call = self._redis.pipeline(transaction=False), uuid4().hex
        for index, id in enumerate(ids):
            pipe.fcall("jigsaw_claim", 2, *record_keys(id), owner, ttl_ms, f"{call}.{index}")
        return [claim_of(reply) for reply in await pipe.execute()]

    async def adopt(self, offers: Sequence[Offer], *, owner: str, ttl_ms: int) -> list[Claim | NotClaimed]:
        """Take over trajectories that were transferred to ``owner``, in order of ``offers``. Repeating it is safe."""
        pipe = self._redis.pipeline(transaction=False)
        for offer in offers:
            pipe.fcall("jigsaw_adopt", 2, *record_keys(offer.id), offer.epoch, owner, ttl_ms)
        return [claim_of(reply) for reply in await pipe.execute()]

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
            queue_write(pipe, write)
        return [answer_of(reply) for reply in await pipe.execute(raise_on_error=False)]

    async def states(self, ids: Sequence[TrajectoryId]) -> list[State | Literal["expired", "gone"]]:
        """The states of records; ``expired`` for a running one whose lease has run out, ``gone`` for none at all."""
        pipe = self._redis.pipeline(transaction=False)
        for id in ids:
            pipe.fcall("jigsaw_state", 1, record_keys(id)[0])
        return [reply.decode() for reply in await pipe.execute()]

    async def read(self, ids: Sequence[TrajectoryId]) -> list[Record | None]:
        """Whole records, None for ones that don't exist."""
        pipe = self._redis.pipeline(transaction=False)
        for id in ids:
            record, tokens = record_keys(id)
            pipe.hmget(record, RECORD_FIELDS)
            pipe.get(tokens)
        replies = await pipe.execute()
        return [record_of(*pair) for pair in zip(replies[::2], replies[1::2], strict=True)]

    async def members(self, job_uid: str) -> list[TrajectoryId]:
        """All trajectories of a job that the store holds, in order."""
        names: set[bytes] = await self._redis.smembers(index_key(job_uid))  # type: ignore[assignment]  # never decodes here
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
        await self._redis.delete(hold_key(job_uid))
        await self._forget(await self.members(job_uid), "")
        await self._redis.delete(index_key(job_uid))

    async def _forget(self, ids: Sequence[TrajectoryId], incarnation: str) -> None:
        pipe = self._redis.pipeline(transaction=False)
        for start in range(0, len(ids), 1000):
            part = ids[start : start + 1000]
            uid = part[0].job_uid
            keys = [index_key(uid), hold_key(uid), *(key for id in part for key in record_keys(id))]
            pipe.fcall("jigsaw_forget", len(keys), *keys, incarnation, *(id.member for id in part))
        _counts(await pipe.execute(raise_on_error=False))


def _functions() -> str:
    return files("libs.common").joinpath("trajectories.lua").read_text(encoding="utf-8")


def _counts(replies: Sequence[Any]) -> list[int]:
    """What was answered to a job's trainer.

    Raises:
        StaleEpochError: it doesn't hold the job.
    """
    counts = []
    for reply in replies:
        if isinstance(answer := answer_of(reply), StaleEpochError):
            raise answer
        counts.append(int(answer))
    return counts
