"""A reward function of one's own: right answers, the shorter the better."""

from collections.abc import Mapping
from typing import Any

from libs.rewards.answers import last_number, reference_number
from libs.rewards.score import Score


def score(
    completion_text: str, answer: str, row: Mapping[str, Any], *, free_words: int = 0, cost_per_word: float = 0.01
) -> Score:
    """1 for a right last number, less ``cost_per_word`` for each word after the first ``free_words``, but at least 0."""
    found = last_number(completion_text)
    if found is None or found.value != reference_number(answer):
        return Score(0.0, "wrong")
    words = len(completion_text.split())
    return Score(max(0.0, 1.0 - cost_per_word * max(0, words - free_words)), f"right, in {words} words")
