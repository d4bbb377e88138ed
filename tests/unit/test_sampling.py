"""The sampling step: its frequencies, its log-probs, and noise that (seed, position) alone determine."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libs.common.errors import ModelError
from services.rollout.sampling import Draw, exponential_noise, sample

LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0, -2.0, -3.0]


def frequencies(logits_V: list[float], *, temperature: float, positions: range, seeds: range) -> np.ndarray:
    draws = [Draw(seed=seed, position=position, temperature=temperature) for seed in seeds for position in positions]
    ids_B, _ = sample(torch.tensor(logits_V).repeat(len(draws), 1), draws)
    return np.bincount(ids_B.numpy(), minlength=len(logits_V))


@pytest.mark.parametrize(
    ("temperature", "positions", "seeds"),
    [
        (1.0, range(20_000), range(1)),
        (1.0, range(1), range(20_000)),
        (0.5, range(200), range(100)),
        (2.0, range(20_000), range(1)),
    ],
)
def test_frequencies_follow_the_tempered_softmax(temperature: float, positions: range, seeds: range) -> None:
    counts = frequencies(LOGITS, temperature=temperature, positions=positions, seeds=seeds)
    expected = counts.sum() * torch.softmax(torch.tensor(LOGITS, dtype=torch.float64) / temperature, 0).numpy()
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 22.46  # the 0.999 quantile at 6 degrees of freedom


def test_unlikely_tokens_of_a_large_vocabulary_come_up_as_often_as_they_should() -> None:
    vocab, draws = 49_152, 3_000
    logits_V = torch.full((vocab,), math.log(1e-2 / (vocab - 1)))
    logits_V[7] = math.log(1 - 1e-2)
    others = 0
    for start in range(0, draws, 100):
        rows = [Draw(seed=5, position=start + i, temperature=1.0) for i in range(100)]
        ids_B, _ = sample(logits_V.expand(100, -1), rows)
        others += int((ids_B != 7).sum())
    assert abs(others - draws * 1e-2) < 4 * math.sqrt(draws * 1e-2)


def test_noise_is_exponential_and_never_zero() -> None:
    noise_V = np.empty(3_000_001, np.float32)
    exponential_noise(noise_V, seed=1, position=2)
    assert noise_V.min() > 0
    assert noise_V.mean() == pytest.approx(1.0, abs=0.003)
    assert np.mean(noise_V < 1e-3) == pytest.approx(1e-3, rel=0.1)
    assert np.mean(noise_V > 3.0) == pytest.approx(math.exp(-3), rel=0.02)


def test_noise_of_neighbouring_positions_and_seeds_is_independent() -> None:
    rows = []
    for seed, position in [(1, 0), (1, 1), (2, 0), (2, 1), (1 << 63, 0), (-1, 0)]:
        noise_V = np.empty(50_000, np.float32)
        exponential_noise(noise_V, seed=seed, position=position)
        rows.append(noise_V)
    correlation = np.corrcoef(np.stack(rows)) - np.eye(len(rows))
    assert np.abs(correlation).max() < 0.02


@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    position=st.integers(0, 2**31),
    others=st.lists(st.tuples(st.integers(0, 100), st.sampled_from([0.0, 0.7, 1.0])), max_size=5),
    row=st.integers(0, 5),
)
def test_a_row_does_not_depend_on_the_rest_of_the_batch(
    seed: int, position: int, others: list[tuple[int, float]], row: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    logits_BV = torch.randn(len(others) + 1, 33, generator=generator)
    row = min(row, len(others))
    draws = [Draw(seed=other, position=other, temperature=temperature) for other, temperature in others]
    draws.insert(row, Draw(seed=seed, position=position, temperature=0.9))
    ids_B, logprobs_B = sample(logits_BV, draws)
    alone, logprob = sample(logits_BV[row : row + 1], [draws[row]])
    assert int(ids_B[row]) == int(alone[0])
    assert float(logprobs_B[row]) == pytest.approx(float(logprob[0]), abs=1e-6)


def test_logprobs_are_of_the_distribution_sampled_from() -> None:
    logits_BV = torch.randn(64, 100, generator=torch.Generator().manual_seed(0)) * 4
    temperatures = [(0.0, 0.6, 1.0, 1.7)[i % 4] for i in range(64)]
    ids_B, logprobs_B = sample(logits_BV, [Draw(seed=i, position=i, temperature=t) for i, t in enumerate(temperatures)])
    scale_B1 = torch.tensor([t or 1.0 for t in temperatures], dtype=torch.float64).unsqueeze(1)
    expected_BV = torch.log_softmax(logits_BV.double() / scale_B1, dim=-1)
    torch.testing.assert_close(logprobs_B.double(), expected_BV.gather(1, ids_B.unsqueeze(1)).squeeze(1), atol=1e-5, rtol=0)


def test_greedy_takes_the_most_likely_token_whatever_the_seed() -> None:
    logits_BV = torch.randn(16, 100, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids_B, _ = sample(logits_BV, [Draw(seed=i, position=i, temperature=0.0) for i in range(16)])
    assert torch.equal(logits_BV.gather(1, ids_B.unsqueeze(1)).squeeze(1), logits_BV.amax(1))


def test_the_logits_are_left_as_they_were() -> None:
    logits_BV = torch.randn(2, 10)
    before = logits_BV.clone()
    sample(logits_BV, [Draw(seed=0, position=0, temperature=0.5), Draw(seed=0, position=0, temperature=0.0)])
    assert torch.equal(logits_BV, before)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_broken_weights_are_an_error_not_a_token(broken: float) -> None:
    with pytest.raises(ModelError, match="not finite"):
        sample(torch.tensor([[0.0, broken, 1.0]]), [Draw(seed=0, position=0, temperature=1.0)])
