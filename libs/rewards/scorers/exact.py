"""``exact``: the completion, or what follows a marker in it, must be the reference text."""

from collections.abc import Mapping
from typing import Any

from libs.rewards.answers import after_marker, shorten
from libs.rewards.score import Score


def score(
    completion_text: str, answer: str, row: Mapping[str, Any], *, marker: str = "", ignore_case: bool = False
) -> Score:
    """1 if the texts are equal once runs of white space count as one blank and the ends are stripped, else 0.

    Args:
        marker: compare only the first non-blank line after its last occurrence; "" compares the whole completion.
        ignore_case: compare without regard to case.
    """
    found = after_marker(completion_text, marker) if marker else completion_text
    if found is None:
        return Score(reward=0.0, reason=f"no {marker!r} in the completion")

    def plain(text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if ignore_case else text

    if plain(found) == plain(answer):
        return Score(reward=1.0, reason="equal")
    return Score(reward=0.0, reason=f"{shorten(found)!r} isn't {shorten(answer)!r}")
