"""``gsm8k``: the number after the completion's last ``####`` must equal the one after the reference's."""

from collections.abc import Mapping
from typing import Any

from libs.rewards.answers import after_marker, first_number, last_number, reference_number, shorten
from libs.rewards.score import Score


def score(completion_text: str, answer: str, row: Mapping[str, Any], *, require_marker: bool = True) -> Score:
    """1 if the first number after the last ``####`` equals the reference, else 0.

    The reference is a GSM8K solution with its ``#### N``, or N alone.

    Args:
        require_marker: a completion without ``####`` scores 0; otherwise its last number counts.

    Raises:
        ValueError: the reference isn't a number.
    """
    expected = reference_number(answer)
    marked = after_marker(completion_text, "####")
    if marked is None and require_marker:
        return Score(reward=0.0, reason="no #### in the completion")
    found = last_number(completion_text) if marked is None else first_number(marked)
    if found is None:
        return Score(reward=0.0, reason="no number in the completion" if marked is None else "no number after ####")
    if found.value == expected:
        return Score(reward=1.0, reason=f"{shorten(found.text)} is right")
    return Score(reward=0.0, reason=f"{shorten(found.text)} isn't {expected}")
