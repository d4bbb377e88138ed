"""Sums over a step's tokens that become its metrics."""

import torch

from services.trainer.batches import MicroBatch
from services.trainer.grpo import TokenLoss, k3
from services.trainer.head import Scores


class Tally:
    """Collects what a step's micro-batches report; means are over trained tokens."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._mismatch_max = 0.0
        self._scored = self._learned = 0
        self._attended = self._padding = 0
        self._losses: list[float] = []

    def scored(self, batch: MicroBatch, scores: Scores, *, importance_M: torch.Tensor) -> None:
        """Take in the policy's scores at the step's start, once per token of the step."""
        self._scored += batch.trained
        self._attended += batch.attended
        self._padding += batch.padding
        self._add("entropy", scores.entropy_M)
        self._add("importance_weight", importance_M)
        # the samples are the engine's, so this estimates KL(engine || trainer)
        self._add("mismatch/kl", k3(batch.behaviour_M, scores.logprob_M))
        difference_M = (scores.logprob_M - batch.behaviour_M).abs()
        self._mismatch_max = max(self._mismatch_max, difference_M.max().item())

    def learned(self, losses: TokenLoss) -> None:
        """Take in the loss of tokens that an update is made from."""
        self._learned += len(losses.loss_M)
        self._add("kl", losses.kl_M)
        self._add("clip_fraction", losses.clipped_M.float())
        self._add("loss/policy", losses.policy_M)

    def _add(self, name: str, values_M: torch.Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + values_M.sum(dtype=torch.float64).item()

    def metrics(self, *, updates: int) -> dict[str, float]:
        """The step's metrics; ``loss/policy`` is the mean over its ``updates``."""
        sums = self._sums
        scored, learned = max(1, self._scored), max(1, self._learned)
        return {
            "loss/policy": sums.get("loss/policy", 0.0) / max(1, updates),
            "kl": sums.get("kl", 0.0) / learned,
            "clip_fraction": sums.get("clip_fraction", 0.0) / learned,
            "entropy": sums.get("entropy", 0.0) / scored,
            "importance_weight": sums.get("importance_weight", 0.0) / scored,
            "mismatch/kl": sums.get("mismatch/kl", 0.0) / scored,
            "mismatch/max": self._mismatch_max,
            "tokens_trained": float(self._scored),
            "padding_share": self._padding / max(1, self._attended),
        }
