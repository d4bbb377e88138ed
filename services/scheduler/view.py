"""What a policy sees: an immutable snapshot of devices, workers, jobs and what is in force.

Only workers that can take work are in it: a worker that is gone or draining isn't.
"""

from collections.abc import Mapping

import msgspec

from libs.common import messages as m


class DeviceView(msgspec.Struct, frozen=True):
    """A device: its units are ``0 .. units - 1``."""

    id: str
    units: int
    memory_mb: int


class WorkerView(msgspec.Struct, frozen=True):
    """An instance that can take work, with at most ``max_units`` units over all its jobs.

    ``broken`` says, by job, why it can't compute one: units for that would be wasted.
    """

    instance: str
    role: m.Role
    device: str
    max_units: int
    broken: dict[str, str] = {}


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job that is queued or running.

    Attributes:
        order: place in the order of submission.
        phase: the stage it is in; STARTING while no trainer runs it.
        granted_phase: the one its allocations in force were made for; None if unknown.
        begun: whether it has ever been past STARTING.
        trainer: the instance that runs its step loop; "" when it has none, or that one can't take work.
        trajectories: of one training step. max_running: of them in one engine's batch.
        progress: the last word of its trainer.
    """

    uid: str
    state: m.JobState
    order: int
    priority: int
    phase: m.Phase
    granted_phase: m.Phase | None
    begun: bool
    trainer: str
    trajectories: int
    max_running: int
    progress: m.JobProgress | None

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts jobs by whose turn it is: higher priority first, then earlier submission."""
        return -self.priority, self.order


class Activity(msgspec.Struct, frozen=True):
    """What an instance was last heard doing for a job; telemetry may be lost, so it may be old.

    Attributes:
        sub_stage: the label last entered. windows: the last reports, oldest first. heard_s: steady time of the last one.
    """

    sub_stage: m.SubStage
    windows: tuple[m.RolloutWindow | m.TrainerWindow, ...]
    heard_s: float


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The whole situation at one decision.

    Attributes:
        steady_s: time in seconds that only goes forward. revision: of the last decision.
        devices, workers, jobs: by id, in the order of their ids (jobs: of submission).
        allocations: in force, by (instance, job). activity: telemetry, by (instance, job).
    """

    steady_s: float
    revision: int
    devices: Mapping[str, DeviceView]
    workers: Mapping[str, WorkerView]
    jobs: Mapping[str, JobView]
    allocations: Mapping[tuple[str, str], m.Allocation]
    activity: Mapping[tuple[str, str], Activity]

    def running(self) -> list[JobView]:
        """Admitted jobs, by whose turn it is."""
        return sorted((job for job in self.jobs.values() if job.state is m.JobState.RUNNING), key=_rank)

    def queued(self) -> list[JobView]:
        """Jobs that wait for admission, by whose turn it is."""
        return sorted((job for job in self.jobs.values() if job.state is m.JobState.QUEUED), key=_rank)

    def with_role(self, role: m.Role) -> list[WorkerView]:
        """Workers of one role, by instance id."""
        return [worker for worker in self.workers.values() if worker.role is role]


def _rank(job: JobView) -> tuple[int, int]:
    return job.rank
