"""A renewed watch never takes a value for gone because the end of its snapshot was marked too early."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.errors import KeyNotFoundError
from nats.js.kv import KeyValue

from libs.common import messages as m
from libs.common import tables
from libs.common.tables import Table
from libs.common.tokens import PolicyVersion


def entry(revision: int) -> KeyValue.Entry:
    value = m.PolicyPublished(sender="t", job_uid="a", version=PolicyVersion(revision), url="", digest="")
    return KeyValue.Entry(
        bucket="b", key="a", value=m.encode(value), revision=revision, delta=0, created=None, operation=None
    )


class Watcher:
    def __init__(self, updates: list[KeyValue.Entry | None]) -> None:
        self._updates = updates

    async def updates(self, timeout: float) -> KeyValue.Entry | None:
        await asyncio.sleep(0)
        if not self._updates:
            raise NatsTimeoutError
        return self._updates.pop(0)

    async def stop(self) -> None:
        return


class Standing:
    """A connection that nothing happens to."""

    async def ask(self, attempt: Callable[[], Awaitable[Any]]) -> Any:
        return await attempt()

    while_up = ask


class Bucket:
    """Watches as scripted, one after the other; ``current`` is what is really there."""

    def __init__(self, scripts: list[list[KeyValue.Entry | None]], current: KeyValue.Entry | None) -> None:
        self._scripts, self._current = scripts, current

    async def watch(self, keys: str, inactive_threshold: float) -> Watcher:
        return Watcher(self._scripts.pop(0) if self._scripts else [None])

    async def get(self, key: str) -> KeyValue.Entry:
        if self._current is None:
            raise KeyNotFoundError
        return self._current


@pytest.mark.parametrize(("there", "expected"), [(True, [1, 2]), (False, [1, None])])
async def test_a_snapshot_that_ends_before_it_begins(there: bool, expected: list[int | None]) -> None:
    second: list[KeyValue.Entry | None] = [None, entry(2)] if there else [None]
    connection: Any = Standing()
    bucket: Any = Bucket([[entry(1), None], second], entry(2) if there else None)
    table = Table(connection, bucket, bucket="b", kind=m.PolicyPublished)
    told: list[int | None] = []
    async with asyncio.timeout(tables.REWATCH_S):
        async for change in table.watch():
            told.append(change.value and change.value.version.step)
            if len(told) == len(expected):
                break
    assert told == expected
