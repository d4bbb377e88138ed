"""The loss of trained tokens and its slope, against plain arithmetic on single tokens."""

import math
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libs.common.sections import AlgorithmSection
from services.trainer.grpo import Normaliser, importance_weights, k3, token_loss

logs = st.floats(-4, -0.01)


def plain_token(*, new: float, old: float, engine: float, reference: float, advantage: float, weight: float) -> float:
    """One token with clip 0.2 / 0.3, cap 2 and KL weight 0.1."""
    ratio = math.exp(new - old)
    clipped = min(max(ratio, 0.8), 1.3)
    surrogate = min(ratio * advantage, clipped * advantage)
    kl = math.exp(reference - new) - (reference - new) - 1
    return weight * (-min(math.exp(old - engine), 2.0) * surrogate + 0.1 * kl)


def batched(values: list[dict[str, float]], new_M: torch.Tensor) -> Any:
    columns = {key: torch.tensor([value[key] for value in values], dtype=torch.float64) for key in values[0]}
    return token_loss(
        new_M,
        old_M=columns["old"],
        advantage_M=columns["advantage"],
        importance_M=importance_weights(columns["old"], columns["engine"], cap=2.0),
        weight_M=columns["weight"],
        reference_M=columns["reference"],
        algorithm=AlgorithmSection(clip_low=0.2, clip_high=0.3, kl_coef=0.1),
    )


token = st.fixed_dictionaries(
    {
        "new": logs,
        "old": logs,
        "engine": logs,
        "reference": logs,
        "advantage": st.floats(-3, 3),
        "weight": st.floats(0.01, 1),
    }
)


@given(st.lists(token, min_size=1, max_size=6))
def test_loss_and_slope_agree_with_plain_arithmetic(values: list[dict[str, float]]) -> None:
    new_M = torch.tensor([value["new"] for value in values], dtype=torch.float64, requires_grad=True)
    losses = batched(values, new_M)
    assert losses.loss_M.tolist() == pytest.approx([plain_token(**value) for value in values], rel=1e-9, abs=1e-12)
    (slopes,) = torch.autograd.grad(losses.loss_M.sum(), new_M)
    step = 1e-6
    for value, slope in zip(values, slopes.tolist(), strict=True):
        ratio = math.exp(value["new"] - value["old"])
        if min(abs(ratio - 0.8), abs(ratio - 1.3)) < 1e-4:
            continue  # the loss has a kink there
        above = plain_token(**{**value, "new": value["new"] + step})
        below = plain_token(**{**value, "new": value["new"] - step})
        assert slope == pytest.approx((above - below) / (2 * step), rel=1e-4, abs=1e-6)


def test_only_the_harmful_side_is_clipped() -> None:
    base = {"old": -1.0, "engine": -1.0, "reference": -1.0, "weight": 1.0}
    cases = [(-0.5, 1.0, True), (-0.5, -1.0, False), (-1.5, 1.0, False), (-1.5, -1.0, True), (-1.0, 1.0, False)]
    values = [{**base, "new": new, "advantage": advantage} for new, advantage, _ in cases]
    losses = batched(values, torch.tensor([value["new"] for value in values], dtype=torch.float64))
    assert losses.clipped_M.tolist() == [clipped for *_, clipped in cases]


def test_clip_high_lets_a_ratio_rise_further_than_clip_low_lets_it_fall() -> None:
    def policy(ratio: float, advantage: float) -> float:
        losses = token_loss(
            torch.tensor([math.log(ratio)]),
            old_M=torch.zeros(1),
            advantage_M=torch.tensor([advantage]),
            importance_M=torch.ones(1),
            weight_M=torch.ones(1),
            reference_M=None,
            algorithm=AlgorithmSection(clip_low=0.2, clip_high=0.28),
        )
        return losses.policy_M.item()

    assert policy(1.25, 1.0) == pytest.approx(-1.25)
    assert policy(1.9, 1.0) == pytest.approx(-1.28)
    assert policy(0.5, -1.0) == pytest.approx(0.8)


def test_importance_weights_are_truncated_or_off() -> None:
    old_M, engine_M = torch.tensor([-1.0, -1.0, -3.0]), torch.tensor([-1.0, -3.0, -1.0])
    expected = [1.0, 2.0, math.exp(-2.0)]
    assert importance_weights(old_M, engine_M, cap=2.0).tolist() == pytest.approx(expected)
    assert importance_weights(old_M, engine_M, cap=None).tolist() == [1.0, 1.0, 1.0]


@given(logs, logs)
def test_k3_is_never_negative_and_zero_at_equality(one: float, other: float) -> None:
    assert k3(torch.tensor([one], dtype=torch.float64), torch.tensor([other], dtype=torch.float64)).item() >= 0
    assert k3(torch.tensor([one]), torch.tensor([one])).item() == 0


def test_k3_estimates_the_divergence() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    exact = (p * (p / q).log()).sum()
    assert (p * k3(p.log(), q.log())).sum().item() == pytest.approx(exact.item(), rel=1e-5)


@given(st.lists(st.integers(0, 50), min_size=1).filter(any), st.sampled_from(["token", "sequence"]))
def test_weights_of_an_update_sum_to_one(lengths: list[int], loss: Literal["token", "sequence"]) -> None:
    normaliser = Normaliser.of(lengths, loss=loss)
    assert sum(length * normaliser.weight(length) for length in lengths if length) == pytest.approx(1.0)


def test_sequence_weights_don_t_depend_on_length_token_weights_do() -> None:
    assert [
        4 * Normaliser.of([4, 12], loss="sequence").weight(4),
        12 * Normaliser.of([4, 12], loss="sequence").weight(12),
    ] == [
        0.5,
        0.5,
    ]
    assert Normaliser.of([4, 12], loss="token").weight(4) == Normaliser.of([4, 12], loss="token").weight(12) == 1 / 16
