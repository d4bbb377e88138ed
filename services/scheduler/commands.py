"""What goes out of the scheduler: effects that the service carries out in order, each safe to repeat."""

import msgspec

from libs.common import messages as m

REFUSED = "decision_refused"
"""The note of a plan that broke a rule: a bug in a policy, whose plan hasn't taken effect."""


class PutJob(msgspec.Struct, frozen=True):
    """Make a job's record visible."""

    record: m.JobRecord


class CreateConsumers(msgspec.Struct, frozen=True):
    """Make the durable consumers through which a job's tasks and settled trajectories are pulled."""

    job_uid: str


class PutAllocation(msgspec.Struct, frozen=True):
    """Tell an instance what it may use for a job."""

    allocation: m.Allocation


class DropAllocation(msgspec.Struct, frozen=True):
    """Take a job off an instance."""

    instance: str
    job_uid: str


class PublishDecision(msgspec.Struct, frozen=True):
    """Tell observers what was decided."""

    decision: m.Decision


class PublishEnded(msgspec.Struct, frozen=True):
    """Publish the one terminal event of a job."""

    ended: m.JobEnded


class CleanUpJob(msgspec.Struct, frozen=True):
    """Drop an ended job's consumers, messages and trajectories."""

    job_uid: str


class ForgetWorker(msgspec.Struct, frozen=True):
    """Remove the presence of a worker that is gone without having said so."""

    instance: str


class Note(msgspec.Struct, frozen=True):
    """A line for the log: something was ignored or looks odd."""

    text: str
    fields: dict[str, str] = {}


Command = (
    PutJob
    | CreateConsumers
    | PutAllocation
    | DropAllocation
    | PublishDecision
    | PublishEnded
    | CleanUpJob
    | ForgetWorker
    | Note
)
