"""A planned move: from the request until the target has generated a token of every trajectory, against the prefill in it.

The target's engine is loaded and idle. How long its prefill took it tells itself, in its telemetry: a window that begins
when work comes and ends with the first step. So both are of the same engine, sequences and moment, whatever else the machine
does. For comparison the same sequences, at once, go to a bare engine process with the same settings on the same core.

Every token is stored as it comes here (``checkpoint_tokens = 1``), so that the store shows when it was there. The source
lets go at the end of its engine's step, so a move takes up to one step longer than a prefill whatever the system does; what
the system adds is counted from the last token that the source has stored.
"""

import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import anyio
import msgspec

from benchmarks.report import Readings, Report
from benchmarks.rollout_workers import LOOK_S, POLICY, RolloutWorkers, rollout_workers
from libs.common import messages as m
from libs.common.changes import Changes
from libs.common.errors import JigsawError
from libs.common.job import Job
from libs.common.logging import configure
from libs.common.trajectory import Record, TrajectoryId
from services.rollout import wire
from services.rollout.engine import TurnRequest
from services.rollout.engine_link import EngineLink

AT, LENGTH = 16, 48
"""Tokens that a trajectory has when it is moved, at least, and at its end."""
TRIES = 2


class Move(msgspec.Struct, frozen=True):
    """One move, as the store showed it; seconds from the request.

    Attributes:
        last_token: of the source, 0 if it stored none after the request. handed_over: the target owned all.
        first_tokens: all had a token from the target. records: as they were handed over.
    """

    last_token: float
    handed_over: float
    first_tokens: float
    records: list[Record]


class BareEngine:
    """An engine process without a service around it: for what a prefill takes by itself."""

    def __init__(self, job: Job, *, core: int) -> None:
        self._job = job
        self._link = EngineLink(job, cores=[core], receiver=self._take, log=configure(instance="benchmark", level="error"))
        self._waiting: set[str] = set()
        self._changes = Changes()

    @classmethod
    @asynccontextmanager
    async def loaded(cls, job: Job, model: Path, *, core: int) -> AsyncIterator[Self]:
        """One that runs on a core as long as the context lasts."""
        engine = cls(job, core=core)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine._link.run)
            await engine._load(model)
            yield engine
            await engine._link.stop()

    async def prefill(self, records: Sequence[Record]) -> float:
        """Seconds until these sequences, begun at once, have a new token each."""
        requests = [_turn(record) for record in records]
        keys = [request.key for request in requests]
        self._waiting = set(keys)
        started = time.monotonic()
        for request in requests:
            await self._link.begin(request)
        await self._changes.until(lambda: not self._waiting)
        taken = time.monotonic() - started
        await self._link.drop(keys)
        return taken

    async def _load(self, model: Path) -> None:
        self._link.want_policy(POLICY, model)
        await self._link.set_units((0,), revision=1, memory_mb=self._job.rollout.kv_memory_mb)
        await self._link.available()

    async def _take(self, said: wire.FromEngine) -> None:
        if isinstance(said, wire.StepFailed):
            raise JigsawError(f"the bare engine is lost: {said.error}")
        if isinstance(said, wire.Progress):
            self._waiting -= {segment.key for segment in said.segments}
        self._changes.notify()


def _turn(record: Record) -> TurnRequest:
    spec = record.spec
    return TurnRequest(
        key=spec.id.member,
        prompt_ids=spec.prompt_ids,
        token_ids=record.tokens["id"].tolist(),
        turn_start=0,
        max_new_tokens=spec.max_new_tokens - len(record.tokens),
        temperature=spec.temperature,
        seed=spec.seed,
    )


class Reading(msgspec.Struct, frozen=True):
    """A move, and in seconds: its prefill as the engine told, the bare engine's, and a decode step at the source."""

    move: Move
    prefill: float
    bare: float
    step: float


