"""What comes in to the scheduler: everything that can change a decision, as plain immutable values.

The service turns messages, KV changes and the clock into these; a simulator or a test makes them up. Order matters and is
the order in which :meth:`services.scheduler.core.Scheduler.handle` gets them; every event may be repeated without harm.
"""

import msgspec

from libs.common import messages as m


class StateRestored(msgspec.Struct, frozen=True, kw_only=True):
    """What an earlier scheduler left behind; the first event of a scheduler's life.

    Attributes:
        term: of this scheduler's leadership; its revisions are higher than those of any term before it.
        ended: terminal events already published of jobs whose record doesn't say so yet: the ending was cut short.
    """

    term: int = 0
    jobs: tuple[m.JobRecord, ...] = ()
    allocations: tuple[m.Allocation, ...] = ()
    progress: tuple[m.JobProgress, ...] = ()
    workers: tuple[m.Worker, ...] = ()
    ended: tuple[m.JobEnded, ...] = ()


class JobSubmitted(msgspec.Struct, frozen=True):
    """A user hands in a job."""

    submission: m.SubmitJob


class CancelRequested(msgspec.Struct, frozen=True):
    """A user wants a job ended."""

    job_uid: str
    reason: str


class TrainingFinished(msgspec.Struct, frozen=True, kw_only=True):
    """An incarnation of the trainer instance ``trainer`` is done with a job."""

    job_uid: str
    trainer: str
    incarnation: int
    outcome: m.Outcome
    reason: str


class WorkerSeen(msgspec.Struct, frozen=True):
    """A worker's presence, first or renewed."""

    worker: m.Worker


class WorkerLeft(msgspec.Struct, frozen=True):
    """A worker took its presence back."""

    instance: str


class ProgressSeen(msgspec.Struct, frozen=True):
    """Where a job's step loop is."""

    progress: m.JobProgress


class TelemetrySeen(msgspec.Struct, frozen=True):
    """A report of what a worker is doing; any of them may be lost."""

    report: m.SubStageEntered | m.RolloutWindow | m.TrainerWindow


class Tick(msgspec.Struct, frozen=True):
    """Time has passed. Must come at least every :data:`services.scheduler.clock.LONGEST_GAP_S`."""


Event = (
    StateRestored
    | JobSubmitted
    | CancelRequested
    | TrainingFinished
    | WorkerSeen
    | WorkerLeft
    | ProgressSeen
    | TelemetrySeen
    | Tick
)
