"""Group commit: whatever many trajectories have to store at once goes out in one pipelined round trip.

While one batch is on its way, the next one collects; so the store is asked as often as it answers and never more, and the
order of a trajectory's writes is the order in which they were queued.

The queue has no limit of its own: who puts waits for the answer, one way or another, before it puts more about the same
trajectory. So it holds a few writes for each trajectory that its owner has, however long the store is away.
"""

import asyncio
from collections.abc import Sequence

import anyio

from libs.common.errors import StaleEpochError
from libs.common.store import TrajectoryStore
from libs.common.trajectory import Write

Answer = int | str | StaleEpochError


class GroupCommit:
    """Queues writes and commits them in order; one :meth:`run` task owns the store side."""

    def __init__(self, store: TrajectoryStore) -> None:
        self._store = store
        self._queue: list[tuple[Write, asyncio.Future[Answer]]] = []
        self._waiting = anyio.Event()

    def put(self, writes: Sequence[Write]) -> list["asyncio.Future[Answer]"]:
        """Queue writes; each future has the store's answer once the write is committed or refused as stale."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Answer]] = [loop.create_future() for _ in writes]
        self._queue.extend(zip(writes, futures, strict=True))
        self._waiting.set()
        return futures

    async def run(self) -> None:
        """Commit until cancelled."""
        while True:
            await self._waiting.wait()
            self._waiting = anyio.Event()
            batch, self._queue = self._queue, []
            answers = await self._store.write([write for write, _ in batch])
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.cancelled():
                    future.set_result(answer)
