"""Reward functions that the tests bring along as a user would."""

from collections.abc import Mapping
from typing import Any


def e_share(completion: str, answer: str, row: Mapping[str, Any]) -> float:
    """Share of the letters that are an e: a random-weight model can learn it in a few steps."""
    letters = [letter for letter in completion.lower() if letter.isalpha()]
    return sum(letter == "e" for letter in letters) / len(letters) if letters else 0.0


def constant(completion: str, answer: str, row: Mapping[str, Any]) -> float:
    """The same for everyone."""
    return 0.5


def broken(completion: str, answer: str, row: Mapping[str, Any]) -> float:
    """A scorer with a bug."""
    raise RuntimeError("this scorer is broken")


def endless(completion: str, answer: str, row: Mapping[str, Any]) -> float:
    """A scorer that never returns."""
    while True:
        pass
