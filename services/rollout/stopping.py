"""Stop strings over a whole turn, found while its tokens arrive, at a constant cost per token.

Invariants: whether a token completes a stop string depends on the turn's tokens alone, so a turn that was resumed stops at
the same token as one that was not; nothing before the turn's first token counts.
"""

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from libs.common.errors import ModelError


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a model directory.

    Raises:
        ModelError: there is no ``tokenizer.json``.
    """
    file = Path(model) / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{model}: no tokenizer.json, which stop strings need")
    return Tokenizer.from_file(str(file))


class StopWatch:
    """Watches one turn for stop strings.

    Decodes only the last tokens that a stop string can span. Each token with text adds at least one byte, so that is as
    many tokens as the longest stop string has bytes; one more keeps a decoder from trimming the space that the first of
    them begins with.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], turn_ids: Sequence[int] = ()) -> None:
        """Start with the turn's earlier tokens, none of which completed a stop string."""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tail: deque[int] = deque(maxlen=max(len(text.encode()) for text in stop) + 1)
        self._tail.extend(token_id for token_id in turn_ids if tokenizer.id_to_token(token_id) is not None)

    def completes(self, token_id: int) -> bool:
        """Take the turn's next token; whether it completes a stop string."""
        if self._tokenizer.id_to_token(token_id) is None:  # a padded row of the embedding: no text, so no room in the tail
            return False
        self._tail.append(token_id)
        text = self._tokenizer.decode(list(self._tail), skip_special_tokens=False)
        return any(stop in text for stop in self._stop)
