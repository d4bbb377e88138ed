"""Lengths of model turns that are drawn instead of decided by a model: for replays and benchmarks.

Invariant: a turn's length depends on (seed of the trajectory, where the turn began) alone, so whoever takes a trajectory
over draws the same.
"""

import math
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]

_WORD = (1 << 64) - 1


class LogNormalLengths(msgspec.Struct, frozen=True, tag="lognormal", tag_field="kind"):
    """Lengths with a long tail: ``median`` tokens, ``sigma`` the deviation of their logarithm; ``cap``: the most."""

    median: Annotated[float, Meta(gt=0)] = 64.0
    sigma: Annotated[float, Meta(ge=0)] = 0.8
    cap: Count | None = None


class UniformLengths(msgspec.Struct, frozen=True, tag="uniform", tag_field="kind"):
    """Lengths from ``low`` to ``high`` tokens, both included."""

    low: Count = 16
    high: Count = 128

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("low must not be above high")


class ListedLengths(msgspec.Struct, frozen=True, tag="list", tag_field="kind"):
    """Lengths drawn from recorded ones."""

    tokens: Annotated[tuple[Count, ...], Meta(min_length=1)]


Lengths = LogNormalLengths | UniformLengths | ListedLengths


def drawn_length(lengths: Lengths, *, seed: int, turn_start: int) -> int:
    """Tokens of a turn that begins at index ``turn_start`` of a trajectory's tokens, before a budget cuts it; at least 1."""
    draw = noise(seed, stream=1, counter=turn_start)
    match lengths:
        case LogNormalLengths(median=median, sigma=sigma, cap=cap):
            length = max(1, round(median * math.exp(sigma * draw.standard_normal())))
            return length if cap is None else min(length, cap)
        case UniformLengths(low=low, high=high):
            return int(draw.integers(low, high, endpoint=True))
        case ListedLengths(tokens=tokens):
            return tokens[int(draw.integers(len(tokens)))]


def noise(seed: int, *, stream: Literal[0, 1], counter: int) -> np.random.Generator:
    """A generator that the arguments alone determine."""
    return np.random.Generator(np.random.Philox(key=(seed & _WORD) | (stream << 64), counter=counter << 192))
