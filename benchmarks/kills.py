"""A rollout worker that is killed with SIGKILL: what is lost of each trajectory, and when it goes on elsewhere.

What had been generated is counted from the engine's own telemetry, token by token up to the last window (200 ms) and from
there at the speed of the last second. What the store hasn't got of it after the death is lost. Every step of an engine gives
each of its trajectories a token and every checkpoint stores all of them, so each has lost the same. Job settings are the
defaults: 32 tokens or 500 ms, leases of 5 s.

The chain to the first resumed token: the lease runs out, the trainer looks, looks again, announces; another worker, with an
engine loaded and room, claims, prefills what there is, generates, and stores at its next checkpoint.
"""

import os
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import msgspec

from benchmarks.report import Readings, Report
from benchmarks.rollout_workers import RolloutWorkers, rollout_workers
from libs.common import messages as m
from libs.common import subjects
from libs.common.job import Job
from libs.common.trajectory import Record, TrajectoryId

BEGUN = 8
"""Tokens that trajectories have before anything is killed."""
MOMENTS = (0.15, 0.55, 0.95, 0.35, 0.75)
"""When the kill comes, as parts of a checkpoint interval, in turn."""
LOOK_S = 0.005
RECENT = 5
"""Windows of about a second."""
DEAD_S = 0.1
"""After this nothing of a dead worker can still be on its way to the store."""


class Kill(msgspec.Struct, frozen=True):
    """One kill.

    Attributes:
        lost: of each of the victim's trajectories, in tokens. interval: of checkpoints, in tokens at the engine's speed.
        expired, announced, claimed, resumed: seconds from the kill until that was seen of the first.
    """

    lost: float
    interval: float
    expired: float
    announced: float
    claimed: float
    resumed: float


