"""Layout of groups: every token once, within the budget, and exactly what training each sequence alone computes."""

from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from libs.common.errors import JigsawError
from libs.common.tokens import PolicyVersion, from_bytes, observed, sampled
from services.trainer.batches import Completion, Group, MicroBatch, pack, trained_lengths
from services.trainer.grpo import Normaliser
from services.trainer.model import Policy
from tests.unit.trainer_cases import make_groups, plain_logprobs, write_tiny_model

VERSION = PolicyVersion(0)


def group_of(prompt: int, lengths: list[int], *, first_id: int = 10) -> Group:
    completions = [
        Completion(tokens=sampled(range(first_id, first_id + length), [-1.0] * length, VERSION)) for length in lengths
    ]
    return Group(
        prompt_ids=[1] * prompt, completions=completions, advantages_G=[float(index) for index in range(len(lengths))]
    )


def taken(slope_M: torch.Tensor, rows: slice, _: torch.Tensor) -> torch.Tensor:
    return slope_M[rows]


def packed(groups: list[Group], budget: int) -> list[MicroBatch]:
    return pack(groups, budget=budget, normaliser=Normaliser.of(trained_lengths(groups), loss="token"))


def test_a_group_s_prompt_is_laid_out_once() -> None:
    (batch,) = packed([group_of(40, [32] * 4)], 2048)
    assert batch.tokens == 40 + 4 * 31  # a completion's last token predicts nothing
    assert batch.positions_N[40:71].tolist() == batch.positions_N[71:102].tolist() == list(range(40, 71))
    assert batch.rows[0].shape == (4, 71)
    assert batch.padding == 0


def test_only_trained_tokens_are_scored() -> None:
    tokens = np.concatenate([observed([5], VERSION), sampled([6, 7], [-0.5, -0.25], VERSION), observed([8, 9], VERSION)])
    group = Group(prompt_ids=[1, 2], completions=[Completion(tokens=tokens)], advantages_G=[2.0])
    (batch,) = packed([group], 64)
    assert batch.ids_N.tolist() == [1, 2, 5, 6]
    assert batch.target_M.tolist() == [6, 7]
    assert batch.predictor_M.tolist() == [2, 3]
    assert batch.behaviour_M.tolist() == [-0.5, -0.25]
    assert batch.advantage_M.tolist() == [2.0, 2.0]
    assert batch.weight_M.tolist() == [0.5, 0.5]


def test_tokens_of_several_policy_versions_keep_their_own_log_probs() -> None:
    first = sampled([6, 7], [-0.5, -0.25], PolicyVersion(1, 1))
    then = sampled([8, 9], [-2.0, -3.0], PolicyVersion(2, 3))
    stored = from_bytes(np.concatenate([first, then]).tobytes())
    (batch,) = packed([Group(prompt_ids=[1], completions=[Completion(tokens=stored)], advantages_G=[1.0])], 64)
    assert batch.target_M.tolist() == [6, 7, 8, 9]
    assert batch.behaviour_M.tolist() == [-0.5, -0.25, -2.0, -3.0]


def test_a_long_group_is_divided_and_a_long_sequence_stands_alone() -> None:
    batches = packed([group_of(10, [30, 20, 50, 200, 5])], 100)
    assert sorted(batch.tokens for batch in batches) == [10 + 19 + 4, 10 + 49 + 29, 10 + 199]
    (alone,) = [batch for batch in batches if batch.tokens > 100]
    assert alone.trained == 200


