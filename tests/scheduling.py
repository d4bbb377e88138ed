"""A world for the scheduler's tests: builders, and the state that its commands add up to, as KV would hold it."""

import msgspec

from libs.common import messages as m
from libs.common.job import Job, job_from
from services.scheduler import commands as c
from services.scheduler import events as e
from services.scheduler.core import Limits, Scheduler
from services.scheduler.policies.registry import policy_named

START = 1_000_000.0


def job(name: str = "job", *, priority: int = 0, batch: int = 4, group: int = 4, max_running: int = 64) -> Job:
    """A job that needs nothing but a scheduler."""
    raw = {
        "name": name,
        "model": {"path": "tiny"},
        "data": {"task": "products"},
        "rollout": {"batch": batch, "group": group, "max_running": max_running, "deadline_s": 20},
        "schedule": {"priority": priority},
    }
    return job_from(raw, file="test")


def submit(uid: str, *, priority: int = 0, max_running: int = 64) -> e.JobSubmitted:
    """A job handed in."""
    what = job(uid, priority=priority, max_running=max_running)
    return e.JobSubmitted(m.SubmitJob(sender="cli", job_uid=uid, job=what, submitted_at=START))


def worker(instance: str, role: m.Role, *, device: str = "cpu", units: int = 2, max_units: int | None = None) -> m.Worker:
    """Presence: a trainer can use the whole device, a rollout worker one unit, unless told otherwise."""
    most = max_units or (units if role is m.Role.TRAINER else 1)
    return m.Worker(sender=instance, role=role, device=device, units=units, max_units=most, memory_mb=8000, started_at=START)


def progress(
    uid: str, phase: m.Phase, *, trainer: str = "t0", incarnation: int = 1, step: int = 0, settled: int = 0
) -> e.ProgressSeen:
    """A trainer's word."""
    told = m.JobProgress(
        sender=trainer,
        job_uid=uid,
        incarnation=incarnation,
        phase=phase,
        step=step,
        steps=10,
        settled=settled,
        expected=16,
    )
    return e.ProgressSeen(told)


def trained(
    uid: str, *, trainer: str = "t0", incarnation: int = 1, outcome: m.Outcome = m.Outcome.SUCCEEDED
) -> e.TrainingFinished:
    """A trainer's last word."""
    return e.TrainingFinished(job_uid=uid, trainer=trainer, incarnation=incarnation, outcome=outcome, reason="")


class World:
    """A scheduler, and everything that its commands have put where others see it."""

    def __init__(self, policy: str = "sequential", limits: Limits | None = None) -> None:
        self.policy, self.limits, self.now = policy, limits or Limits(), START
        self.jobs: dict[str, m.JobRecord] = {}
        self.allocations: dict[tuple[str, str], m.Allocation] = {}
        self.workers: dict[str, m.Worker] = {}
        self.progress: dict[str, m.JobProgress] = {}
        self.ended: dict[str, m.JobEnded] = {}
        self.consumers: set[str] = set()
        self.decisions: list[m.Decision] = []
        self.notes: list[str] = []
        self.log: list[c.Command] = []
        self.highest = 0
        self.refusals_expected = False
        self.scheduler = self._new()

    def _new(self) -> Scheduler:
        return Scheduler(instance="scheduler-0", policy=policy_named(self.policy), limits=self.limits)

    def send(self, *events: e.Event, after_s: float = 0.0) -> list[c.Command]:
        """Let time pass, hand events in, apply what comes out; returns the commands of the last event."""
        self.now += after_s
        self.log = []
        for event in events:
            match event:
                case e.WorkerSeen(worker=seen):
                    self.workers[seen.sender] = seen
                case e.WorkerLeft(instance=instance):
                    self.workers.pop(instance, None)
                case e.ProgressSeen(progress=told):
                    self.progress[told.job_uid] = told
            self.log = self.scheduler.handle(event, self.now)
            for command in self.log:
                self._apply(command)
        return self.log

    def restart(self, policy: str | None = None, *, term: int = 0) -> list[c.Command]:
        """A new scheduler, leading in ``term``, that knows only what is stored."""
        self.policy = policy or self.policy
        self.scheduler = self._new()
        return self.send(
            e.StateRestored(
                term=term,
                jobs=tuple(self.jobs.values()),
                allocations=tuple(self.allocations.values()),
                progress=tuple(self.progress.values()),
                workers=tuple(self.workers.values()),
                ended=tuple(ended for uid, ended in self.ended.items() if self.jobs[uid].state is not m.JobState.ENDED),
            )
        )

    def wait(self, seconds: int, *, heard: bool = True, tick_s: int = 1) -> None:
        """Tick now and then; workers are heard of all the while, unless told otherwise."""
        for _ in range(0, seconds, tick_s):
            self.send(e.Tick(), after_s=tick_s)
            if heard:
                self.send(*[e.WorkerSeen(present) for present in self.workers.values()])

    def units(self, uid: str) -> dict[str, tuple[int, ...]]:
        """A job's units by instance, paused ones included."""
        return {instance: held.units for (instance, job_uid), held in sorted(self.allocations.items()) if job_uid == uid}

    def running(self) -> list[str]:
        """Jobs that run."""
        return [uid for uid, record in self.jobs.items() if record.state is m.JobState.RUNNING]

    def _apply(self, command: c.Command) -> None:
        match command:
            case c.PutJob(record=record):
                self.jobs[record.job_uid] = record
            case c.CreateConsumers(job_uid=uid):
                self.consumers.add(uid)
            case c.CleanUpJob(job_uid=uid):
                self.consumers.discard(uid)
            case c.PutAllocation(allocation=new):
                key = new.instance, new.job_uid
                old = self.allocations.get(key)
                assert old is None or new.revision > old.revision
                assert self.jobs[new.job_uid].state is m.JobState.RUNNING
                self.allocations[key] = new
                self.highest = max(self.highest, new.revision)
            case c.DropAllocation(instance=instance, job_uid=uid):
                del self.allocations[instance, uid]
            case c.PublishDecision(decision=decision):
                self.decisions.append(decision)
            case c.PublishEnded(ended=ended):
                first = self.ended.setdefault(ended.job_uid, ended)
                assert first.outcome is ended.outcome
            case c.ForgetWorker(instance=instance):
                self.workers.pop(instance, None)
            case c.Note(text=text, fields=fields):
                assert text != c.REFUSED or self.refusals_expected, fields
                self.notes.append(text)


def two_cores(policy: str = "sequential", limits: Limits | None = None) -> World:
    """One device of two units with a trainer and two rollout workers."""
    world = World(policy, limits)
    present = [worker("r0", m.Role.ROLLOUT), worker("r1", m.Role.ROLLOUT), worker("t0", m.Role.TRAINER)]
    world.send(*[e.WorkerSeen(some) for some in present])
    return world


def draining(some: m.Worker) -> m.Worker:
    """The same worker as it leaves."""
    return msgspec.structs.replace(some, draining=True)
