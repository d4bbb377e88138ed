"""What stands on the other side of a model's turns.

An environment is a function of the conversation so far: it keeps nothing between calls, so any worker can continue any
trajectory, and a turn whose answer was lost with its worker is asked for again.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from libs.common.chat import ChatMessage
from libs.common.errors import JigsawError


class EnvironmentFailed(JigsawError):
    """The environment broke (not the model): the trajectory's attempt failed and may be retried."""


class Conversation(msgspec.Struct, frozen=True):
    """A trajectory as its environment sees it.

    Attributes:
        prompt, answer, row: from the dataset. turns: texts of the model's turns, oldest first.
        seed: of this trajectory, for environments that draw.
    """

    prompt: str
    answer: str
    row: Mapping[str, Any]
    turns: Sequence[str]
    seed: int


class Observation(msgspec.Struct, frozen=True):
    """The environment answers, and the model has another turn."""

    messages: list[ChatMessage]


class Done(msgspec.Struct, frozen=True):
    """The trajectory is complete."""


class Environment(Protocol):
    """Opens a conversation and answers the model's turns."""

    def opening(self, *, prompt: str, row: Mapping[str, Any]) -> list[ChatMessage]:
        """The messages before the first model turn."""

    async def respond(self, conversation: Conversation) -> Observation | Done:
        """Answer the last turn; may wait as long as it must, without blocking the loop.

        Raises:
            EnvironmentFailed: it broke.
        """
