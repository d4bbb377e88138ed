"""The life of one job in the scheduler: queued, running, ended, and nothing else.

A transition that isn't in the table raises with the job's recent history, because it means that the scheduler or a trainer
is confused, and the way there is what one needs to know.
"""

from collections import deque

import msgspec

from libs.common import messages as m
from libs.common.errors import TransitionError
from services.scheduler.view import JobView

HISTORY = 32

_ALLOWED = frozenset(
    {
        (m.JobState.QUEUED, m.JobState.RUNNING),
        (m.JobState.QUEUED, m.JobState.ENDED),
        (m.JobState.RUNNING, m.JobState.ENDED),
    }
)


class JobEntry:
    """What the scheduler knows of a job that is queued or running.

    Attributes:
        incarnation: the latest that a trainer of it has told of, whichever trainer that was.
        quiet_since_s: since when it holds units without any change of its progress; None while it holds none.
        alone_since_s: since when it runs without any rollout worker, or any trainer, in the cluster; None otherwise.
    """

    def __init__(self, record: m.JobRecord, *, order: int) -> None:
        self.record, self.order = record, order
        self.phase, self.begun = m.Phase.STARTING, False
        self.granted_phase: m.Phase | None = None
        self.progress: m.JobProgress | None = None
        self.incarnation = 0
        self.quiet_since_s: float | None = None
        self.alone_since_s: float | None = None
        self._history: deque[str] = deque(maxlen=HISTORY)

    @property
    def uid(self) -> str:
        """The job's id."""
        return self.record.job_uid

    @property
    def running(self) -> bool:
        """Whether it has been admitted."""
        return self.record.state is m.JobState.RUNNING

    def is_held_by(self, trainer: str, incarnation: int) -> bool:
        """Whether nobody has replaced a trainer that speaks: no other instance, and no later life of its own."""
        return trainer == self.record.trainer and incarnation >= self.incarnation

    def remember(self, what: str, steady_s: float) -> None:
        """Add a line to the job's history."""
        self._history.append(f"{steady_s:.1f} s: {what}")

    def admit(self, trainer: str, steady_s: float) -> m.JobRecord:
        """QUEUED to RUNNING, its step loop on ``trainer``; returns the new record."""
        self._move(m.JobState.RUNNING, f"admitted, trainer {trainer}", steady_s)
        self.record = msgspec.structs.replace(self.record, state=m.JobState.RUNNING, trainer=trainer)
        return self.record

    def end(self, outcome: m.Outcome, *, reason: str, ended_at: float, steady_s: float) -> m.JobRecord:
        """To ENDED; returns the last record."""
        self._move(m.JobState.ENDED, f"{outcome}: {reason}", steady_s)
        self.record = msgspec.structs.replace(
            self.record, state=m.JobState.ENDED, outcome=outcome, reason=reason, ended_at=ended_at
        )
        return self.record

    def finish(self, outcome: m.Outcome, *, reason: str, ended_at: float, steady_s: float) -> m.JobRecord:
        """RUNNING to ENDED, because its trainer says so; a job that never ran can't have been trained."""
        if not self.running:
            raise self._refused(f"its trainer says {outcome}")
        return self.end(outcome, reason=reason, ended_at=ended_at, steady_s=steady_s)

    def move_to(self, trainer: str, steady_s: float) -> m.JobRecord:
        """Its step loop starts again on another trainer; returns the new record."""
        if not self.running:
            raise self._refused(f"move to trainer {trainer}")
        self.remember(f"moved from trainer {self.record.trainer} to {trainer}", steady_s)
        self.record = msgspec.structs.replace(self.record, trainer=trainer)
        self.phase = m.Phase.STARTING
        return self.record

    def heard(self, progress: m.JobProgress, steady_s: float) -> bool:
        """Note progress from the job's trainer; whether the phase changed."""
        if progress != self.progress and self.quiet_since_s is not None:
            self.quiet_since_s = steady_s
        changed = progress.phase is not self.phase
        if changed:
            self.remember(f"step {progress.step}: {self.phase} to {progress.phase}", steady_s)
        self.progress, self.phase = progress, progress.phase
        self.begun = self.begun or progress.phase is not m.Phase.STARTING
        return changed

    def worked(self, steady_s: float) -> None:
        """Note that one of its workers did something, which is progress even while a long step looks still."""
        if self.quiet_since_s is not None:
            self.quiet_since_s = steady_s

    def holds_units(self, holds: bool, steady_s: float) -> None:
        """Start, keep or stop the clock of its silence."""
        if not holds:
            self.quiet_since_s = None
        elif self.quiet_since_s is None:
            self.quiet_since_s = steady_s

    def patience_s(self, stall_s: float) -> float:
        """For how long it may be silent: at least as long as one of its trajectories may wait for a tool, and be scored."""
        job = self.record.job
        if self.phase is m.Phase.ROLLOUT:
            return max(stall_s, job.rollout.deadline_s + job.reward.timeout_s)
        return stall_s

    def is_alone(self, alone: bool, steady_s: float) -> None:
        """Start, keep or stop the clock of its loneliness."""
        if not alone:
            self.alone_since_s = None
        elif self.alone_since_s is None:
            self.alone_since_s = steady_s

    def view(self, *, trainer_usable: bool) -> JobView:
        """The job as a policy sees it."""
        job = self.record.job
        return JobView(
            uid=self.uid,
            state=self.record.state,
            order=self.order,
            priority=job.schedule.priority,
            phase=self.phase if trainer_usable else m.Phase.STARTING,
            granted_phase=self.granted_phase,
            begun=self.begun,
            trainer=self.record.trainer if trainer_usable else "",
            trajectories=job.rollout.batch * job.rollout.group,
            max_running=job.rollout.max_running,
            progress=self.progress,
        )

    def _move(self, to: m.JobState, why: str, steady_s: float) -> None:
        if (self.record.state, to) not in _ALLOWED:
            raise self._refused(why)
        self.remember(f"{self.record.state} to {to}: {why}", steady_s)

    def _refused(self, what: str) -> TransitionError:
        past = "; ".join(self._history) or "nothing"
        return TransitionError(f"job {self.uid} is {self.record.state}, which doesn't allow: {what} (history: {past})")
