"""``last_number``: the last number of the completion must equal the reference."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from libs.rewards.answers import last_number, reference_number, shorten
from libs.rewards.score import Score


def score(
    completion_text: str, answer: str, row: Mapping[str, Any], *, tolerance: Annotated[float, Meta(ge=0)] = 0.0
) -> Score:
    """1 if the last number is within ``tolerance`` (absolute) of the reference's, else 0.

    Raises:
        ValueError: the reference isn't a number.
    """
    expected = reference_number(answer)
    found = last_number(completion_text)
    if found is None:
        return Score(reward=0.0, reason="no number in the completion")
    if abs(found.value - expected) <= tolerance:
        return Score(reward=1.0, reason=f"{shorten(found.text)} is right")
    return Score(reward=0.0, reason=f"{shorten(found.text)} isn't {expected}")
