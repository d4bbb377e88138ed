"""Drawn lengths: the distribution that was asked for, and the same for whoever draws."""

import math

import numpy as np
import pytest

from libs.common.lengths import Lengths, ListedLengths, LogNormalLengths, UniformLengths, drawn_length


def drawn(lengths: Lengths, count: int) -> list[int]:
    return [drawn_length(lengths, seed=seed, turn_start=0) for seed in range(count)]


def test_log_normal_lengths_have_median_and_spread() -> None:
    logs = np.log(drawn(LogNormalLengths(median=100, sigma=0.5), 4000))
    assert logs.mean() == pytest.approx(math.log(100), abs=0.03)
    assert logs.std() == pytest.approx(0.5, abs=0.03)


def test_none_is_above_the_cap_and_those_below_are_the_same() -> None:
    free, capped = (drawn(LogNormalLengths(median=100, sigma=1.0, cap=cap), 500) for cap in (None, 120))
    assert capped == [min(length, 120) for length in free]
    assert 120 in capped


def test_uniform_and_listed_lengths_are_all_drawn() -> None:
    assert set(drawn(UniformLengths(low=2, high=4), 100)) == {2, 3, 4}
    assert set(drawn(ListedLengths((3, 9)), 50)) == {3, 9}


def test_turns_of_a_trajectory_have_their_own_lengths() -> None:
    assert len({drawn_length(LogNormalLengths(), seed=1, turn_start=start) for start in range(0, 400, 40)}) > 3
