"""Reward functions that the tests bring along as a user would."""

import time
from collections.abc import Mapping
from pathlib import Path
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


def unhurried(completion: str, answer: str, row: Mapping[str, Any]) -> float:
    """As :func:`e_share`, but slow enough to be disturbed."""
    time.sleep(0.02)
    return e_share(completion, answer, row)


def gated(completion: str, answer: str, row: Mapping[str, Any]) -> float:
    """Leaves a file in the row's folder at each call, and waits there for one called "go"; the number of calls before."""
    folder = Path(row["folder"])
    before = len(list(folder.glob("call-*")))
    (folder / f"call-{before}").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    return float(before)
