"""A replay: plays response lengths, recorded or drawn, at given speeds and without a model.

For tests, chaos runs and benchmarks of everything around an engine; a job gets it only by asking for ``engine = "replay"``.
Its tokens mean nothing.

Invariants: a turn's length depends on (seed, where the turn began) and a token on (seed, its index after the prompt), so a
resumed turn continues exactly as the uninterrupted one; a step lasts what the speeds say, or no time at all.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from itertools import chain

from libs.common.errors import ModelError
from libs.common.lengths import drawn_length, noise
from libs.common.replay import ReplayedRollout, speed_of
from libs.common.tokens import PolicyVersion
from services.rollout.engine import NewToken, StepReport, StopReason, TurnRequest


class _Turn:
    """A turn being played."""

    __slots__ = ("done", "length", "request", "unfilled")

    def __init__(self, request: TurnRequest, length: int) -> None:
        self.request = request
        self.length = length  # tokens of the whole turn, those of earlier engines included
        self.done = 0
        self.unfilled = len(request.prompt_ids) + len(request.token_ids)

    @property
    def context(self) -> int:
        """Tokens whose KV a real engine would hold."""
        return len(self.request.prompt_ids) + len(self.request.token_ids) + self.done - self.unfilled


class ReplayEngine:
    """An :class:`~services.rollout.engine.Engine` without a model."""

    def __init__(
        self,
        settings: ReplayedRollout,
        *,
        max_running: int,
        max_context: int | None = None,
        threads: int = 1,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Start empty; ``sleep`` spends a step's seconds (it blocks: the engine has its process to itself)."""
        self._settings = settings
        self._max_running = max_running
        self._max_context = max_context
        self._sleep = sleep
        self._turns: dict[str, _Turn] = {}  # in the order of arrival; the first max_running of them are the batch
        self.set_threads(threads)

    def add(self, requests: Sequence[TurnRequest]) -> None:
        """Queue turns; see :meth:`Engine.add`. If one is refused, none is queued."""
        for request in requests:
            length = len(request.prompt_ids) + len(request.token_ids)
            if self._max_context is not None and length >= self._max_context:
                raise ModelError(f"{request.key}: {length} tokens leave no room in a context window of {self._max_context}")
            if request.key in self._turns:
                raise ModelError(f"{request.key}: already has a turn on this engine")
        for request in requests:
            self._turns[request.key] = _Turn(
                request, drawn_length(self._settings.lengths, seed=request.seed, turn_start=request.turn_start)
            )

    def drop(self, keys: Sequence[str]) -> None:
        """Forget turns; see :meth:`Engine.drop`."""
        for key in keys:
            self._turns.pop(key, None)

    def busy(self) -> bool:
        """Whether a turn is running or waiting."""
        return bool(self._turns)

    def step(self) -> StepReport:
        """Play one step: sequences that are filled decode one token each, then prompts fill what is left of its tokens."""
        batch = list(self._turns.values())[: self._max_running]
        if any(turn.request.seed in self._settings.deadly_seeds for turn in batch):
            os._exit(1)
        decoding = [turn for turn in batch if turn.unfilled == 0]
        room = max(0, self._settings.batched_tokens - len(decoding))
        prefill_tokens, filled = 0, []
        for turn in batch:
            if turn.unfilled and room > 0:
                tokens = min(turn.unfilled, room)
                turn.unfilled, room, prefill_tokens = turn.unfilled - tokens, room - tokens, prefill_tokens + tokens
                if turn.unfilled == 0:
                    filled.append(turn)
        self._spend(prefill_tokens, len(decoding))
        used = sum(turn.context for turn in batch)
        new = [self._advance(turn) for turn in (*decoding, *filled)]
        return StepReport(
            new=new,
            prefill_tokens=prefill_tokens,
            decode_tokens=len(decoding),
            running=len(batch),
            waiting=max(0, len(self._turns) - self._max_running),
            kv_used=min(1.0, used / self._settings.kv_tokens),
        )

    def load_policy(self, version: PolicyVersion, directory: str) -> None:
        """Nothing to load: a replay has no weights."""

    def set_threads(self, count: int) -> None:
        """Play at the speed of this many threads, at most the cores that this process may run on."""
        self._speed = speed_of(self._settings.thread_speedup, count)

    def close(self) -> None:
        """Forget everything."""
        self._turns.clear()

    def _spend(self, prefill_tokens: int, decoding: int) -> None:
        settings = self._settings
        seconds = prefill_tokens / settings.prefill_tokens_per_s if settings.prefill_tokens_per_s else 0.0
        if decoding:
            seconds += (settings.decode_ms + settings.decode_ms_per_sequence * decoding) / 1000
        if seconds > 0:
            self._sleep(seconds / self._speed)

    def _advance(self, turn: _Turn) -> NewToken:
        """The next token of a turn, which leaves the engine if that ends it."""
        request = turn.request
        position = len(request.token_ids) + turn.done
        turn.done += 1
        reason = None
        if position + 1 - request.turn_start >= turn.length:
            reason = StopReason.STOP
        elif turn.done >= request.max_new_tokens:
            reason = StopReason.LENGTH
        elif self._max_context is not None and len(request.prompt_ids) + position + 1 >= self._max_context:
            reason = StopReason.CONTEXT
        if reason is not None:
            del self._turns[request.key]
        stop_ids = request.stop_token_ids
        if reason is StopReason.STOP and stop_ids:
            token_id = stop_ids[0]
        else:
            token_id = _token_id(request.seed, position, self._settings.vocab_size, frozenset(stop_ids))
        return NewToken(key=request.key, token_id=token_id, logprob=-math.log(self._settings.vocab_size), stopped=reason)


def _token_id(seed: int, position: int, vocab_size: int, avoid: frozenset[int]) -> int:
    """The id at a position, never one that would end the turn (unless nothing else is left)."""
    first = int(noise(seed, stream=0, counter=position).integers(vocab_size))
    return next((token for token in chain(range(first, vocab_size), range(first)) if token not in avoid), first)
