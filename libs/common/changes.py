"""Waiting for a condition on state that other tasks of the same loop change, without polling."""

from collections.abc import Callable

import anyio


class Changes:
    """Wakes those who wait, whenever something may have changed."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def notify(self) -> None:
        """Something changed: look again."""
        event, self._event = self._event, anyio.Event()
        event.set()

    async def next(self) -> None:
        """Wait for the next change."""
        await self._event.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; at once if it does."""
        while not condition():
            await self._event.wait()
