"""One question, one answer."""

from collections.abc import Mapping
from typing import Any

from libs.common.chat import ChatMessage
from libs.environments.protocol import Conversation, Done


class SingleTurn:
    """Asks the question and is done with the first answer."""

    def opening(self, *, prompt: str, row: Mapping[str, Any]) -> list[ChatMessage]:
        """The question as a user's message."""
        return [ChatMessage("user", prompt)]

    async def respond(self, conversation: Conversation) -> Done:
        """Nothing more to say."""
        return Done()
