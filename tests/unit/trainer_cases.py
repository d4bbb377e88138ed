"""A tiny fp32 Llama, and plain per-sequence loops that the trainer's batched computations are compared with."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from libs.common.job import Job, job_from
from libs.common.tokens import PolicyVersion, join, observed, sampled
from services.trainer.batches import Completion, Group

VOCABULARY = 300


def write_tiny_model(directory: Path, *, tied: bool = True) -> Path:
    """A randomly initialised model in Hugging Face format, with a stand-in for tokenizer files."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
    return directory


def tiny_job(
    *, algorithm: dict[str, object] | None = None, train: dict[str, object] | None = None, **rollout: object
) -> Job:
    """An fp32 job with the given settings.

    Its large ``eps`` keeps AdamW from blowing up the rounding noise of gradients near 0, so that updates can be compared.
    """
    raw = {
        "name": "tiny",
        "model": {"path": "tiny", "dtype": "float32"},
        "data": {"task": "products"},
        "rollout": rollout,
        "algorithm": algorithm or {},
        "train": {"learning_rate": 1e-2, "max_grad_norm": 1e9, "micro_batch_tokens": 64, "eps": 1e-2, **(train or {})},
    }
    return job_from(raw, file="tiny")


def make_groups(*, seed: int = 0, count: int = 5, size: int = 4, advantages: Sequence[float] | None = None) -> list[Group]:
    """Groups of ragged completions, some with observed tokens in the middle and at the end."""
    draw = np.random.default_rng(seed)
    version = PolicyVersion(0)
    groups = []
    for _ in range(count):
        completions = []
        for index in range(size):
            first, second = draw.integers(1, 12), draw.integers(1, 9)
            parts = [
                sampled(draw.integers(0, VOCABULARY, first).tolist(), (-6 * draw.random(first)).tolist(), version),
                observed(draw.integers(0, VOCABULARY, 3 if index % 2 else 0).tolist(), version),
                sampled(draw.integers(0, VOCABULARY, second).tolist(), (-6 * draw.random(second)).tolist(), version),
                observed(draw.integers(0, VOCABULARY, 2 if index == 3 else 0).tolist(), version),
            ]
            completions.append(Completion(tokens=join(*parts)))
        values = advantages if advantages is not None else draw.normal(size=size).tolist()
        prompt = draw.integers(0, VOCABULARY, draw.integers(1, 15)).tolist()
        groups.append(Group(prompt_ids=prompt, completions=completions, advantages_G=values))
    return groups


def plain_logprobs(
    model: LlamaForCausalLM, prompt: Sequence[int], ids: Sequence[int], *, temperature: float
) -> torch.Tensor:
    """Log-prob of every completion token, from one whole sequence in one forward pass."""
    logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0] / temperature
    logs = torch.log_softmax(logits, -1)
    return torch.stack([logs[len(prompt) + index - 1, token] for index, token in enumerate(ids)])


Fixed = dict[tuple[int, int, int], float]
"""A log-prob per (id of group, completion, token): something that an update doesn't change."""


def plain_fixed(model: LlamaForCausalLM, groups: Sequence[Group], *, temperature: float = 1.0) -> Fixed:
    """Log-probs of all tokens under ``model``, as plain numbers."""
    fixed: Fixed = {}
    for group in groups:
        for c, completion in enumerate(group.completions):
            logs = plain_logprobs(model, group.prompt_ids, completion.tokens["id"].tolist(), temperature=temperature)
            fixed |= {(id(group), c, index): log.item() for index, log in enumerate(logs)}
    return fixed


def plain_loss(
    model: LlamaForCausalLM, groups: Sequence[Group], job: Job, *, old: Fixed, reference: Fixed, temperature: float = 1.0
) -> torch.Tensor:
    """The loss of one update, token by token."""
    algorithm = job.algorithm
    trained_total = sum(int(c.tokens["flags"].sum()) for g in groups for c in g.completions)
    sequences = sum(len(g.completions) for g in groups)
    total = torch.zeros(())
    for group in groups:
        for c, completion in enumerate(group.completions):
            advantage, tokens = group.advantages_G[c], completion.tokens
            logs = plain_logprobs(model, group.prompt_ids, tokens["id"].tolist(), temperature=temperature)
            length = int(tokens["flags"].sum())
            for index, token in enumerate(tokens):
                if token["flags"] != 1:
                    continue
                before = old[id(group), c, index]
                ratio = torch.exp(logs[index] - before)
                low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
                bounded = ratio if low <= ratio.item() <= high else torch.tensor(min(max(ratio.item(), low), high))
                surrogate = torch.minimum(ratio * advantage, bounded * advantage)
                cap = algorithm.importance_cap
                importance = 1.0 if cap is None else min(math.exp(before - float(token["logprob"])), cap)
                difference = reference[id(group), c, index] - logs[index]
                penalty = algorithm.kl_coef * (torch.exp(difference) - difference - 1)
                share = 1 / trained_total if algorithm.loss == "token" else 1 / (sequences * length)
                total = total + share * (penalty - importance * surrogate)
    return total


def read_config(directory: Path) -> dict[str, object]:
    """The directory's config.json."""
    return dict(json.loads((directory / "config.json").read_text(encoding="utf-8")))