def test_nothing_trained_gives_nothing() -> None:
    group = Group(prompt_ids=[1], completions=[Completion(tokens=observed([3, 4], VERSION))], advantages_G=[1.0])
    assert packed([group], 64) == []


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(JigsawError, match="prompt of at least one token"):
        packed([group_of(0, [3])], 64)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(0, 60), min_size=1, max_size=6)), min_size=1, max_size=6),
    st.integers(20, 300),
)
def test_every_trained_token_once_and_within_the_budget(shapes: list[tuple[int, list[int]]], budget: int) -> None:
    groups = [group_of(prompt, lengths, first_id=100 * index) for index, (prompt, lengths) in enumerate(shapes)]
    batches = packed(groups, budget)
    expected = Counter(int(token["id"]) for group in groups for c in group.completions for token in c.tokens)
    assert Counter(int(target) for batch in batches for target in batch.target_M) == expected
    for batch in batches:
        assert batch.tokens <= budget or sum(len(block) for block in batch.rows) == 1
        flat = torch.cat([block.flatten() for block in batch.rows])
        assert torch.equal(flat[batch.source_N], torch.arange(batch.tokens))
        for block in batch.rows:
            assert torch.equal(batch.positions_N[block].diff(dim=1).clamp(0, 1), batch.positions_N[block].diff(dim=1))


def test_padding_stays_under_a_tenth_with_a_long_tail() -> None:
    draw = np.random.default_rng(1)
    groups = [group_of(40, np.minimum(draw.geometric(0.01, 4), 700).tolist()) for _ in range(32)]
    batches = packed(groups, 2048)
    assert sum(batch.padding for batch in batches) < 0.1 * sum(batch.attended for batch in batches)
    assert sum(batch.tokens for batch in batches) > 0.9 * 2048 * (len(batches) - 1)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("budget", [40, 10_000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_gradients_equal_a_loop_over_sequences(
    tmp_path: Path, temperature: float, budget: int, tied: bool
) -> None:
    directory = write_tiny_model(tmp_path / "tiny", tied=tied)
    groups = make_groups()
    coefficient = {token: 0.01 * (token % 7 - 3) for token in range(300)}

    plain = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    expected: list[tuple[int, float]] = []
    for group in groups:
        for completion in group.completions:
            ids = completion.tokens["id"].tolist()
            logs = plain_logprobs(plain, group.prompt_ids, ids, temperature=temperature)
            for token, flag, log in zip(ids, completion.tokens["flags"], logs, strict=True):
                if flag:
                    expected.append((token, log.item()))
            loss = sum(coefficient[t] * log for t, f, log in zip(ids, completion.tokens["flags"], logs, strict=True) if f)
            torch.autograd.backward(torch.as_tensor(loss))

    policy = Policy(directory, dtype=torch.float32, temperature=temperature)
    actual: list[tuple[int, float]] = []
    for batch in packed(groups, budget):
        slope_M = torch.tensor([coefficient[int(token)] for token in batch.target_M])
        scores = policy.train(batch, partial(taken, slope_M))
        assert torch.equal(scores.logprob_M, policy.score(batch).logprob_M)
        actual += zip(batch.target_M.tolist(), scores.logprob_M.tolist(), strict=True)

    assert [log for _, log in sorted(actual)] == pytest.approx([log for _, log in sorted(expected)], abs=1e-5)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(policy.masters[name].grad, parameter.grad, atol=1e-5, rtol=1e-4)


def test_long_rows_use_the_fused_kernel_and_agree_with_the_short_rows_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(write_tiny_model(tmp_path / "tiny"), dtype=torch.float32, temperature=1.0)
    (batch,) = packed(make_groups(count=2), 10_000)
    short = policy.score(batch).logprob_M
    monkeypatch.setattr("services.trainer.attention.LONGEST_WITH_SCORES", 0)
    torch.testing.assert_close(policy.score(batch).logprob_M, short, atol=1e-5, rtol=1e-5)


def test_chunks_of_the_head_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(write_tiny_model(tmp_path / "tiny"), dtype=torch.float32, temperature=1.0)
    (batch,) = packed(make_groups(count=2), 10_000)
    slope_M = torch.linspace(-1, 1, batch.trained)

    def gradients() -> list[torch.Tensor]:
        policy.clear_gradients()
        policy.train(batch, lambda rows, _: slope_M[rows])
        return [master.grad.clone() for master in policy.masters.values() if master.grad is not None]

    whole = gradients()
    monkeypatch.setattr("services.trainer.head.CHUNK_ELEMENTS", 300 * 7)
    monkeypatch.setattr("services.trainer.head.CACHED_ELEMENTS", 300 * 3)
    for one, other in zip(gradients(), whole, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
