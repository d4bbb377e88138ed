"""Typed views of KV buckets: current values that a late joiner must see, and what becomes of them."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

import msgspec
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js import JetStreamContext
from nats.js.errors import KeyDeletedError, KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KV_DEL, KV_PURGE, KeyValue
from structlog.typing import FilteringBoundLogger

from libs.common import messages as m
from libs.common.errors import MessageError

REWATCH_S = 15.0
"""A watch is renewed this often, because one that fell silent can't be told from one with nothing to say."""

M = TypeVar("M", bound=m.Message)


class Change(msgspec.Struct, Generic[M], frozen=True):
    """A value in a KV table that changed; None when it was deleted."""

    key: str
    value: M | None
    revision: int


class Table(Generic[M]):
    """Typed view of a KV bucket: current values that a late joiner must see."""

    def __init__(self, js: JetStreamContext, kv: KeyValue, *, bucket: str, kind: type[M], log: FilteringBoundLogger) -> None:
        self._js, self._kv, self._bucket, self._kind, self._log = js, kv, bucket, kind, log

    async def get(self, key: str) -> M | None:
        """The current value, or None."""
        entry = await self.entry(key)
        return entry.value if entry else None

    async def entry(self, key: str) -> Change[M] | None:
        """The current value with its revision, or None."""
        try:
            entry = await self._kv.get(key)
        except (KeyNotFoundError, KeyDeletedError):
            return None
        return Change(key, self._decode(entry.value or b""), entry.revision or 0)

    async def put(self, key: str, value: M) -> int:
        """Set a value; returns its revision."""
        return await self._kv.put(key, m.encode(value))

    async def swap(self, key: str, value: M, *, expected_revision: int) -> bool:
        """Set a value only if the key is still at a revision (0: doesn't exist, or was deleted); whether it was set."""
        try:
            if expected_revision:
                await self._kv.update(key, m.encode(value), last=expected_revision)
            else:  # a deleted key has left a marker, which an update from 0 would trip over
                await self._kv.create(key, m.encode(value))
        except KeyWrongLastSequenceError:
            return False
        return True

    async def delete(self, key: str) -> None:
        """Remove a value; one that isn't there is fine."""
        await self._kv.purge(key)

    async def all(self) -> dict[str, M]:
        """All current values.

        The keys come from the stream's own list of subjects: nats-py's ``keys()`` may take the snapshot for complete before
        the values that are on their way have arrived.
        """
        prefix = f"$KV.{self._bucket}."
        info = await self._js.stream_info(f"KV_{self._bucket}", subjects_filter=f"{prefix}>")
        keys = [subject.removeprefix(prefix) for subject in info.state.subjects or {}]
        values = await asyncio.gather(*(self.get(key) for key in keys))
        return {key: value for key, value in zip(keys, values, strict=True) if value is not None}

    async def watch(self, keys: str = ">") -> AsyncIterator[Change[M]]:
        """Current values, then every change; renewed by itself, so that a silent watch heals within ``REWATCH_S``."""
        seen: dict[str, int] = {}
        while True:
            async for change in self._watch_once(keys, seen):
                yield change

    async def _watch_once(self, keys: str, seen: dict[str, int]) -> AsyncIterator[Change[M]]:
        """One watch of limited life: the snapshot's news against ``seen``, then what changes."""
        try:
            watcher = await self._kv.watch(keys, inactive_threshold=2 * REWATCH_S)
        except NatsError as error:
            self._log.warning("watch_failed", bucket=self._kind.__name__, error=str(error))
            await asyncio.sleep(1.0)
            return
        snapshot: set[str] | None = set()
        ends = time.monotonic() + REWATCH_S
        try:
            while (left := ends - time.monotonic()) > 0:
                try:
                    entry = await watcher.updates(timeout=left)  # type: ignore[no-untyped-call]
                except NatsTimeoutError:
                    return
                if not isinstance(entry, KeyValue.Entry):
                    for key in set(seen) - (snapshot or set()):
                        # nats-py may mark the snapshot's end before it has handed over what is in it, so ask about each
                        try:
                            if await self.entry(key) is not None:
                                continue
                        except NatsError as error:
                            self._log.warning("watch_failed", bucket=self._kind.__name__, error=str(error))
                            return
                        del seen[key]
                        yield Change(key, None, 0)
                    snapshot = None
                    continue
                gone = entry.operation in (KV_DEL, KV_PURGE)
                if snapshot is not None and not gone:
                    snapshot.add(entry.key)
                if gone:
                    if seen.pop(entry.key, None) is not None:
                        yield Change(entry.key, None, entry.revision or 0)
                elif seen.get(entry.key) != entry.revision:
                    seen[entry.key] = entry.revision or 0
                    yield Change(entry.key, self._decode(entry.value or b""), entry.revision or 0)
        finally:
            await watcher.stop()  # type: ignore[no-untyped-call]

    def _decode(self, data: bytes) -> M:
        value = m.decode(data)
        if not isinstance(value, self._kind):
            raise MessageError(f"{self._kind.__name__} expected in its bucket, found {type(value).__name__}")
        return value
