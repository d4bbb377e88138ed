"""What an inference engine is to the rollout service: something that continues token sequences, one step at a time.

Stepped from outside, because every step boundary is a place to apply an allocation, take or release work, load a policy,
checkpoint and report. Implementations: :mod:`services.rollout.vllm_engine` and :mod:`services.rollout.replay_engine`.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from libs.common.tokens import PolicyVersion


class StopReason(StrEnum):
    """Why a turn ended: the model stopped, the token budget ran out, or the context window did."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"


class TurnRequest(msgspec.Struct, frozen=True):
    """One model turn to generate, or to finish if an earlier engine had begun it.

    Attributes:
        key: names the trajectory on this engine.
        prompt_ids: the opening prompt.
        token_ids: everything after the prompt so far, sampled and observed; its KV cache is computed, or found.
        turn_start: index in ``token_ids`` where this turn began; stop strings count from there.
        max_new_tokens: how many more tokens this turn may take; at least 1.
        temperature: 0 is greedy.
        seed: of the trajectory; the noise of a token is keyed by (seed, its index after the prompt).
        stop_token_ids: end the turn; the stop token itself is kept as the turn's last token.
        stop: strings that end the turn; the token that completes one is kept.
    """

    key: str
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    turn_start: int
    max_new_tokens: int
    temperature: float
    seed: int
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()


class NewToken(msgspec.Struct, frozen=True, array_like=True):
    """A token that a step produced.

    Attributes:
        key: the trajectory.
        token_id: what was sampled.
        logprob: log-prob (nats) under the distribution really sampled from (temperature applied; greedy: temperature 1).
        stopped: why the turn ended with this token, or None.
    """

    key: str
    token_id: int
    logprob: float
    stopped: StopReason | None = None


class StepReport(msgspec.Struct, frozen=True, array_like=True):
    """What one engine step did: new tokens, and the work it processed.

    Attributes:
        new: at most one token per running request.
        prefill_tokens: prompt (and resumed) tokens whose KV was computed in this step.
        decode_tokens: tokens decoded, one per running sequence.
        running: sequences in the batch. waiting: requests not yet in it.
        kv_used: share of the KV cache's blocks in use, 0..1.
    """

    new: list[NewToken]
    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    kv_used: float


class Engine(Protocol):
    """A continuous-batching engine of one policy; not thread-safe, driven by one loop."""

    def add(self, requests: Sequence[TurnRequest]) -> None:
        """Queue turns; they join the batch at the next step.

        Raises:
            ModelError: a request that can never run (longer than the context window).
        """

    def drop(self, keys: Sequence[str]) -> None:
        """Forget turns at this step boundary; unknown keys are ignored. Their blocks are free at once."""

    def busy(self) -> bool:
        """Whether a step would do anything."""

    def step(self) -> StepReport:
        """Run one engine step."""

    def load_policy(self, version: PolicyVersion, directory: str) -> None:
        """Put a policy's weights (safetensors directory) in force between two steps.

        Cached prefixes of other versions are never used for requests added afterwards.
        """

    def set_threads(self, count: int) -> None:
        """Compute with this many threads from the next step on; never more than the cores of this process."""

    def close(self) -> None:
        """Free everything."""
