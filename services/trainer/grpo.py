"""GRPO and its variants: advantages, the token-wise loss, and what is reported about it. Pure.

The loss of an update is a weighted sum over its trained tokens whose weights are known before the first forward pass, so
micro-batches add up to exactly the loss of the whole batch, and each token's gradient can be taken on its own.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from libs.common.sections import AlgorithmSection


class Normaliser(msgspec.Struct, frozen=True):
    """What a loss averages over: the trained tokens and sequences of one whole update.

    ``token`` weighs every trained token of the update alike (DAPO, arXiv 2503.14476, eq. 8); ``sequence`` weighs every
    sequence alike, and the tokens of a sequence alike (GRPO, arXiv 2402.03300, eq. 3).
    """

    loss: Literal["token", "sequence"]
    tokens: int
    sequences: int

    @classmethod
    def of(cls, lengths: Sequence[int], *, loss: Literal["token", "sequence"]) -> "Normaliser":
        """Of an update whose sequences have these numbers of trained tokens; those without any don't count."""
        return cls(loss=loss, tokens=sum(lengths), sequences=sum(length > 0 for length in lengths))

    def weight(self, length: int) -> float:
        """Weight of one token of a sequence with ``length`` trained tokens; a whole update's weights sum to 1."""
        return 1.0 / self.tokens if self.loss == "token" else 1.0 / (self.sequences * length)


class TokenLoss(msgspec.Struct, frozen=True):
    """Per trained token, axes [M]: the weighted loss, and detached parts of it for reporting."""

    loss_M: torch.Tensor
    policy_M: torch.Tensor
    kl_M: torch.Tensor
    clipped_M: torch.Tensor


EQUAL = 1e-9
"""Rewards closer than this are equal: they differ by how they were summed, and normalising would make that the signal."""


def advantages(rewards_G: Sequence[float | None], *, normalise: Literal["std", "none"]) -> npt.NDArray[np.float64]:
    """Group-relative advantages of one prompt's samples.

    ``std`` is (r - mean) / std with the sample standard deviation (GRPO, arXiv 2402.03300, section 4.1.2); ``none`` is
    r - mean (Dr. GRPO, arXiv 2503.20783, section 3.2).

    Args:
        rewards_G: one per sample; None, NaN or infinite for a sample that isn't valid.

    Returns:
        One per sample; 0 for samples that aren't valid, and exactly 0 for all if the valid ones are equal (to within
        ``EQUAL``, relative to the largest above 1) or fewer than 2.
    """
    rewards = np.array([math.nan if reward is None else reward for reward in rewards_G], np.float64)
    valid = np.isfinite(rewards)
    result = np.zeros(len(rewards))
    kept = rewards[valid]
    if len(kept) < 2 or np.ptp(kept) <= EQUAL * max(1.0, float(np.abs(kept).max())):
        return result
    centred = kept - kept.mean()
    result[valid] = centred / centred.std(ddof=1) if normalise == "std" else centred
    return result


def importance_weights(old_M: torch.Tensor, behaviour_M: torch.Tensor, *, cap: float | None) -> torch.Tensor:
    """Truncated importance sampling weights min(pi_trainer / pi_engine, cap), axes [M]; ones if ``cap`` is None.

    They correct for an engine whose probabilities differ from the trainer's for the same weights (Yao et al. 2025, "Your
    efficient RL framework secretly brings you off-policy RL training").
    """
    if cap is None:
        return torch.ones_like(old_M)
    return (old_M - behaviour_M).exp().clamp(max=cap)


def k3(logprob_M: torch.Tensor, other_M: torch.Tensor) -> torch.Tensor:
    """Estimate of KL(p || q) from samples of p with log-probs ``logprob_M``, ``other_M`` under q: q/p - 1 - log(q/p).

    Unbiased and never negative (Schulman 2020, "Approximating KL divergence"; GRPO, arXiv 2402.03300, eq. 4).
    """
    difference_M = other_M - logprob_M
    return difference_M.expm1() - difference_M


def token_loss(
    logprob_M: torch.Tensor,
    *,
    old_M: torch.Tensor,
    advantage_M: torch.Tensor,
    importance_M: torch.Tensor,
    weight_M: torch.Tensor,
    reference_M: torch.Tensor | None,
    algorithm: AlgorithmSection,
) -> TokenLoss:
    """The clipped policy loss of every trained token (GRPO, arXiv 2402.03300, eq. 3; two bounds: DAPO, eq. 10).

    w * (-importance * min(ratio * A, clip(ratio, 1 - low, 1 + high) * A) + kl_coef * k3), with ratio = exp(logprob - old).

    Args:
        logprob_M: under the policy being updated (nats). old_M: the trainer's own at the step's start, without gradient.
        reference_M: under the reference policy; None if there is no KL penalty.
    """
    ratio_M = (logprob_M - old_M).exp()
    bounded_M = ratio_M.clamp(1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high)
    free_M, held_M = ratio_M * advantage_M, bounded_M * advantage_M
    policy_M = -importance_M * torch.minimum(free_M, held_M)
    kl_M = torch.zeros_like(policy_M) if reference_M is None else k3(logprob_M, reference_M)
    return TokenLoss(
        loss_M=weight_M * (policy_M + algorithm.kl_coef * kl_M),
        policy_M=(weight_M * policy_M).detach(),
        kl_M=kl_M.detach(),
        clipped_M=(held_M < free_M).detach(),
    )
