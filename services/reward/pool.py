"""Scorers in worker processes with a time limit: one that loops or crashes hurts its own sample only.

Invariants: every call of :meth:`ScorerPool.score` gets exactly one verdict; a running scorer never outlives its limit by
more than moments; at most ``workers`` samples are inside processes, the rest wait their turn unsent; workers die with this
process. Each scorer has its own pool, so that one job's slow scorer takes no worker from another's.
"""

import asyncio
import multiprocessing
import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.to_thread
import msgspec
from pebble import ProcessExpired, ProcessPool

from libs.common.errors import RewardError
from libs.rewards.resolve import Scorer
from libs.rewards.score import Outcome, Verdict
from services.reward import worker

_ATTEMPTS = 2
"""One retry: a worker that is killed by a signal may have been a bystander (the node ran out of memory)."""


class _Lost(Exception):
    """The worker, or the whole pool, was gone before it answered."""


class ScorerPool:
    """Worker processes for one scorer, started at the first use; used from one event loop, by many tasks at once.

    Args:
        scorer: what :func:`libs.rewards.resolve.resolve` gave.
        timeout_s: wall-clock limit of one call, not counting imports and waiting for a worker.
        workers: processes.
        load_timeout_s: how long a worker may take to start and import the scorer.
    """

    def __init__(self, scorer: Scorer, *, timeout_s: float, workers: int = 1, load_timeout_s: float = 60.0) -> None:
        self._scorer, self._encoded = scorer, msgspec.msgpack.encode(scorer)
        self._timeout_s, self._workers, self._load_timeout_s = timeout_s, workers, load_timeout_s
        self._pool: ProcessPool | None = None
        self._slots = anyio.Semaphore(workers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.close()

    async def score(self, completion_text: str, answer: str, row: Mapping[str, Any]) -> Verdict:
        """Score one finished trajectory.

        Args:
            completion_text: what the policy wrote.
            answer: the row's reference.
            row: the dataset row's JSON-able fields.

        Raises:
            RewardError: the scorer can't be loaded, so that no sample can be scored.
        """
        async with self._slots:
            for _ in range(_ATTEMPTS):
                try:
                    status, reward, reason = await self._call(worker.run, self._encoded, completion_text, answer, row)
                except TimeoutError:
                    reason = f"the scorer took longer than {self._timeout_s:g} s and was stopped"
                    return Verdict(outcome=Outcome.FAILED, reward=None, reason=reason)
                except ProcessExpired as expired:
                    if expired.exitcode >= 0:
                        reason = f"the scorer ended its process with exit status {expired.exitcode}"
                        return Verdict(outcome=Outcome.FAILED, reward=None, reason=reason)
                    problem = f"a worker process was killed by signal {-expired.exitcode}"
                except _Lost as lost:
                    problem = str(lost)
                else:
                    return self._verdict(status, reward=reward, reason=reason)
        return Verdict(outcome=Outcome.LOST, reward=None, reason=f"{problem}, {_ATTEMPTS} times")

    async def close(self) -> None:
        """Stop the workers, whatever they are doing. The pool starts anew when it is used again."""
        pool, self._pool = self._pool, None
        if pool is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(_stop, pool)

    def _verdict(self, status: str, *, reward: float, reason: str) -> Verdict:
        if status == "unloadable":
            raise self._unloadable(reason)
        if status == "failed":
            return Verdict(outcome=Outcome.FAILED, reward=None, reason=reason)
        return Verdict(outcome=Outcome.SCORED, reward=reward, reason=reason)

    def _unloadable(self, problem: str) -> RewardError:
        return RewardError(f"the scorer {self._scorer.name!r} can't be loaded: {problem}")

    async def _call(self, function: Callable[..., Any], *args: object) -> Any:
        """One call in a worker.

        Raises:
            TimeoutError: it ran out of its time. ProcessExpired: its process ended under it.
            _Lost: the pool broke (an idle worker was killed, say), or gave no sign of life in all the time it may take.
        """
        pool = await self._started()
        try:
            future = asyncio.wrap_future(pool.schedule(function, args=args, timeout=self._timeout_s))
        except RuntimeError as error:  # the pool broke since it was looked at
            raise _Lost(f"the worker pool broke: {error}") from None
        limit_s = self._load_timeout_s + self._timeout_s
        try:
            done, _ = await asyncio.wait({future}, timeout=limit_s)
        except asyncio.CancelledError:
            future.cancel()  # stops the worker
            raise
        if not done:
            future.cancel()
            await self.close()
            raise _Lost(f"no worker process loaded the scorer and answered within {limit_s:g} s")
        try:
            return future.result()
        except RuntimeError as error:  # pebble's report of a broken pool; scorers' own exceptions stay in the worker
            raise _Lost(f"the worker pool broke: {error}") from None

    async def _started(self) -> ProcessPool:
        """The running pool: made at the first use, and anew after it broke."""
        if self._pool is not None and not self._pool.active:
            await self.close()
        if self._pool is None:
            self._pool = ProcessPool(
                max_workers=self._workers,
                initializer=worker.initialise,
                initargs=(os.getpid(), self._encoded),
                context=multiprocessing.get_context("spawn"),
            )
        return self._pool


def _stop(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()
