"""A step of learning: equal to a plain loop, resumable bit for bit, and safe against gradients that aren't finite."""

import math
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from libs.common.errors import JigsawError, ModelError
from libs.common.job import Job
from libs.common.sections import TrainSection
from libs.common.tokens import PolicyVersion, observed
from services.trainer import checkpoint
from services.trainer.batches import Completion, Group
from services.trainer.learner import Learner
from services.trainer.schedule import learning_rate
from services.trainer.wire import MicroBatchDone
from tests.unit.trainer_cases import (
    make_groups,
    plain_fixed,
    plain_logprobs,
    plain_loss,
    read_config,
    tiny_job,
    write_tiny_model,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: master.detach().clone() for name, master in learner.policy.masters.items()}


def train_plainly(directory: Path, job: Job, steps: list[list[Group]]) -> LlamaForCausalLM:
    """The same learning as a loop over sequences and tokens."""
    temperature = job.rollout.temperature
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    initial = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    train = job.train
    optimiser = torch.optim.AdamW(model.parameters(), lr=train.learning_rate, eps=train.eps, weight_decay=train.weight_decay)
    for groups in steps:
        old = plain_fixed(model, groups, temperature=temperature)
        reference = plain_fixed(initial, groups, temperature=temperature)
        for _ in range(job.algorithm.epochs):
            for start in range(job.algorithm.minibatches):
                part = groups[start :: job.algorithm.minibatches]
                optimiser.zero_grad()
                torch.autograd.backward(plain_loss(model, part, job, old=old, reference=reference, temperature=temperature))
                torch.nn.utils.clip_grad_norm_(model.parameters(), job.train.max_grad_norm)
                optimiser.step()
    return model


@pytest.mark.parametrize(
    ("algorithm", "train", "temperature"),
    [
        ({}, {}, 1.0),
        ({"loss": "sequence", "importance_cap": None}, {"max_grad_norm": 0.05}, 0.7),
        ({"kl_coef": 0.3, "clip_high": 0.28}, {"weight_decay": 0.1}, 1.0),
        ({"epochs": 2, "minibatches": 2, "kl_coef": 0.1, "clip_low": 0.01, "clip_high": 0.02}, {}, 1.3),
    ],
    ids=["default", "sequence-clipped-norm", "kl", "epochs-and-minibatches"],
)
def test_updates_equal_a_plain_loop(
    model: Path, algorithm: dict[str, object], train: dict[str, object], temperature: float
) -> None:
    job = tiny_job(algorithm=algorithm, train=train, temperature=temperature)
    steps = [make_groups(seed=1), make_groups(seed=2)]
    learner = Learner(model, job, seed=0)
    for step, groups in enumerate(steps):
        learner.train(step, groups)
    plain = train_plainly(model, job, steps)
    start = load_file(model / "model.safetensors")
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(learner.policy.masters[name].detach(), parameter.detach(), atol=1e-5, rtol=1e-5)
        assert not torch.equal(parameter.detach(), start[name])


