"""What each sub-stage asks of a device: operations, memory traffic, traffic between devices.

Counting follows Kaplan et al. 2020 (section 2.1: 2 FLOPs per parameter and token forward, 4 backward), Pope et al. 2022
(weights and KV cache as decode's memory traffic; tensor parallelism), Korthikanti et al. 2022 (recomputation; two
all-reduces per layer and direction) and Dao et al. 2022 (attention never writes its scores). Everything is for one device.

Matrix kernels and attention are kept apart, because a step runs them one after the other: while attention reads the KV
cache, the matrix units idle, and the sum of two maxima is more than the maximum of the sums.
"""

from collections.abc import Sequence

import msgspec

from libs.common.model_shape import ModelShape
from services.scheduler.devices.hardware import Work

# fp32 logits are written by the head and read by the sampler or the loss; training goes back the same way.
_LOGIT_BYTES = 4.0
# FlashAttention's backward pass has five products where the forward has two (Dao et al. 2022, algorithm 4).
_ATTENTION_BACKWARD = 2.5
# AdamW per trained parameter: master, gradient and two moments are read, all but the gradient written, in fp32; and the
# compute copy is written.
_OPTIMISER_BYTES = 16.0 + 12.0
# A micro-batch's gradients in bf16 are written and read, and added to fp32 ones.
_GRADIENT_BYTES = 4.0 + 8.0


