"""Group-relative advantages: against a plain loop, and in the cases where a formula alone goes wrong."""

import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.grpo import advantages

Normalise = Literal["std", "none"]

rewards = st.lists(st.one_of(st.none(), st.just(math.nan), st.floats(-100, 100)), min_size=0, max_size=12)


def plain(values: list[float], *, normalise: Normalise) -> list[float]:
    mean = sum(values) / len(values)
    if normalise == "none":
        return [value - mean for value in values]
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return [(value - mean) / math.sqrt(variance) for value in values]


@pytest.mark.parametrize("normalise", ["std", "none"])
def test_agrees_with_a_plain_loop(normalise: Normalise) -> None:
    values = [0.0, 1.0, 0.25, 1.0, -2.0]
    assert advantages(values, normalise=normalise).tolist() == pytest.approx(plain(values, normalise=normalise), abs=1e-12)


@pytest.mark.parametrize("normalise", ["std", "none"])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.0, 1e30, -7.7])
def test_equal_rewards_give_exactly_zero(value: float, normalise: Normalise) -> None:
    assert advantages([value] * 7, normalise=normalise).tolist() == [0.0] * 7


def test_a_bad_reward_poisons_nobody_else() -> None:
    bad = advantages([1.0, None, 0.0, math.nan, 0.5, math.inf], normalise="std")
    good = advantages([1.0, 0.0, 0.5], normalise="std")
    assert bad.tolist() == [good[0], 0.0, good[1], 0.0, good[2], 0.0]


def test_one_valid_sample_has_nothing_to_be_compared_with() -> None:
    assert advantages([1.0, None, None], normalise="none").tolist() == [0.0, 0.0, 0.0]


@given(rewards, st.sampled_from(["std", "none"]))
def test_advantages_are_finite_centred_and_scaled(values: list[float | None], normalise: Normalise) -> None:
    result = advantages(values, normalise=normalise)
    assert len(result) == len(values)
    assert all(math.isfinite(value) for value in result)
    assert abs(result.sum()) < 1e-6 * max(1.0, max((abs(value) for value in result), default=0.0))
    if normalise == "std" and result.any():
        valid = sum(value is not None and not math.isnan(value) for value in values)
        assert (result**2).sum() / (valid - 1) == pytest.approx(1.0, rel=1e-6)
