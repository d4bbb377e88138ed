"""One job's learning: takes a step's groups, updates the policy, and can be stopped and resumed without a trace.

Invariants: the masters, the optimiser and every random state are functions of what was trained alone; a resumed learner
continues bit for bit like one that was never stopped. An update whose gradient isn't finite changes nothing.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from libs.common.errors import JigsawError
from libs.common.job import Job
from services.trainer import checkpoint, randomness
from services.trainer.batches import Group, MicroBatch, pack, trained_lengths
from services.trainer.grpo import Normaliser, TokenLoss, importance_weights, token_loss
from services.trainer.head import Scores
from services.trainer.model import Policy
from services.trainer.process import usable_cores
from services.trainer.schedule import learning_rate
from services.trainer.tally import Tally
from services.trainer.wire import MicroBatchDone

MAX_BAD_UPDATES = 3
"""Updates in a row without a finite gradient after which a job fails."""


class _Old(msgspec.Struct, frozen=True):
    """What the step's start fixes for a micro-batch, axes [M]: the trainer's own log-probs and the importance weights."""

    logprob_M: torch.Tensor
    importance_M: torch.Tensor


class _Item(msgspec.Struct, frozen=True):
    """A micro-batch and what is known about it before it is trained.

    Attributes:
        idle: its loss has no gradient: every advantage is 0 and there is no KL penalty.
        old: None while the policy is still the step's first, whose log-probs are the old ones by definition.
    """

    batch: MicroBatch
    idle: bool
    old: _Old | None = None
    reference_M: torch.Tensor | None = None


class Learner:
    """A policy with its optimiser.

    Args:
        directory: the model in Hugging Face format: the initial policy, and the reference of the KL penalty.
        resume: what to continue from.

    Raises:
        ModelError: the model can't be trained, or the checkpoint is of another.

    Attributes:
        step: updates of the whole job so far, counted in steps. extra: what the caller saved with the checkpoint.
    """

    def __init__(self, directory: Path, job: Job, *, seed: int, resume: checkpoint.Checkpoint | None = None) -> None:
        self._job, self.step, self.extra = job, 0, dict[str, Any]()
        self._bad_updates = 0
        randomness.seed(seed)
        dtype = torch.bfloat16 if job.model.dtype == "bfloat16" else torch.float32
        temperature = job.rollout.temperature or 1.0  # log-probs of greedy samples are at temperature 1
        self.policy = Policy(
            directory,
            dtype=dtype,
            temperature=temperature,
            gradient_checkpointing=job.train.gradient_checkpointing,
        )
        self._reference = (
            Policy(directory, dtype=dtype, temperature=temperature, trainable=False) if job.algorithm.kl_coef > 0 else None
        )
        self._optimiser = torch.optim.AdamW(
            self.policy.masters.values(),
            lr=job.train.learning_rate,
            betas=(job.train.beta1, job.train.beta2),
            eps=job.train.eps,
            weight_decay=job.train.weight_decay,
            fused=True,
        )
        if resume is not None:
            self._restore(resume)

    def set_threads(self, count: int) -> None:
        """Compute with this many threads from the next operation on, held to the cores of this process."""
        torch.set_num_threads(max(1, min(count, usable_cores())))

    def train(
        self, step: int, groups: Sequence[Group], *, on_micro_batch: Callable[[MicroBatchDone], None] | None = None
    ) -> dict[str, float]:
        """Make the updates of one step and return its metrics.

        Args:
            step: 0-based; sets the learning rate.
            on_micro_batch: called after every forward pass; may wait, change the number of threads, or raise to give up the
                step, which leaves the policy in between: resume from a checkpoint then.

        Raises:
            JigsawError: nothing to train on, or the third update in a row without a finite gradient.
        """
        started = time.perf_counter()
        algorithm = self._job.algorithm
        parts = self._parts(groups)
        if not parts:
            raise JigsawError(f"step {step}: no completion has a token to train on")
        rate = learning_rate(step, self._job.train)
        several = len(parts) * algorithm.epochs > 1
        meter = _Meter(total=self._passes(parts, several=several), report=on_micro_batch)
        tally = Tally()
        parts = [[self._prepare(item, meter, tally, score_old=several) for item in part] for part in parts]
        norms = [self._update(part, meter, tally, rate=rate) for _ in range(algorithm.epochs) for part in parts]
        self.step = step + 1
        seconds = time.perf_counter() - started
        made = [norm for norm in norms if norm is not None]
        return {
            **tally.metrics(updates=len(norms)),
            "grad_norm": sum(made) / len(made) if made else 0.0,
            "learning_rate": rate,
            "updates_skipped": float(len(norms) - len(made)),
            "throughput/tokens_computed": float(meter.tokens),
            "throughput/computed_tokens_per_s": meter.tokens / seconds,
            "time/compute": seconds,
        }

    def _parts(self, groups: Sequence[Group]) -> list[list[_Item]]:
        """The micro-batches of each of one pass's updates."""
        algorithm, budget = self._job.algorithm, self._job.train.micro_batch_tokens
        groups = [group for group in groups if any(trained_lengths([group]))]
        count = min(algorithm.minibatches, len(groups))
        parts = []
        for chosen in (groups[start::count] for start in range(count)):
            normaliser = Normaliser.of(trained_lengths(chosen), loss=algorithm.loss)
            idle = [group for group in chosen if algorithm.kl_coef == 0 and not any(group.advantages_G)]
            live = [group for group in chosen if algorithm.kl_coef > 0 or any(group.advantages_G)]
            packed = [
                _Item(batch=batch.to(self.policy.device), idle=kind is idle)
                for kind in (live, idle)
                for batch in pack(kind, budget=budget, normaliser=normaliser)
            ]
            parts.append(packed)
        return parts

    def _passes(self, parts: Sequence[Sequence[_Item]], *, several: bool) -> int:
        """Forward passes of the step."""
        items = [item for part in parts for item in part]
        before = len(items) * (several + (self._reference is not None))
        return before + self._job.algorithm.epochs * sum(not (item.idle and several) for item in items)

    def _prepare(self, item: _Item, meter: "_Meter", tally: Tally, *, score_old: bool) -> _Item:
        """Score a micro-batch by the policies that must see it before the first update."""
        if self._reference is not None:
            item = msgspec.structs.replace(item, reference_M=self._reference.score(item.batch).logprob_M)
            meter.tick(item.batch)
        if score_old:
            scores = self.policy.score(item.batch)
            item = msgspec.structs.replace(item, old=self._old(item.batch, scores.logprob_M))
            self._tally_scores(item, scores, tally)
            meter.tick(item.batch)
        return item

    def _old(self, batch: MicroBatch, logprob_M: torch.Tensor) -> _Old:
        importance_M = importance_weights(logprob_M, batch.behaviour_M, cap=self._job.algorithm.importance_cap)
        return _Old(logprob_M=logprob_M, importance_M=importance_M)

    def _tally_scores(self, item: _Item, scores: Scores, tally: Tally) -> None:
        old = item.old or self._old(item.batch, scores.logprob_M)
        tally.scored(item.batch, scores, importance_M=old.importance_M)

    def _update(self, part: Sequence[_Item], meter: "_Meter", tally: Tally, *, rate: float) -> float | None:
        """One optimiser update; its gradient norm, or None if it was skipped because that isn't finite."""
        self.policy.clear_gradients()
        for item in part:
            if item.idle and item.old is not None:
                continue  # scored already, and nothing to learn from
            self._accumulate(item, tally)
            meter.tick(item.batch)
        gradients = [master.grad for master in self.policy.masters.values() if master.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).item()
        if not math.isfinite(norm):
            self._bad_updates += 1
            if self._bad_updates >= MAX_BAD_UPDATES:
                raise JigsawError(f"{self._bad_updates} updates in a row had no finite gradient")
            return None
        self._bad_updates = 0
        if norm > self._job.train.max_grad_norm:
            torch._foreach_mul_(gradients, self._job.train.max_grad_norm / norm)
        for settings in self._optimiser.param_groups:
            settings["lr"] = rate
        self._optimiser.step()
        self.policy.refresh()
        return norm

    def _accumulate(self, item: _Item, tally: Tally) -> None:
        """Add one micro-batch's gradient; on the step's first policy, take in its scores as well."""

        def slope(rows: slice, logprob_R: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                leaf_R = logprob_R.clone().requires_grad_()
                loss = self._loss(item, leaf_R, rows).loss_M.sum()
                return torch.autograd.grad(loss, leaf_R)[0]

        scores = self.policy.score(item.batch) if item.idle else self.policy.train(item.batch, slope)
        if item.old is None:
            self._tally_scores(item, scores, tally)
        tally.learned(self._loss(item, scores.logprob_M, slice(None)))

    def _loss(self, item: _Item, logprob_R: torch.Tensor, rows: slice) -> TokenLoss:
        """The loss of the micro-batch's tokens ``rows``, given their log-probs."""
        batch = item.batch
        detached_R = logprob_R.detach()
        cap = self._job.algorithm.importance_cap
        return token_loss(
            logprob_R,
            old_M=detached_R if item.old is None else item.old.logprob_M[rows],
            advantage_M=batch.advantage_M[rows],
            importance_M=importance_weights(detached_R, batch.behaviour_M[rows], cap=cap)
            if item.old is None
            else item.old.importance_M[rows],
            weight_M=batch.weight_M[rows],
            reference_M=None if item.reference_M is None else item.reference_M[rows],
            algorithm=self._job.algorithm,
        )

    def write_policy(self, directory: Path) -> None:
        """Write the policy in the job's dtype, as a directory that transformers and vLLM load.

        Raises:
            ModelError: it can't be written.
        """
        self.policy.write(directory)

    def save_checkpoint(self, directory: Path, *, extra: Mapping[str, Any] | None = None) -> None:
        """Save everything that resuming needs, durably, together with the caller's own plain data.

        The directory is a model in Hugging Face format as well: the fp32 masters with the source's config and tokenizer.

        Raises:
            JigsawError: it can't be written; an earlier checkpoint is intact.
        """
        self.extra = dict(extra or {})
        moments = {
            f"{key}/{name}": value
            for name, master in self.policy.masters.items()
            for key, value in self._optimiser.state[master].items()
        }
        checkpoint.save(
            directory,
            tensors={"model": {n: m.detach() for n, m in self.policy.masters.items()}, "optimiser": moments},
            state={
                "step": self.step,
                "bad_updates": self._bad_updates,
                "random": randomness.capture(),
                "extra": self.extra,
            },
            companions=self.policy.write_companions,
        )

    def _restore(self, saved: checkpoint.Checkpoint) -> None:
        """Continue from a checkpoint."""
        self.policy.load_masters(saved.tensors["model"])
        for name, value in saved.tensors["optimiser"].items():
            key, _, parameter = name.partition("/")
            master = self.policy.masters[parameter]
            self._optimiser.state[master][key] = value.to(master.device, copy=True)  # not the file's own mapped pages
        self.step, self._bad_updates = saved.state["step"], saved.state["bad_updates"]
        self.extra = saved.state["extra"]
        randomness.restore(saved.state["random"])


class _Meter:
    """Counts a step's forward passes and reports each."""

    def __init__(self, *, total: int, report: Callable[[MicroBatchDone], None] | None) -> None:
        self.tokens = 0
        self._done, self._total, self._report = 0, total, report
        self._last = time.perf_counter()

    def tick(self, batch: MicroBatch) -> None:
        """A forward pass over this micro-batch, with its backward pass if it had one, has ended."""
        self._done += 1
        self.tokens += batch.tokens
        if self._report is not None:
            seconds = time.perf_counter() - self._last
            self._report(MicroBatchDone(self._done, self._total, batch.tokens, seconds))
        self._last = time.perf_counter()
