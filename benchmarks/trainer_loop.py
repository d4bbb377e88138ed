"""The trainer against a bare loop, in one process, in turn: seconds of a step over the same micro-batches.

``python -m benchmarks.trainer_loop``, started by :mod:`benchmarks.trainer_speed` with a training process's environment. The
bare loop is what one would write by hand: the stock model with fp32 weights under bf16 autocast, logits at trained positions
only, the plain policy-gradient loss, clipping, fused AdamW. It computes nothing else: no mismatch, no ratio, no metrics.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.node_jobs import demo_job
from benchmarks.trainer_speed import Round, Work
from libs.common.job import Job
from libs.common.tokens import PolicyVersion, sampled
from services.trainer.batches import Completion, Group, MicroBatch, pack, trained_lengths
from services.trainer.grpo import Normaliser
from services.trainer.learner import Learner


class BareLoop:
    """The stock model and optimiser."""

    def __init__(self, directory: str, *, learning_rate: float) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
        self._optimiser = torch.optim.AdamW(self._model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)

    def step(self, batches: Sequence[MicroBatch]) -> None:
        """One update."""
        for batch in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs = [self._model.model(input_ids=batch.ids_N[rows], use_cache=False)[0] for rows in batch.rows]
                hidden_LD = torch.cat([output_SLD.flatten(0, 1) for output_SLD in outputs])
                logits_MV = self._model.lm_head(hidden_LD[batch.source_N[batch.predictor_M]])
            logprob_M = -torch.nn.functional.cross_entropy(logits_MV.float(), batch.target_M, reduction="none")
            loss = -(batch.weight_M * batch.advantage_M * logprob_M).sum()
            torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimiser.step()
        self._optimiser.zero_grad()


def main() -> None:
    """Alternate, first one then the other first, and print one line a round."""
    work = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Work)
    job = demo_job(work.model, steps=1000)
    groups = random_groups(work)
    learner = Learner(Path(work.model), job, seed=work.seed)
    bare, batches = BareLoop(work.model, learning_rate=job.train.learning_rate), micro_batches(groups, job)
    tokens = sum(len(group.prompt_ids) + len(one.tokens) for group in groups for one in group.completions)
    computed = sum(batch.tokens for batch in batches)
    for number in range(work.repeats + 1):
        times = {}
        for name in ("learner", "bare") if number % 2 else ("bare", "learner"):
            started = time.perf_counter()
            if name == "learner":
                learner.train(number, groups)
            else:
                bare.step(batches)
            times[name] = time.perf_counter() - started
        if number:  # the first one warms up
            print(msgspec.json.encode(Round(times["learner"], times["bare"], tokens, computed)).decode(), flush=True)


def random_groups(work: Work) -> list[Group]:
    """Groups with random completions, half of each right: what is in them changes nothing about the time."""
    random = np.random.default_rng(work.seed)
    version = PolicyVersion(0)

    def completion() -> Completion:
        ids = random.integers(100, 40_000, work.new_tokens).tolist()
        return Completion(sampled(ids, [-1.0] * work.new_tokens, version))

    signs = [1.0 if index % 2 else -1.0 for index in range(work.group)]
    return [Group(prompt, [completion() for _ in range(work.group)], signs) for prompt in work.prompts]


def micro_batches(groups: Sequence[Group], job: Job) -> list[MicroBatch]:
    """The micro-batches that the learner makes of the groups."""
    normaliser = Normaliser.of(trained_lengths(groups), loss=job.algorithm.loss)
    return pack(groups, budget=job.train.micro_batch_tokens, normaliser=normaliser)


if __name__ == "__main__":
    main()
