"""A scripted tool with drawn latencies: several turns with waits, without a real tool. For tests and benchmarks."""

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import msgspec

from libs.common.chat import ChatMessage
from libs.environments.protocol import Conversation, Done, EnvironmentFailed, Observation


class Scripted:
    """Answers each turn with the next line of a script after a drawn wait, then is done.

    Args:
        replies: what it answers, in order; the trajectory is done after the turn that follows the last.
        latency_s: a wait is drawn uniformly between these two, keyed by (trajectory seed, turn).
        fail_share: share of the turns at which it fails instead, drawn likewise and anew at each retry.
    """

    def __init__(self, *, replies: list[str], latency_s: tuple[float, float] = (0.0, 0.0), fail_share: float = 0.0) -> None:
        self._replies = msgspec.convert(replies, list[str])
        self._latency_s = msgspec.convert(latency_s, tuple[float, float], strict=False)
        self._fail_share = fail_share
        self._failures = random.Random(0)

    def opening(self, *, prompt: str, row: Mapping[str, Any]) -> list[ChatMessage]:
        """The question as a user's message."""
        return [ChatMessage("user", prompt)]

    async def respond(self, conversation: Conversation) -> Observation | Done:
        """Wait, then the next line of the script."""
        turn = len(conversation.turns)
        drawn = random.Random(f"{conversation.seed}/{turn}")
        await asyncio.sleep(drawn.uniform(*self._latency_s))
        if self._failures.random() < self._fail_share:
            raise EnvironmentFailed(f"scripted failure at turn {turn}")
        if turn > len(self._replies):
            return Done()
        return Observation([ChatMessage("user", self._replies[turn - 1])])
