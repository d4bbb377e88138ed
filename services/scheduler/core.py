"""The scheduler: a pure state machine, events in, commands out.

No I/O, no clock, no randomness: the same events give the same commands, in production, in tests and under a simulator's
clock. Every event may be repeated. After each event that can change a decision the policy is asked once, its plan is checked
against the rules, and only then does anything change; so the state is always one that keeps them.

Invariants: an ended job holds nothing and gets exactly one terminal event; allocations in force are exactly those of the
last plan; revisions only grow.
"""

from typing import assert_never

import msgspec

from libs.common import messages as m
from libs.common.errors import RuleViolation
from services.scheduler import commands as c
from services.scheduler import events as e
from services.scheduler.allocations import Allocations, by_device, changes, complete
from services.scheduler.clock import SteadyClock
from services.scheduler.jobs import JobEntry
from services.scheduler.policies.policy import Plan, Policy
from services.scheduler.rules import Proposal, check
from services.scheduler.telemetry import Telemetry, does_work
from services.scheduler.view import View
from services.scheduler.workers import Workers

SWEPT = 10
"""A job that ended so many sweeps' waits ago is taken to be swept: one of all leaders since has lived for long enough."""

REVISIONS_PER_TERM = 10**9
"""A term's revisions begin at its number times this, so that they can be read: 3000000017 is the 17th of the third term."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """When the scheduler loses patience, in seconds.

    Attributes:
        worker_lost_s: a worker not heard for this long is gone.
        no_worker_s: a running job fails after this long without any rollout worker, or any trainer.
        stall_s: a job fails after holding units this long without any change of its progress.
        sweep_s: an ended job is cleaned up once more after this long, for what its workers still wrote as they stopped.
    """

    worker_lost_s: float = 10.0
    no_worker_s: float = 120.0
    stall_s: float = 900.0
    sweep_s: float = 30.0


class Scheduler:
    """Which jobs run, where, and with how many units.

    Args:
        instance: id that its messages carry.
        policy: divides the devices.
    """

    def __init__(self, *, instance: str, policy: Policy, limits: Limits | None = None) -> None:
        self._instance, self._policy, self._limits = instance, policy, limits or Limits()
        self._clock, self._workers, self._telemetry = SteadyClock(), Workers(), Telemetry()
        self._jobs: dict[str, JobEntry] = {}
        self._ended: set[str] = set()
        self._sweeps: dict[str, float] = {}
        self._allocations: Allocations = {}
        self._submitted = 0
        self._first_revision = self._revision = 0
        self._news: list[str] = []

    def handle(self, event: e.Event, now: float) -> list[c.Command]:
        """Take one event in, at wall-clock time ``now`` (s); returns what to do about it, in order.

        A plan that breaks a rule is a bug in a policy: it is noted, and what was in force stays so.

        Raises:
            TransitionError: a job can't go where the event says; nothing has changed.
        """
        self._clock.advance(now)
        self._news.clear()
        held = self._allocations
        done = self._take(event, now)
        if self._news:
            try:
                done += self._decide(held, now)
            except RuleViolation as error:
                done.append(c.Note(c.REFUSED, {"reason": str(error)}))
        return done

    @property
    def _now_s(self) -> float:
        return self._clock.steady_s

    def _take(self, event: e.Event, now: float) -> list[c.Command]:
        match event:
            case e.StateRestored():
                return self._restore(event, now)
            case e.JobSubmitted(submission=submission):
                return self._submit(submission)
            case e.CancelRequested(job_uid=uid, reason=reason):
                return self._cancel(uid, reason, now=now)
            case e.TrainingFinished():
                return self._finish(event, now)
            case e.WorkerSeen(worker=worker):
                if self._workers.seen(worker, self._now_s):
                    self._news.append(f"{worker.sender} {'drains' if worker.draining else 'is here'}")
                return []
            case e.WorkerLeft(instance=instance):
                self._lose(instance, "left")
                return []
            case e.ProgressSeen(progress=progress):
                return self._progress(progress)
            case e.TelemetrySeen(report=report):
                if report.sender in self._workers and report.job_uid in self._jobs:
                    self._telemetry.note(report, self._now_s)
                    if does_work(report):
                        self._jobs[report.job_uid].worked(self._now_s)
                return []
            case e.Tick():
                return self._tick(now)
            case _:
                assert_never(event)

    # --- what came in ----------------------------------------------------------------------------------------------

    def _restore(self, event: e.StateRestored, now: float) -> list[c.Command]:
        """Begin where an earlier scheduler stopped, finishing what it was in the middle of."""
        done: list[c.Command] = []
        for record in sorted(event.jobs, key=lambda record: (record.submitted_at, record.job_uid)):
            if record.state is m.JobState.ENDED:
                self._ended.add(record.job_uid)
                age_s, sweep_s = now - (record.ended_at or 0.0), self._limits.sweep_s
                if age_s < SWEPT * sweep_s:  # those before may not have come to it, however many there were
                    self._sweeps[record.job_uid] = self._now_s + max(0.0, sweep_s - age_s)
            else:
                self._add(record)
        self._allocations = {(a.instance, a.job_uid): a for a in event.allocations}
        seen = [a.revision for a in event.allocations]
        for worker in event.workers:
            self._workers.seen(worker, self._now_s)
            seen += worker.revisions.values()
        self._first_revision = event.term * REVISIONS_PER_TERM
        self._revision = max([self._first_revision, *seen])
        for progress in event.progress:
            done += self._progress(progress)
        for ended in event.ended:
            if ended.job_uid in self._jobs:
                done += self._end(ended.job_uid, ended.outcome, reason=ended.reason, now=ended.ended_at)
        self._news[:] = ["scheduler started"]
        return done

    def _submit(self, submission: m.SubmitJob) -> list[c.Command]:
        if submission.job_uid in self._jobs or submission.job_uid in self._ended:
            return [c.Note("duplicate_job_ignored", {"job_uid": submission.job_uid})]
        record = m.JobRecord(
            sender=self._instance,
            job_uid=submission.job_uid,
            job=submission.job,
            state=m.JobState.QUEUED,
            submitted_at=submission.submitted_at,
            blobs=submission.blobs,
        )
        self._add(record)
        self._news.append(f"{record.job_uid} submitted")
        return [c.PutJob(record)]

    def _add(self, record: m.JobRecord) -> None:
        entry = JobEntry(record, order=self._submitted)
        entry.remember(f"known as {record.state}", self._now_s)
        self._jobs[record.job_uid] = entry
        self._submitted += 1

    def _cancel(self, uid: str, reason: str, *, now: float) -> list[c.Command]:
        if uid not in self._jobs:
            return [c.Note("cancel_ignored", {"job_uid": uid, "why": "ended" if uid in self._ended else "unknown"})]
        return self._end(uid, m.Outcome.CANCELLED, reason=reason, now=now)

    def _finish(self, event: e.TrainingFinished, now: float) -> list[c.Command]:
        entry = self._jobs.get(event.job_uid)
        if entry is None or (entry.running and not entry.is_held_by(event.trainer, event.incarnation)):
            about = {"job_uid": event.job_uid, "trainer": event.trainer, "incarnation": str(event.incarnation)}
            return [c.Note("training_end_ignored", about)]
        entry.finish(event.outcome, reason=event.reason, ended_at=now, steady_s=self._now_s)
        return self._ending(entry)

    def _progress(self, progress: m.JobProgress) -> list[c.Command]:
        entry = self._jobs.get(progress.job_uid)
        if entry is None or not entry.running:
            return []
        entry.incarnation = max(entry.incarnation, progress.incarnation)
        if progress.sender != entry.record.trainer:
            return [c.Note("progress_ignored", {"job_uid": progress.job_uid, "trainer": progress.sender})]
        if entry.heard(progress, self._now_s):
            self._news.append(f"{entry.uid} enters {progress.phase}")
        return []

    def _lose(self, instance: str, how: str) -> None:
        if self._workers.left(instance):
            self._telemetry.forget(instance=instance)
            self._news.append(f"{instance} {how}")

    def _tick(self, now: float) -> list[c.Command]:
        """Everything that happens because time passes."""
        done: list[c.Command] = []
        for instance in self._workers.silent(self._now_s, self._limits.worker_lost_s):
            self._lose(instance, "is gone")
            done.append(c.ForgetWorker(instance))
        for entry in list(self._jobs.values()):
            if reason := self._given_up(entry):
                done += self._end(entry.uid, m.Outcome.FAILED, reason=reason, now=now)
        for uid in [uid for uid, due_s in self._sweeps.items() if self._now_s >= due_s]:
            del self._sweeps[uid]
            done.append(c.CleanUpJob(uid))
        return done

    def _given_up(self, entry: JobEntry) -> str:
        """Why a job is to fail now, or ""."""
        missing = [role for role in m.Role if not self._workers.has(role)]
        entry.is_alone(entry.running and bool(missing), self._now_s)
        if reason := self._broken(entry.uid):
            return f"no worker can run it: {reason}"
        if entry.alone_since_s is not None and self._now_s - entry.alone_since_s > self._limits.no_worker_s:
            return f"no {' and no '.join(missing)} worker for {self._limits.no_worker_s:.0f} s"
        patience_s = entry.patience_s(self._limits.stall_s)
        if entry.quiet_since_s is not None and self._now_s - entry.quiet_since_s > patience_s:
            return f"no progress for {patience_s:.0f} s in {entry.phase}"
        return ""

    def _broken(self, uid: str) -> str:
        """Why nobody who holds a job in one of the roles can compute it, or ""."""
        workers = self._workers.views()
        holders = [workers[instance] for instance, held in self._allocations if held == uid and instance in workers]
        for role in m.Role:
            reasons = [holder.broken.get(uid, "") for holder in holders if holder.role is role]
            if reasons and all(reasons):
                return reasons[0]
        return ""

    # --- a job's end -----------------------------------------------------------------------------------------------

    def _end(self, uid: str, outcome: m.Outcome, *, reason: str, now: float) -> list[c.Command]:
        entry = self._jobs[uid]
        entry.end(outcome, reason=reason, ended_at=now, steady_s=self._now_s)
        return self._ending(entry)

    def _ending(self, entry: JobEntry) -> list[c.Command]:
        """The terminal event first, the record last: one cut short in between is seen, and done again, at the next start."""
        uid, record = entry.uid, entry.record
        del self._jobs[uid]
        self._ended.add(uid)
        self._telemetry.forget(job_uid=uid)
        held = sorted(key for key in self._allocations if key[1] == uid)
        self._allocations = {key: a for key, a in self._allocations.items() if key[1] != uid}
        self._sweeps[uid] = self._now_s + self._limits.sweep_s
        self._news.append(f"{uid} {record.outcome}")
        ended = m.JobEnded(
            sender=self._instance,
            job_uid=uid,
            outcome=record.outcome or m.Outcome.FAILED,
            reason=record.reason,
            ended_at=record.ended_at or 0.0,
        )
        drops = [c.DropAllocation(*key) for key in held]
        return [c.PublishEnded(ended), *drops, c.CleanUpJob(uid), c.PutJob(record)]

    # --- a decision ------------------------------------------------------------------------------------------------

    def view(self) -> View:
        """The situation as a policy sees it now."""
        workers = self._workers.views()
        return View(
            steady_s=self._now_s,
            revision=self._revision,
            devices=self._workers.devices(),
            workers=workers,
            jobs={uid: entry.view(trainer_usable=entry.record.trainer in workers) for uid, entry in self._jobs.items()},
            allocations=dict(self._allocations),
            activity=self._telemetry.snapshot(),
        )

    def _decide(self, held: Allocations, now: float) -> list[c.Command]:
        """Ask the policy and put its plan in force; ``held`` is what was in force before the event."""
        view = self.view()
        plan = self._policy.decide(view)
        revision = self._revision + 1
        after = complete(plan, view, sender=self._instance, revision=revision, since=self._first_revision)
        check(Proposal(view, plan, after, revision))
        done = self._place(plan)
        moves = changes(self._allocations, after)
        before, self._allocations = held | self._allocations, after
        for entry in self._jobs.values():
            entry.granted_phase = view.jobs[entry.uid].phase
            entry.holds_units(any(a.units for (_, uid), a in after.items() if uid == entry.uid), self._now_s)
        if before == after:
            return done
        self._revision = revision
        decision = m.Decision(
            sender=self._instance,
            device="",
            revision=revision,
            policy=self._policy.name,
            reason=f"{'; '.join(self._news)}: {plan.reason}",
            grants={},
            decided_at=now,
        )
        told = [c.PublishDecision(part) for part in by_device(decision, view, before=before, after=after)]
        return [*done, *moves, *told]

    def _place(self, plan: Plan) -> list[c.Command]:
        done: list[c.Command] = []
        for placement in plan.placements:
            entry = self._jobs[placement.job_uid]
            if entry.running:
                done.append(c.PutJob(entry.move_to(placement.trainer, self._now_s)))
            else:
                done += [c.CreateConsumers(entry.uid), c.PutJob(entry.admit(placement.trainer, self._now_s))]
        return done
