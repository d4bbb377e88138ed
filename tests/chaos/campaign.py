"""A series of faults on a running cluster: drawn from a seed, struck at chosen moments, recorded, and judged at the end.

The same seed strikes in the same order at the same moments of a step; when exactly a moment comes is the machine's affair.
"""

import asyncio
import random
import time
from pathlib import Path

import anyio
import msgspec
import psutil
from anyio.abc import TaskGroup

from libs.common import messages as m
from libs.common.job import Job
from tests.chaos.attack import Attack, Kind, Missed
from tests.chaos.cluster import Cluster, running_cluster
from tests.chaos.faults import STRIKES, Healing
from tests.chaos.invariants import Ending, check_cancelled, check_nothing_left, check_same_samples, ended, ending_of
from tests.chaos.jobs import submission
from tests.chaos.plan import Planned
from tests.chaos.watch import GENERATES, JobWatch, Moment, Watch
from tests.chaos.witness import Testimony

LASTING_AT_ONCE = 4
GLANCE_S = 0.01
MOMENT_COMES_S = 120.0
JOB_ENDS_S = 90.0
SEEN_RUNNING = 0.5
"""Share of all trajectories that the witness must see before they have ended. Some are only a checkpoint long."""


class Struck(msgspec.Struct, frozen=True):
    """A fault that struck live work.

    Attributes:
        at_s: since the campaign began. job, step: whose work it was. target: who was struck.
        running: trajectories of that job that were running then; where a rollout instance was struck, on that one.
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
    """What came of a campaign.

    Attributes:
        jobs, cancelled: how many have succeeded, and how many were cancelled.
        testimony: what the witness of the store has seen.
    """

    struck: list[Struck] = []
    jobs: int = 0
    cancelled: int = 0
    seconds: float = 0.0
    testimony: Testimony = Testimony()

    def cells(self) -> set[tuple[Kind, Moment]]:
        """Which kinds struck at which moments."""
        return {(one.kind, one.moment) for one in self.struck}

    def check(self) -> None:
        """That the campaign was one: its faults have hit what they are for, and the witness has seen what it is for.

        Raises:
            AssertionError: it wasn't.
        """
        idle = [one for one in self.struck if one.moment in GENERATES and not one.running]
        assert not idle, f"nothing was running where it was struck: {idle}"
        told = self.testimony
        assert told.running >= SEEN_RUNNING * told.seen, f"the witness saw too few trajectories while they ran: {told}"
        assert told.grown >= told.running, f"the witness saw too few trajectories grow: {told}"


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
            self._report.seconds, self._report.testimony = time.monotonic() - self._began, self._watch.witness.testimony
        assert not self._watch.witness.broken, self._watch.witness.broken
        self._report.check()

    # --- jobs --------------------------------------------------------------------------------------------------------

    async def _run_undisturbed(self) -> None:
        """Each job left alone, if it isn't known yet how it ends then."""

        async def one(job: Job) -> None:
            uid = f"undisturbed-{job.name}"
            await self._run_job(uid, job)
            self._workload.expected[job.name] = await ending_of(self._cluster, uid, job)

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
        await self._run_job(uid, job)
        outcome, may_end = (await ended(self._cluster, uid)).outcome, self._watch.jobs[uid].may_end
        assert outcome in may_end, f"{uid} {outcome} where it may only have {' or '.join(may_end)}"
        expected = self._workload.expected[job.name]
        if outcome is m.Outcome.CANCELLED:
            check_cancelled(self._cluster, uid, expected)
            self._report.cancelled += 1
            return
        ending = await ending_of(self._cluster, uid, job)
        check_same_samples(uid, ending.samples, expected.samples)
        assert ending.trained == expected.trained, f"{uid} trained something else than an undisturbed job"
        self._report.jobs += 1

    async def _run_job(self, uid: str, job: Job) -> None:
        """Hand a job in, and wait until it has ended."""
        watch = self._watch.jobs.get(uid) or self._watch.follow(uid)
        await self._cluster.bus.publish(submission(job, uid))
        quiet_since, step = time.monotonic(), watch.step
        while not watch.outcome:
            with anyio.move_on_after(1.0):
                await self._watch.changes.next()
            if watch.step != step or self._busy:
                quiet_since, step = time.monotonic(), watch.step
            assert time.monotonic() - quiet_since < JOB_ENDS_S, f"{uid} makes no progress: step {step}, {watch.phase}"

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
                step, running = job.step, (await self._watch.owners(job.uid)).total()
                attack = Attack(
                    self._cluster, self._watch, job, moment=one.moment, running=running, draw=self._draw, busy=self._busy
                )
                try:
                    if one.moment in GENERATES and not running:
                        raise Missed("nothing is claimed")
                    heal = await STRIKES[one.kind](attack)
                except (Missed, psutil.NoSuchProcess):  # or it has died just now
                    self._busy.discard(attack.target)
                    await asyncio.sleep(GLANCE_S)
                    continue
                at_s, target, running = time.monotonic() - self._began, attack.target, attack.running
                self._report.struck.append(Struck(at_s, one.kind, one.moment, job.uid, step, target, running))
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
