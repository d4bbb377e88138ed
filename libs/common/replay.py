"""Settings of the replays, which stand for an engine or for training without a model: a job's ``engine_args``.

For tests, chaos runs and benchmarks of everything around them; a job gets a replay only by asking for it.
"""

import os
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from libs.common.lengths import Lengths, LogNormalLengths

Count = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[float, Meta(ge=0)]
Speedups = Annotated[tuple[Annotated[float, Meta(gt=0)], ...], Meta(min_length=1)]


class ReplayedRollout(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a replayed engine.

    Attributes:
        lengths: of turns, in tokens.
        prefill_tokens_per_s: speed of prompt tokens; 0 takes no time.
        decode_ms: of a decode step, whatever its batch. decode_ms_per_sequence: added for each sequence in it.
        thread_speedup: speed with 1, 2, … threads relative to 1; the last one holds for more.
        batched_tokens: prompt tokens of one step at most.
        vocab_size: ids are drawn below it.
        kv_tokens: capacity of the KV cache that is reported as used.
        deadly_seeds: a trajectory with one of these seeds takes the engine's process with it as soon as it is in a step.
    """

    lengths: Lengths = LogNormalLengths()
    prefill_tokens_per_s: NonNegative = 0.0
    decode_ms: NonNegative = 0.0
    decode_ms_per_sequence: NonNegative = 0.0
    thread_speedup: Speedups = (1.0,)
    batched_tokens: Count = 2048
    vocab_size: Annotated[int, Meta(ge=2)] = 256
    kv_tokens: Count = 65536
    deadly_seeds: tuple[int, ...] = ()


class ReplayedTraining(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of replayed training.

    Attributes:
        tokens_per_s: speed of a whole step over its prompts (once per group) and responses; 0 takes no time.
        thread_speedup: speed with 1, 2, … threads relative to 1; the last one holds for more.
    """

    tokens_per_s: NonNegative = 0.0
    thread_speedup: Speedups = (1.0,)


def speed_of(speedups: Sequence[float], threads: int) -> float:
    """Speed with this many threads, at most the cores that this process may run on, relative to one."""
    usable = max(1, min(threads, len(os.sched_getaffinity(0)), len(speedups)))
    return speedups[usable - 1]