async def measure(report: Report, name: str, *, job: Job, model: Path, home: Path, moves: int) -> None:
    """Move a job's steps ``moves`` times after one of warm-up, and note the figures below ``name``.

    Raises:
        JigsawError: too many trajectories ended before they could be moved.
    """
    readings: list[Reading] = []
    async with rollout_workers(home, job, model) as workers, BareEngine.loaded(job, model, core=workers.cores[1]) as bare:
        await workers.allow(workers.instances[0], max_running=job.rollout.max_running)
        draw = random.Random(0)
        for _ in range(TRIES * (moves + 1)):
            if len(readings) > moves:
                break
            reading = await _read(workers, bare, moment=draw.random())
            if reading is None:
                report.say(f"{name}: it had ended before it could be moved, and is left out")
                continue
            readings.append(reading)
            took = f"first tokens after {reading.move.first_tokens:.3f} s, prefill {reading.prefill:.3f} s"
            report.say(f"{name}: {took}, by a bare engine {reading.bare:.3f} s")
    _note(report, name, readings[1:])


async def _read(workers: RolloutWorkers, bare: BareEngine, *, moment: float) -> Reading | None:
    """One step, moved once it is under way and a part, ``moment``, of a decode step later."""
    source, target = workers.instances[:2]
    async with workers.step() as ids, _prefills(workers, target) as told:
        begun = await workers.until(ids, lambda records: all(len(record.tokens) >= 1 for record in records))
        reached = await workers.until(ids, lambda records: all(len(record.tokens) >= AT for record in records))
        step = (reached - begun) / (AT - 1)
        await anyio.sleep(moment * step)
        move = await _move(workers, ids, source=source, target=target)
        await workers.until(ids, lambda records: all(record.state == "finished" for record in records))
    if move is None:
        return None
    if not told or told[0].tokens_decode:
        raise JigsawError("the prefill is too short for the engine's telemetry to show it alone")
    return Reading(move, told[0].window_s, await bare.prefill(move.records), step)


@asynccontextmanager
async def _prefills(workers: RolloutWorkers, instance: str) -> AsyncIterator[list[m.RolloutWindow]]:
    """Collect an instance's telemetry windows that have a prefill, as long as the context lasts."""
    told: list[m.RolloutWindow] = []

    async def listen() -> None:
        async for window in workers.bus.telemetry():
            if isinstance(window, m.RolloutWindow) and window.sender == instance and window.tokens_prefill:
                told.append(window)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listen)
        yield told
        tasks.cancel_scope.cancel()


def _note(report: Report, name: str, readings: Sequence[Reading]) -> None:
    def add(figure: str, read: Callable[[Reading], float], note: str) -> None:
        report.add(f"{name}.{figure}_ms", Readings.of([1000 * read(reading) for reading in readings]), "ms", note)

    add("prefill", lambda reading: reading.prefill, "the target's own")
    add("bare_prefill", lambda reading: reading.bare, "of the same sequences by a bare engine")
    add("source_step", lambda reading: reading.step, "a decode step at the source")
    add("handed_over", lambda reading: reading.move.handed_over, "from the request: the step ends, tokens are stored")
    add("first_tokens", lambda reading: reading.move.first_tokens, "from the request")
    add("over_prefill", lambda reading: reading.move.first_tokens - reading.prefill, "the source's step included")
    readings = [reading for reading in readings if reading.move.last_token]
    add("after_step", lambda reading: reading.move.first_tokens - reading.move.last_token - reading.prefill, "at most 50")


async def _move(workers: RolloutWorkers, ids: Sequence[TrajectoryId], *, source: str, target: str) -> Move | None:
    """Ask for a move and watch it in the store; None if one ended before a busy source was told."""
    lengths = [len(record.tokens) for record in await workers.records(ids)]
    moved: list[Record] = []
    last_token = handed_over = 0.0
    request = m.ReleaseTrajectories(sender="benchmark", job_uid=workers.uid, target=target, count=len(ids))
    started = time.monotonic()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(workers.ask, source, request)
        while True:
            records = await workers.records(ids)
            now = time.monotonic() - started
            grown = [len(record.tokens) > length for record, length in zip(records, lengths, strict=True)]
            if moved and all(grown):
                break
            if not moved:
                if any(record.state == "finished" for record in records):
                    return None
                if any(grown):
                    last_token, lengths = now, [len(record.tokens) for record in records]
                if all(record.owner == target for record in records):
                    handed_over, moved = now, records
            await anyio.sleep(LOOK_S)
    return Move(last_token, handed_over, now, moved)
