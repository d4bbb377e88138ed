"""Log-probs, entropies and their gradients at trained positions, without ever holding all logits.

The language-model head is the largest matrix of a small model, and its logits its largest activation. So logits exist for
one chunk of positions at a time; where a gradient is wanted it is taken at once, in closed form, in the chunk's own memory:
with p = softmax(z / T), d logprob(target) / dz = (onehot(target) - p) / T.

Elementwise work runs over few rows at a time, so that on a CPU it stays in the cache.
"""

from collections.abc import Callable

import msgspec
import torch

CHUNK_ELEMENTS = 1 << 27
"""Logits held at once: 0.27 GB in bf16."""

CACHED_ELEMENTS = 1 << 21
"""Logits worked on at once on a CPU, in fp32."""

Slope = Callable[[slice, torch.Tensor], torch.Tensor]
"""Given a slice of M and its log-probs, the loss's derivative by each of them."""


class Scores(msgspec.Struct, frozen=True):
    """Per trained token, axes [M], fp32: log-prob (nats) and entropy of its distribution at the sampling temperature."""

    logprob_M: torch.Tensor
    entropy_M: torch.Tensor


class HeadGradient(msgspec.Struct, frozen=True):
    """Where a backward pass begins.

    Attributes:
        slope: of the loss.
        into_VD: fp32; the head's gradient is added to it.
        hidden_MD: filled with the loss's gradient by the hidden states.
    """

    slope: Slope
    into_VD: torch.Tensor
    hidden_MD: torch.Tensor


@torch.no_grad()
def score(
    hidden_MD: torch.Tensor,
    head_VD: torch.Tensor,
    target_M: torch.Tensor,
    *,
    temperature: float,
    gradient: HeadGradient | None = None,
) -> Scores:
    """Score ``target_M`` under softmax(hidden @ head^T / temperature), and add up gradients if ``gradient`` is given.

    Args:
        hidden_MD: final hidden states at the predicting positions. head_VD: in the same dtype.
    """
    M, V = len(target_M), len(head_VD)
    logprob_M = torch.empty(M, dtype=torch.float32, device=hidden_MD.device)
    entropy_M = torch.empty_like(logprob_M)
    chunk = max(1, CHUNK_ELEMENTS // V)
    step = max(1, CACHED_ELEMENTS // V) if hidden_MD.device.type == "cpu" else chunk
    for first in range(0, M, chunk):
        part = slice(first, min(first + chunk, M))
        logits_CV = hidden_MD[part] @ head_VD.T
        for start in range(part.start, part.stop, step):
            rows = slice(start, min(start + step, part.stop))
            block_RV = logits_CV[start - first : rows.stop - first]
            log_RV = (block_RV.float() / temperature).log_softmax(-1)
            target_R1 = target_M[rows, None]
            logprob_M[rows] = log_RV.gather(1, target_R1).squeeze(1)
            share_RV = log_RV.exp()
            entropy_M[rows] = -torch.linalg.vecdot(share_RV, log_RV)
            if gradient is not None:
                slope_R1 = gradient.slope(rows, logprob_M[rows])[:, None] / temperature
                block_RV.copy_(share_RV.mul_(-slope_R1).scatter_add_(1, target_R1, slope_R1))
        if gradient is not None:
            torch.mm(logits_CV, head_VD, out=gradient.hidden_MD[part])
            gradient.into_VD.add_(logits_CV.T @ hidden_MD[part])
    return Scores(logprob_M=logprob_M, entropy_M=entropy_M)
