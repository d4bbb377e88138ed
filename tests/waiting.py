"""Waiting in tests: for something to become so, and beside tasks that go on and on."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio


async def until(true: Callable[[], Any], within_s: float = 20.0) -> None:
    """Wait for something to become so; ``true`` may be a coroutine function."""
    with anyio.fail_after(within_s):
        while not (await found if asyncio.iscoroutine(found := true()) else found):
            await anyio.sleep(0.02)


@asynccontextmanager
async def at_work(*tasks: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Endless tasks; one that fails fails the test."""
    async with anyio.create_task_group() as group:
        for task in tasks:
            group.start_soon(task)
        yield
        group.cancel_scope.cancel()
