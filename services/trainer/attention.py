"""Causal attention over sequences whose tokens lie in one flat axis without padding.

Registered with transformers, so that any model that supports its attention interface runs unchanged on flat micro-batches.
Each block of index rows is gathered into [S, L] sequences, attended causally, and read back. Padding lies to the right of a
row, where causality hides it; its own outputs are never read back, so its gradients are exactly 0.

On a CPU, torch's fused kernel is several times slower at short rows than two batched matrix products (50 ms against 6 ms for
a backward pass of 48 rows of 71 positions, 9 heads, bf16, 2 threads), but needs no memory for the scores; it takes over
where rows are long.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from libs.common.errors import ModelError

NAME = "jigsaw_rows"
"""The implementation's name in a model's config."""

LONGEST_WITH_SCORES = 512
"""Rows up to this length keep their scores on a CPU."""


def register() -> None:
    """Make :data:`NAME` known to transformers; repeating it changes nothing."""
    AttentionInterface.register(NAME, row_attention)


def row_attention(
    module: torch.nn.Module,
    query_1HND: torch.Tensor,
    key_1KND: torch.Tensor,
    value_1KND: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    rows: Sequence[torch.Tensor],
    source_N: torch.Tensor,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention outputs [1, N, H, D] of flat queries (H heads) over flat keys and values (K heads, H a multiple of K).

    Args:
        rows, source_N: as in ``MicroBatch``.

    Raises:
        ModelError: the model asks for something besides plain causal attention.
    """
    longest = max(block.shape[1] for block in rows)
    if (options.get("sliding_window") or longest) < longest:
        raise ModelError("sequences longer than the model's sliding attention window can't be trained")
    if options.get("softcap") is not None or options.get("s_aux") is not None:
        raise ModelError("models with capped attention scores or attention sinks can't be trained")
    scale = scaling if scaling is not None else query_1HND.shape[-1] ** -0.5
    flat = [states[0].transpose(0, 1).flatten(1) for states in (query_1HND, key_1KND, value_1KND)]
    D = query_1HND.shape[-1]
    outputs = [_attend(*(_gather(states, block, D) for states in flat), scale=scale) for block in rows]
    joined = torch.cat([output_SLHD.flatten(0, 1) for output_SLHD in outputs])
    return joined.index_select(0, source_N).unsqueeze(0), None


def _gather(states_NF: torch.Tensor, block_SL: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Flat states as rows [S, L, heads, head_dim]; ``index_select``, because its backward pass is the fast one."""
    return states_NF.index_select(0, block_SL.flatten()).view(*block_SL.shape, -1, head_dim)


def _attend(query_SLHD: torch.Tensor, key_SLKD: torch.Tensor, value_SLKD: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Causal attention [S, L, H, D] within each row."""
    S, L, H, D = query_SLHD.shape
    if query_SLHD.device.type != "cpu" or L > LONGEST_WITH_SCORES:
        query, key, value = (states.transpose(1, 2) for states in (query_SLHD, key_SLKD, value_SLKD))
        output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return output.transpose(1, 2)
    K = key_SLKD.shape[2]
    R = H // K  # query heads that share a key head are stacked as rows, so that keys needn't be repeated
    query = query_SLHD.view(S, L, K, R, D).permute(0, 2, 3, 1, 4).reshape(S * K, R * L, D)
    key = key_SLKD.transpose(1, 2).reshape(S * K, L, D)
    value = value_SLKD.transpose(1, 2).reshape(S * K, L, D)
    future_LL = torch.full((L, L), float("-inf"), dtype=query.dtype).triu(1)
    scores = torch.baddbmm(future_LL.repeat(R, 1).expand(S * K, -1, -1), query, key.transpose(1, 2), alpha=scale)
    output = torch.bmm(scores.softmax(-1), value)
    return output.view(S, K, R, L, D).permute(0, 3, 1, 2, 4).reshape(S, L, H, D)