def test_metrics_equal_a_plain_loop(model: Path) -> None:
    job = tiny_job(algorithm={"kl_coef": 0.2})
    groups = make_groups(seed=3)
    plain = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    old = plain_fixed(plain, groups)
    loss = plain_loss(plain, groups, job, old=old, reference=old)
    torch.autograd.backward(loss)
    pairs = [
        (old[id(group), c, index], float(token["logprob"]))
        for group in groups
        for c, completion in enumerate(group.completions)
        for index, token in enumerate(completion.tokens)
        if token["flags"] == 1
    ]
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in plain.parameters() if p.grad is not None))
    metrics = Learner(model, job, seed=0).train(0, groups)
    assert metrics["loss/policy"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["tokens_trained"] == len(pairs)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    mean = sum(math.exp(trainer - engine) - 1 - (trainer - engine) for trainer, engine in pairs) / len(pairs)
    assert metrics["mismatch/kl"] == pytest.approx(mean, rel=1e-4)
    assert metrics["mismatch/max"] == pytest.approx(max(abs(trainer - engine) for trainer, engine in pairs), rel=1e-4)
    weights = [min(math.exp(trainer - engine), 2.0) for trainer, engine in pairs]
    assert metrics["importance_weight"] == pytest.approx(sum(weights) / len(weights), rel=1e-4)
    assert 0 < metrics["entropy"] < math.log(300)
    assert metrics["learning_rate"] == job.train.learning_rate


def test_micro_batches_don_t_change_the_update(model: Path) -> None:
    groups = make_groups(seed=4)
    small, large = (Learner(model, tiny_job(train={"micro_batch_tokens": budget}), seed=0) for budget in (30, 10_000))
    seen: list[MicroBatchDone] = []
    small.train(0, groups, on_micro_batch=seen.append)
    large.train(0, groups)
    assert len(seen) > 3
    assert [progress.done for progress in seen] == list(range(1, seen[-1].total + 1))
    for one, other in zip(weights_of(small).values(), weights_of(large).values(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_groups_without_signal_move_nothing_but_count_in_the_average(model: Path) -> None:
    live, idle = make_groups(seed=5, count=2), make_groups(seed=6, count=3, advantages=[0.0] * 4)
    job = tiny_job()
    learner = Learner(model, job, seed=0)
    metrics = learner.train(0, [*live, *idle])
    plain = train_plainly(model, job, [[*live, *idle]])
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(learner.policy.masters[name].detach(), parameter.detach(), atol=1e-5, rtol=1e-5)
    trained = sum(int(c.tokens["flags"].sum()) for g in [*live, *idle] for c in g.completions)
    assert metrics["tokens_trained"] == trained

    resting = Learner(model, job, seed=0)
    before = weights_of(resting)
    assert resting.train(0, idle)["grad_norm"] == 0.0
    assert all(torch.equal(before[name], value) for name, value in weights_of(resting).items())


def test_a_step_without_a_trained_token_is_refused(model: Path) -> None:
    group = Group(prompt_ids=[1], completions=[Completion(tokens=observed([3], PolicyVersion(0)))], advantages_G=[1.0])
    with pytest.raises(JigsawError, match="step 4: no completion has a token to train on"):
        Learner(model, tiny_job(), seed=0).train(4, [group])


def broken_groups() -> list[Group]:
    (group,) = make_groups(seed=8, count=1)
    return [msgspec.structs.replace(group, advantages_G=[math.nan, 1.0, -1.0, 0.0])]


def test_an_update_that_isn_t_finite_changes_nothing_and_three_in_a_row_fail(model: Path) -> None:
    learner = Learner(model, tiny_job(), seed=0)
    before = weights_of(learner)
    for step in range(2):
        assert learner.train(step, broken_groups())["updates_skipped"] == 1
    assert all(torch.equal(before[name], value) for name, value in weights_of(learner).items())
    assert learner.train(2, make_groups(seed=9))["updates_skipped"] == 0
    assert all(value.isfinite().all() for value in weights_of(learner).values())
    for step in range(3, 5):
        learner.train(step, broken_groups())
    with pytest.raises(JigsawError, match="3 updates in a row"):
        learner.train(5, broken_groups())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(model: Path, tmp_path: Path, dtype: str) -> None:
    job = tiny_job(train={"schedule": "cosine", "steps": 4, "warmup_steps": 1}, algorithm={"kl_coef": 0.1, "minibatches": 2})
    job = msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, dtype=dtype))
    steps = [make_groups(seed=20 + step) for step in range(4)]
    whole = Learner(model, job, seed=3)
    for step in range(2):
        whole.train(step, steps[step])
    whole.save_checkpoint(tmp_path / "2", extra={"cursor": {"epoch": 1, "row": 7}})
    drawn = (random.random(), float(np.random.random()), torch.rand(1).item())
    expected = [whole.train(step, steps[step]) for step in range(2, 4)]

    resumed = Learner(model, job, seed=99, resume=checkpoint.load(tmp_path / "2"))
    assert (resumed.step, resumed.extra) == (2, {"cursor": {"epoch": 1, "row": 7}})
    assert (random.random(), float(np.random.random()), torch.rand(1).item()) == drawn
    actual = [resumed.train(step, steps[step]) for step in range(2, 4)]
    timings = {"time/compute", "throughput/computed_tokens_per_s"}
    for one, other in zip(actual, expected, strict=True):
        assert {k: v for k, v in one.items() if k not in timings} == {k: v for k, v in other.items() if k not in timings}
    assert all(torch.equal(weights_of(whole)[name], value) for name, value in weights_of(resumed).items())


def test_a_checkpoint_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", tied=False)
    learner = Learner(other, tiny_job(), seed=0)
    learner.train(0, make_groups())
    learner.save_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(ModelError, match="belong to another model"):
        Learner(model, tiny_job(), seed=0, resume=checkpoint.load(tmp_path / "checkpoint"))


def test_bf16_keeps_fp32_masters_and_moves_like_fp32(model: Path) -> None:
    job = tiny_job(train={"learning_rate": 1e-5, "eps": 1e-8, "micro_batch_tokens": 40})
    low = Learner(model, msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, dtype="bfloat16")), seed=0)
    high = Learner(model, job, seed=0)
    groups = make_groups(seed=11, count=8)
    reports = [learner.train(0, groups) for learner in (low, high)]
    assert reports[0]["grad_norm"] == pytest.approx(reports[1]["grad_norm"], rel=0.03)
    start = load_file(model / "model.safetensors")
    moved = [torch.cat([(weights_of(x)[n] - start[n]).flatten() for n in start]) for x in (low, high)]
    assert all(value.dtype == torch.float32 for value in weights_of(low).values())
    # an update of 1e-5 is far below the resolution of bf16 weights: only fp32 masters can take it
    assert torch.nn.functional.cosine_similarity(moved[0], moved[1], dim=0) > 0.8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_written_policy_loads_in_transformers_and_scores_alike(model: Path, tmp_path: Path, dtype: str) -> None:
    job = tiny_job()
    learner = Learner(model, msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, dtype=dtype)), seed=0)
    learner.train(0, make_groups())
    learner.write_policy(tmp_path / "policy")
    assert (tmp_path / "policy" / "model.safetensors").stat().st_mode & 0o044 == 0o044
    assert read_config(tmp_path / "policy")["dtype"] == dtype
    assert (tmp_path / "policy" / "tokenizer.json").read_text() == "{}"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype="auto")
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == getattr(torch, dtype)
        assert torch.equal(parameter.detach(), learner.policy.masters[name].detach().to(parameter.dtype))
    assert len(plain_logprobs(loaded, [1, 2], [3, 4], temperature=1.0)) == 2


