"""A series of faults on a running cluster: drawn from a seed, struck at chosen moments, recorded, and judged at the end.

The same seed strikes in the same order at the same moments of a step; when exactly a moment comes is the machine's affair.
"""

import asyncio
import random
import time
from pathlib import Path

import anyio
import msgspec
from anyio.abc import TaskGroup

from libs.common.job import Job
from tests.chaos.cluster import Cluster, running_cluster
from tests.chaos.faults import STRIKES, Attack, Healing, Kind, Missed
from tests.chaos.invariants import Ending, check_nothing_left, ending_of
from tests.chaos.jobs import submission
from tests.chaos.watch import JobWatch, Moment, Watch

LASTING_AT_ONCE = 4
GLANCE_S = 0.01
MOMENT_COMES_S = 120.0
JOB_ENDS_S = 90.0


class Planned(msgspec.Struct, frozen=True):
    """A fault to come: what, at which moment of a job's step, and how long after the one before."""

    kind: Kind
    moment: Moment
    pause_s: float


class Struck(msgspec.Struct, frozen=True):
    """A fault that struck live work.

    Attributes:
        at_s: since the campaign began. job, step: whose work it was. target: who was struck.
        running: trajectories of that job that were running then.
        began_anew: other workers that died of it, too; known of faults that strike alone.
    """

    at_s: float

    kind: Kind
    moment: Moment
    job: str
    step: int
    target: str
    running: int
    began_anew: list[str] = []


class Report(msgspec.Struct):
    """What came of a campaign."""

    struck: list[Struck] = []
    jobs: int = 0
    seconds: float = 0.0

    def cells(self) -> set[tuple[Kind, Moment]]:
        """Which kinds struck at which moments."""
        return {(one.kind, one.moment) for one in self.struck}


CELLS = len(Kind) * len(Moment)


def planned(seed: int, count: int) -> list[Planned]:
    """``count`` faults of which no pair of kind and moment comes again before all have come; pauses up to 0.2 s."""
    draw, plan = random.Random(seed), list[Planned]()
    cells = [(kind, moment) for kind in Kind for moment in Moment]
    while len(plan) < count:
        draw.shuffle(cells)
        plan += [Planned(kind, moment, draw.uniform(0.0, 0.2)) for kind, moment in cells]
    return plan[:count]


class Workload(msgspec.Struct, frozen=True):
    """What is attacked.

    Attributes:
        jobs: handed in one after another, over and over. at_once: so many of them run at any time.
        rollouts: instances on each machine.
        expected: how each of them ends undisturbed; found out first where it isn't known, and kept here.
    """

    jobs: list[Job]
    at_once: int = 2
    rollouts: int = 2
    expected: dict[str, Ending] = {}


