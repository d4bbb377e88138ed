"""Where a trajectory stands in its turns, read from its tokens alone.

The tokens are the only state of a trajectory, so a worker that takes one over must see from them what comes next: go on
with a turn, ask the environment, or finish.
"""

from collections.abc import Sequence
from enum import Enum

import msgspec
import numpy as np

from libs.common.tokens import TRAINED, TokenArray


class Next(Enum):
    """What a trajectory needs next."""

    GENERATE = "generate"
    RESPOND = "respond"
    TRUNCATED = "truncated"


class Standing(msgspec.Struct, frozen=True):
    """Where a trajectory stands.

    Attributes:
        next: what it needs. turn_start: index of the first token of the current or next model turn.
        spans: (start, end) of the model turns so far, the unfinished one included. sampled: tokens that the model made.
    """

    next: Next
    turn_start: int
    spans: list[tuple[int, int]]
    sampled: int


def standing(tokens: TokenArray, *, turn_ended: bool, max_new_tokens: int) -> Standing:
    """Read where a trajectory stands.

    Args:
        tokens: all after the prompt.
        turn_ended: whether the last token, if the model's, completed its turn (see :func:`ends_turn`).
        max_new_tokens: budget of sampled tokens.
    """
    trained = (tokens["flags"] & TRAINED) != 0
    edges = np.flatnonzero(np.diff(np.concatenate([[False], trained, [False]]).astype(np.int8)))
    spans = [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
    sampled = int(trained.sum())
    in_turn = bool(len(trained)) and bool(trained[-1])
    turn_start = spans[-1][0] if in_turn else len(tokens)
    if in_turn and turn_ended:
        return Standing(Next.RESPOND, turn_start, spans, sampled)
    if sampled >= max_new_tokens:
        return Standing(Next.TRUNCATED, turn_start, spans, sampled)
    return Standing(Next.GENERATE, turn_start, spans, sampled)


def ends_turn(last_id: int, turn_text: str, *, stop_token_ids: Sequence[int], stop: Sequence[str]) -> bool:
    """Whether a model turn that ends in ``last_id`` and reads ``turn_text`` is complete."""
    return last_id in stop_token_ids or any(string in turn_text for string in stop)