class Generated:
    """What an instance's engine has generated, from its telemetry."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._decoded, self._at = 0, time.monotonic()
        self._last = deque[m.RolloutWindow](maxlen=RECENT)

    def take(self, window: m.AnyMessage) -> None:
        """Count a window."""
        if isinstance(window, m.RolloutWindow) and window.sender == self._instance:
            self._decoded, self._at = self._decoded + window.tokens_decode, time.monotonic()
            self._last.append(window)

    @property
    def per_s(self) -> float:
        """Tokens per second lately."""
        return sum(window.tokens_decode for window in self._last) / sum(window.window_s for window in self._last)

    def tokens(self, *, prefills: int, at: float) -> float:
        """Tokens of all trajectories at a time, the one included that comes with each prefill."""
        return prefills + self._decoded + self.per_s * (at - self._at)


async def measure(report: Report, name: str, *, job: Job, model: Path, home: Path, kills: int) -> None:
    """Kill a worker in each of ``kills`` steps, and note the figures below ``name``."""
    taken: list[Kill] = []
    async with rollout_workers(home, job, model) as workers:
        for number in range(kills):
            victim = workers.instances[number % 2]
            taken.append(await _kill(workers, number, victim))
            told = ", ".join(
                f"{key} {getattr(taken[-1], key):.2f}" for key in ("expired", "announced", "claimed", "resumed")
            )
            report.say(f"{name} {number}: lost {taken[-1].lost:.1f} of {taken[-1].interval:.1f} tokens; {told} s")
    _note(report, name, taken)


def _note(report: Report, name: str, taken: list[Kill]) -> None:
    report.add(f"{name}.lost_tokens", Readings.of([kill.lost for kill in taken]), "tokens", "of each trajectory")
    report.add(f"{name}.interval_tokens", Readings.of([kill.interval for kill in taken]), "tokens", "32, or in 500 ms")
    shares = [kill.lost / kill.interval for kill in taken]
    report.add(f"{name}.lost_intervals", Readings.of(shares), "x", "at most 1")
    parts = {
        "lease_s": ([kill.expired for kill in taken], "until the lease has run out"),
        "notice_s": ([kill.announced - kill.expired for kill in taken], "then until the trainer announces it again"),
        "claim_s": ([kill.claimed - kill.announced for kill in taken], "then until another has claimed it"),
        "token_s": ([kill.resumed - kill.claimed for kill in taken], "then until a new token is stored"),
        "total_s": ([kill.resumed for kill in taken], "from the kill to the first resumed token"),
    }
    for part, (seconds, note) in parts.items():
        report.add(f"{name}.resume.{part}", Readings.of(seconds), "s", note)


async def _kill(workers: RolloutWorkers, number: int, victim: str) -> Kill:
    """Start a step, half of it on each instance; kill one, and watch its half until it goes on."""
    (survivor,) = set(workers.instances[:2]) - {victim}
    half = workers.job.rollout.batch * workers.job.rollout.group // 2
    for instance in (victim, survivor):
        await workers.allow(instance, max_running=half)
    generated = Generated(victim)
    async with _telemetry(workers, generated), workers.step() as ids:
        await workers.until(ids, partial(_begun, at_least=half + 1))
        await workers.allow(survivor, max_running=2 * half)  # it has room, and goes on with its own
        await anyio.sleep(MOMENTS[number % len(MOMENTS)] * workers.job.rollout.checkpoint_ms / 1000)
        killed = time.monotonic()
        os.kill(workers.process(victim).pid, signal.SIGKILL)
        await anyio.sleep(DEAD_S)
        stored = [record for record in await workers.records(ids) if record.owner == victim]
        theirs = [record for record in stored if record.state == "running"]
        lost = generated.tokens(prefills=len(stored), at=killed) - sum(len(record.tokens) for record in stored)
        rollout = workers.job.rollout
        interval = min(rollout.checkpoint_tokens, rollout.checkpoint_ms / 1000 * generated.per_s / len(theirs))
        expired, announced, claimed, resumed = await _resumed(workers, theirs, since=killed)
        return Kill(lost / len(theirs), interval, expired, announced, claimed, resumed)


async def _resumed(workers: RolloutWorkers, dead: Sequence[Record], *, since: float) -> tuple[float, float, float, float]:
    """Seconds until the first lease was seen to be over, announced, claimed, and to have a new token."""
    ids = [record.spec.id for record in dead]
    announced: list[float] = []
    expired = 0.0

    async def hear() -> None:
        async for message in subscription.messages:
            task = m.decode(message.data)
            if isinstance(task, m.StartRollout) and TrajectoryId(task.job_uid, task.group, task.sample) in ids:
                announced.append(time.monotonic() - since)

    subscription = await workers.bus.client.subscribe(subjects.subscription(m.StartRollout, job_uid=workers.uid))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hear)
        while not expired:
            if "expired" in await workers.store.states(ids):
                expired = time.monotonic() - since
            await anyio.sleep(LOOK_S)
        epochs = max(record.epoch for record in dead)
        claimed = await workers.until(ids, lambda records: any(record.epoch > epochs for record in records)) - since
        resumed = await workers.until(ids, lambda records: any(map(_longer, records, dead))) - since
        await subscription.unsubscribe()
        tasks.cancel_scope.cancel()
    return expired, announced[0], claimed, resumed


def _begun(records: Sequence[Record], *, at_least: int) -> bool:
    """Whether so many, more than one instance can have, are running and well under way."""
    return sum(record.state == "running" and len(record.tokens) >= BEGUN for record in records) >= at_least


def _longer(record: Record, before: Record) -> bool:
    return len(record.tokens) > len(before.tokens)


@asynccontextmanager
async def _telemetry(workers: RolloutWorkers, generated: Generated) -> AsyncIterator[None]:
    """Count what is generated as long as the context lasts."""

    async def count() -> None:
        async for window in workers.bus.telemetry():
            generated.take(window)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(count)
        yield
        tasks.cancel_scope.cancel()