class Campaign:
    """Runs jobs and strikes at them, as planned.

    Args:
        seed: of all that is drawn on the way.
        alone: strike only when every job has done a whole step since the last fault was healed.
        report: what has been done so far.
    """

    def __init__(self, cluster: Cluster, workload: Workload, *, seed: int, alone: bool, report: Report) -> None:
        self._cluster, self._workload, self._seed, self._alone = cluster, workload, seed, alone
        self._watch = Watch(cluster)
        self._draw = random.Random(seed)
        self._busy: set[str] = set()
        self._submitted = 0
        self._attacking = True
        self._began = 0.0
        self._report = report

    async def run(self, plan: list[Planned]) -> None:
        """Strike as planned, let all jobs end, and check everything.

        Raises:
            AssertionError: an invariant is broken; with the faults that came before.
        """
        self._began = time.monotonic()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch.run)
                await self._run_undisturbed()
                async with anyio.create_task_group() as jobs:
                    jobs.start_soon(self._feed, jobs)
                    await self._strike_all(plan)
                    self._attacking = False
                    self._watch.changes.notify()
                tasks.cancel_scope.cancel()
            await check_nothing_left(self._cluster, list(self._watch.jobs))
        finally:
            self._report.seconds = time.monotonic() - self._began
        assert not self._watch.broken, self._watch.broken

    # --- jobs --------------------------------------------------------------------------------------------------------

    async def _run_undisturbed(self) -> None:
        """Each job left alone, if it isn't known yet how it ends then."""

        async def one(job: Job) -> None:
            self._workload.expected[job.name] = await self._run_job(f"undisturbed-{job.name}", job)

        async with anyio.create_task_group() as tasks:
            for job in self._workload.jobs:
                if job.name not in self._workload.expected:
                    tasks.start_soon(one, job)

    async def _feed(self, jobs: TaskGroup) -> None:
        """Keep jobs running for as long as there is an attack."""
        while self._attacking:
            if len(self._watch.alive()) < self._workload.at_once:
                job = self._workload.jobs[self._submitted % len(self._workload.jobs)]
                self._watch.follow(uid := f"attacked-{self._seed}-{self._submitted}")
                self._submitted += 1
                jobs.start_soon(self._run_attacked, uid, job)
            else:
                await self._watch.changes.next()

    async def _run_attacked(self, uid: str, job: Job) -> None:
        ending, expected = await self._run_job(uid, job), self._workload.expected[job.name]
        for line, other in zip(ending.samples, expected.samples, strict=True):
            assert line == other, f"{uid} has a sample that an undisturbed job has not: {line} instead of {other}"
        assert ending.trained == expected.trained, f"{uid} trained something else than an undisturbed job"
        self._report.jobs += 1

    async def _run_job(self, uid: str, job: Job) -> Ending:
        watch = self._watch.jobs.get(uid) or self._watch.follow(uid)
        await self._cluster.bus.publish(submission(job, uid))
        quiet_since, step = time.monotonic(), watch.step
        while not watch.outcome:
            with anyio.move_on_after(1.0):
                await self._watch.changes.next()
            if watch.step != step or self._busy:
                quiet_since, step = time.monotonic(), watch.step
            assert time.monotonic() - quiet_since < JOB_ENDS_S, f"{uid} makes no progress: step {step}, {watch.phase}"
        return await ending_of(self._cluster, uid, job)

    # --- faults ------------------------------------------------------------------------------------------------------

    async def _strike_all(self, plan: list[Planned]) -> None:
        lasting = asyncio.Semaphore(1 if self._alone else LASTING_AT_ONCE)
        async with anyio.create_task_group() as healing:
            for one in plan:
                await lasting.acquire()
                await asyncio.sleep(one.pause_s)
                attack, heal = await self._strike(one)
                healing.start_soon(self._heal, attack, heal, lasting)

    async def _strike(self, one: Planned) -> tuple[Attack, Healing | None]:
        """Strike at the planned moment, however many times it has to come until something alive is hit."""
        with anyio.fail_after(MOMENT_COMES_S):
            while True:
                job = await self._moment(one.moment)
                attack = Attack(self._cluster, self._watch, job, draw=self._draw, busy=self._busy)
                step, running = job.step, (await self._watch.owners(job.uid)).total()
                try:
                    if one.moment is Moment.GENERATING and not running:
                        raise Missed("nothing is claimed yet")
                    heal = await STRIKES[one.kind](attack)
                except Missed:
                    self._busy.discard(attack.target)
                    await asyncio.sleep(GLANCE_S)
                    continue
                self._report.struck.append(
                    Struck(time.monotonic() - self._began, one.kind, one.moment, job.uid, step, attack.target, running)
                )
                return attack, heal

    async def _moment(self, moment: Moment) -> JobWatch:
        """Wait until a job is in a moment."""
        while True:
            jobs = [job for job in self._watch.alive() if job.is_in(moment)]
            if jobs:
                return self._draw.choice(jobs)
            with anyio.move_on_after(GLANCE_S):
                await self._watch.changes.next()

    async def _heal(self, attack: Attack, heal: Healing | None, lasting: asyncio.Semaphore) -> None:
        starts = self._starts()
        if heal is not None:
            await heal()
        self._busy.discard(attack.target)
        if self._alone:
            await self._recovered()
            began_anew = [name for name, count in self._starts().items() if count > starts[name] and name != attack.target]
            self._report.struck[-1] = msgspec.structs.replace(self._report.struck[-1], began_anew=began_anew)
        lasting.release()

    def _starts(self) -> dict[str, int]:
        """How often each worker has been started."""
        return {one.name: one.starts for one in self._cluster.instances.values() if one.role != "scheduler"}

    async def _recovered(self) -> None:
        """Every job that is running now has come to a step after the one in which it is."""
        steps = {job.uid: job.step for job in self._watch.alive()}
        with anyio.fail_after(JOB_ENDS_S):
            while any(job.step <= steps.get(job.uid, -2) for job in self._watch.alive()):
                await self._watch.changes.next()


async def run_campaign(
    home: Path, workload: Workload, plan: list[Planned], *, seed: int, alone: bool = False, report: Report | None = None
) -> Report:
    """A whole campaign on a cluster of its own, with its files in ``home``; see :class:`Campaign`.

    Args:
        report: filled while it goes on, for who wants to know what a failed one had done.
    """
    report = report or Report()
    async with running_cluster(home, rollouts=workload.rollouts) as cluster:
        await Campaign(cluster, workload, seed=seed, alone=alone, report=report).run(plan)
    return report