class Demand(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One step's demands on one device.

    Attributes:
        flops, bytes: of matrix kernels: their operations, and the weights, activations and logits that they move.
        attention_flops, attention_bytes: of attention kernels: their operations, and the KV cache that they move.
        link_bytes: sent to other devices while computation waits. messages: collectives that it waits for.
        stream_bytes: sent to other devices beside the computation.
        sequences: that the engine's host handles.
    """

    work: Work
    flops: float = 0.0
    bytes: float = 0.0
    attention_flops: float = 0.0
    attention_bytes: float = 0.0
    link_bytes: float = 0.0
    messages: int = 0
    stream_bytes: float = 0.0
    sequences: float = 0.0

    @property
    def all_flops(self) -> float:
        """Operations in all."""
        return self.flops + self.attention_flops

    @property
    def all_bytes(self) -> float:
        """Memory traffic in all."""
        return self.bytes + self.attention_bytes


def prefill(shape: ModelShape, tokens: float, *, context: float = 0.0, sequences: float = 1.0, tensor: int = 1) -> Demand:
    """One step that computes the KV cache of new tokens, and the first logits.

    Args:
        tokens: new ones of each sequence. context: cached ones that each has before them.
        tensor: devices that share the work.
    """
    pairs = sequences * (tokens * context + tokens * (tokens + 1) / 2)
    return _forward(shape, sequences * tokens, pairs, sequences * (context + tokens), scored=sequences, tensor=tensor)


def migration(shape: ModelShape, lengths: Sequence[float], *, tensor: int = 1) -> Demand:
    """The target's prefill of everything that moved: prompts and what was generated, in one batch.

    Args:
        lengths: tokens of each moved sequence.
    """
    total = sum(lengths)
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    return _forward(shape, total, pairs, total, scored=len(lengths), tensor=tensor)


class Decoder:
    """Decode steps of one model; what doesn't change from step to step is computed once.

    Args:
        tensor: devices that share the work.
    """

    def __init__(self, shape: ModelShape, *, tensor: int = 1) -> None:
        # A step is linear in its tokens and in the cached ones, but for the weights, which it reads once.
        self._shape, self._bytes_per_weight = shape, shape.bytes_per_weight / tensor
        self._fixed_bytes = None if shape.experts else self._weights(1.0)
        self._token = _forward(shape, 1.0, 0.0, 0.0, scored=1.0, tensor=tensor)
        self._token_bytes = self._token.bytes - self._weights(1.0)
        self._cached = _forward(shape, 0.0, 1.0, 1.0, scored=0.0, tensor=tensor)

    def step(self, batch: float, context: float) -> Demand:
        """One step that generates a token for each of ``batch`` sequences with ``context`` cached tokens in all."""
        token, cached = self._token, context + batch
        weights = self._weights(batch) if self._fixed_bytes is None else self._fixed_bytes
        return Demand(
            work=Work.DECODE,
            flops=batch * token.flops,
            bytes=weights + batch * self._token_bytes,
            attention_flops=cached * self._cached.attention_flops,
            attention_bytes=cached * self._cached.attention_bytes,
            link_bytes=batch * token.link_bytes,
            messages=token.messages,
            sequences=batch,
        )

    def _weights(self, batch: float) -> float:
        return (self._shape.touched_parameters(batch) + self._shape.head_parameters) * self._bytes_per_weight


def train(
    shape: ModelShape,
    tokens: float,
    *,
    length: float,
    trained: float | None = None,
    recompute: bool = False,
    tensor: int = 1,
    shards: int = 1,
) -> Demand:
    """Forward and backward pass of a micro-batch.

    Args:
        tokens: that this device (with ``tensor`` - 1 others) computes. length: of its sequences on average.
        trained: tokens whose logits are computed (responses); all if None.
        recompute: activations in the backward pass instead of keeping them.
        shards: data-parallel devices over which FSDP shards weights and gradients; each has a micro-batch of its own.
    """
    scored = tokens if trained is None else trained
    again = 1 if recompute else 0
    matrix = tokens * shape.active_body_parameters + scored * shape.head_parameters
    adapter = tokens * shape.adapter_parameters
    # Forward, gradients of the activations, and gradients of those weights that are trained.
    products = (2 + again) * (matrix + adapter) + (adapter if shape.adapter_share else matrix)
    attention = _attention_flops(shape, tokens * (length + 1) / 2)
    touched = shape.touched_parameters(tokens)
    weights = (touched + shape.head_parameters) * shape.bytes_per_weight
    trained_touched = shape.adapter_parameters or touched + shape.head_parameters
    gathered = shape.weight_bytes / tensor
    reduced = shape.trained_parameters * shape.bytes_per_weight / tensor
    return Demand(
        work=Work.TRAIN,
        flops=2 * products / tensor,
        # Activations: two accesses forward; backward reads them again, and writes and reads their gradients.
        bytes=(
            (2 + again) * weights
            + trained_touched * _GRADIENT_BYTES
            + (5 + 2 * again) * tokens * shape.activation_bytes
            + 4 * scored * shape.vocabulary * _LOGIT_BYTES
        )
        / tensor,
        attention_flops=(1 + again + _ATTENTION_BACKWARD) * attention / tensor,
        attention_bytes=(3 + again) * tokens * _kv_bytes(shape, tensor),
        link_bytes=(2 + again) * _all_reduced(shape, tokens, tensor),
        messages=(2 + again) * _messages(shape, tensor),
        # FSDP gathers weights for each pass and scatters gradients (Zhao et al. 2023), beside the computation.
        stream_bytes=(2 * gathered + reduced) * (shards - 1) / shards,
    )


def optimise(shape: ModelShape, *, devices: int = 1) -> Demand:
    """The optimiser's update, its state spread over ``devices``."""
    touched = shape.trained_parameters / devices
    return Demand(work=Work.COPY, bytes=touched * (_OPTIMISER_BYTES + shape.bytes_per_weight))


def weight_sync(shape: ModelShape, *, tensor: int = 1, remote: bool = True) -> Demand:
    """A new policy version into an engine: read and written once on the device; ``remote``: from somewhere else."""
    arriving = shape.sync_bytes / tensor
    return Demand(work=Work.COPY, bytes=2 * arriving, stream_bytes=arriving if remote else 0.0)


def _forward(
    shape: ModelShape,
    tokens: float,
    pairs: float,
    cached: float,
    *,
    scored: float,
    tensor: int,
) -> Demand:
    """One engine step.

    Args:
        pairs: of a token and an earlier one that it attends to (itself included). cached: tokens whose KV it touches.
        scored: tokens whose logits are computed.
    """
    head, kv = shape.head_parameters, _kv_bytes(shape, tensor)
    matrix = tokens * (shape.active_body_parameters + shape.adapter_parameters) + scored * head
    moved = (
        (shape.touched_parameters(tokens) + head) * shape.bytes_per_weight
        + 2 * tokens * shape.activation_bytes
        + 2 * scored * shape.vocabulary * _LOGIT_BYTES
    )
    gathered = scored * shape.vocabulary * shape.bytes_per_value * (tensor - 1) / tensor
    return Demand(
        work=Work.PREFILL,
        flops=2 * matrix / tensor,
        bytes=moved / tensor,
        attention_flops=_attention_flops(shape, pairs) / tensor,
        attention_bytes=cached * kv,
        link_bytes=_all_reduced(shape, tokens, tensor) + gathered,
        messages=_messages(shape, tensor),
        sequences=scored,
    )


def _attention_flops(shape: ModelShape, pairs: float) -> float:
    """Scores and weighted sum: 2 FLOPs each per pair, layer and element of all heads."""
    return 4.0 * shape.layers * shape.query_width * pairs


def _kv_bytes(shape: ModelShape, tensor: int) -> float:
    """KV cache of one token on one device: a head can't be split, so more devices than heads hold copies."""
    return shape.kv_bytes / min(tensor, shape.kv_heads)


def _messages(shape: ModelShape, tensor: int) -> int:
    """All-reduces of one pass: after attention and after the MLP of each layer (Shoeybi et al. 2019)."""
    return 2 * shape.layers if tensor > 1 else 0


def _all_reduced(shape: ModelShape, tokens: float, tensor: int) -> float:
    """Bytes that a device sends in one pass: a ring moves 2(t-1)/t of each all-reduced activation."""
    size = tokens * shape.hidden * shape.bytes_per_value
    return 2 * (tensor - 1) / tensor * size * _messages(shape, tensor)