def test_gradient_checkpointing_changes_nothing(model: Path) -> None:
    results = []
    for checkpointing in (False, True):
        learner = Learner(model, tiny_job(train={"gradient_checkpointing": checkpointing}), seed=0)
        learner.train(0, make_groups(seed=12))
        results.append(weights_of(learner))
    assert all(torch.equal(results[0][name], value) for name, value in results[1].items())


def test_learning_raises_the_log_probs_of_what_was_rewarded(model: Path) -> None:
    job = tiny_job(train={"learning_rate": 3e-3, "eps": 1e-8})
    groups = make_groups(seed=13, count=2, size=2, advantages=[1.0, -1.0])
    learner = Learner(model, job, seed=0)
    for step in range(5):
        learner.train(step, groups)

    def total(which: LlamaForCausalLM, index: int) -> float:
        fixed = plain_fixed(which, groups)
        return sum(
            fixed[id(g), index, i] for g in groups for i, t in enumerate(g.completions[index].tokens) if t["flags"] == 1
        )

    before = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    after = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    after.load_state_dict(weights_of(learner), strict=False)
    assert total(after, 0) > total(before, 0)
    assert total(after, 1) < total(before, 1)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_learning_rate_warms_up_and_falls(schedule: str, expected: list[float]) -> None:
    train = msgspec.structs.replace(TrainSection(learning_rate=1.0, warmup_steps=2, steps=6), schedule=schedule)
    assert [learning_rate(step, train) for step in range(6)] == pytest.approx(expected, abs=1e-6)
