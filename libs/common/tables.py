"""Typed views of KV buckets: current values that a late joiner must see, and what becomes of them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Generic, TypeVar

import msgspec
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.errors import KeyDeletedError, KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KV_DEL, KV_PURGE, KeyValue

from libs.common import messages as m
from libs.common.connection import Connection, CutOff
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
    """Typed view of a KV bucket; every call outlives an absence of the server, see :meth:`Connection.ask`."""

    def __init__(self, connection: Connection, kv: KeyValue, *, bucket: str, kind: type[M]) -> None:
        self._connection, self._kv, self._bucket, self._kind = connection, kv, bucket, kind

    async def get(self, key: str) -> M | None:
        """The current value, or None."""
        entry = await self.entry(key)
        return entry.value if entry else None

    async def entry(self, key: str) -> Change[M] | None:
        """The current value with its revision, or None."""
        entry = await self._connection.ask(lambda: self._stored(key))
        return Change(key, self._decode(entry.value or b""), entry.revision or 0) if entry else None

    async def put(self, key: str, value: M) -> int:
        """Set a value; returns its revision."""
        return await self._connection.ask(lambda: self._kv.put(key, m.encode(value)))

    async def swap(self, key: str, value: M, *, expected_revision: int) -> int:
        """Set a value only if the key is still at a revision (0: doesn't exist, or was deleted).

        Returns:
            Its new revision, or 0 if it wasn't set. A value that an attempt had set whose answer was lost counts as set if
            it is there still; so two who swap the same key must write different values.
        """
        data, tried = m.encode(value), False

        async def attempt() -> int:
            nonlocal tried
            again, tried = tried, True
            try:
                if expected_revision:
                    return await self._kv.update(key, data, last=expected_revision)
                return await self._kv.create(key, data)  # a deleted key has left a marker that an update would trip over
            except KeyWrongLastSequenceError:
                stored = await self._stored(key) if again else None
                return stored.revision or 0 if stored is not None and stored.value == data else 0

        return await self._connection.ask(attempt)

    async def delete(self, key: str) -> None:
        """Remove a value; one that isn't there is fine."""
        await self._connection.ask(lambda: self._kv.purge(key))

    async def _stored(self, key: str) -> KeyValue.Entry | None:
        try:
            return await self._kv.get(key)
        except (KeyNotFoundError, KeyDeletedError):
            return None

    async def all(self) -> dict[str, M]:
        """All current values.

        The keys come from the stream's own list of subjects: nats-py's ``keys()`` may take the snapshot for complete before
        the values that are on their way have arrived.
        """
        prefix = f"$KV.{self._bucket}."
        stream, wanted = f"KV_{self._bucket}", f"{prefix}>"
        info = await self._connection.ask(lambda: self._connection.js.stream_info(stream, subjects_filter=wanted))
        keys = [subject.removeprefix(prefix) for subject in info.state.subjects or {}]
        values = await asyncio.gather(*(self.get(key) for key in keys))
        return {key: value for key, value in zip(keys, values, strict=True) if value is not None}

    async def watch(self, keys: str = ">") -> AsyncIterator[Change[M]]:
        """Current values, then every change.

        The watch is renewed by itself: when the server is back from an absence, and every ``REWATCH_S``, so that a silent
        one heals.
        """
        seen: dict[str, int] = {}
        while True:
            async for change in self._watch_once(keys, seen):
                yield change

    async def _watch_once(self, keys: str, seen: dict[str, int]) -> AsyncIterator[Change[M]]:
        """One watch of limited life: the snapshot's news against ``seen``, then what changes."""
        watcher = await self._connection.ask(lambda: self._kv.watch(keys, inactive_threshold=2 * REWATCH_S))
        snapshot: set[str] | None = set()
        ends = time.monotonic() + REWATCH_S
        try:
            while True:
                try:
                    entry = await self._connection.while_up(partial(_next, watcher, ends))
                except (NatsTimeoutError, CutOff):
                    return
                if entry is None:
                    for key in set(seen) - (snapshot or set()):
                        # nats-py may mark the snapshot's end before it has handed over what is in it, so ask about each
                        if await self.entry(key) is None:
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
            with contextlib.suppress(NatsError):  # of a connection that is closed
                await watcher.stop()  # type: ignore[no-untyped-call]

    def _decode(self, data: bytes) -> M:
        value = m.decode(data)
        if not isinstance(value, self._kind):
            raise MessageError(f"{self._kind.__name__} expected in its bucket, found {type(value).__name__}")
        return value


async def _next(watcher: KeyValue.KeyWatcher, ends: float) -> KeyValue.Entry | None:
    """What a watch says next, None for the end of its snapshot; a time-out if it ends before it says anything."""
    entry = await watcher.updates(timeout=max(0.0, ends - time.monotonic()))  # type: ignore[no-untyped-call]
    return entry if isinstance(entry, KeyValue.Entry) else None
