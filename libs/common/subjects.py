"""Where every message travels: the one table of subject, type, stream, deduplication and consumer.

Services never spell a subject; they publish a message and the table says where it goes, and they subscribe by naming a
message type. Stream definitions are derived from here too.
"""

import msgspec

from libs.common import messages as m

Attributes = tuple[str, ...]


class Route(msgspec.Struct, frozen=True):
    """How one message type travels.

    Attributes:
        pattern: the subject, with ``{attribute}`` of the message filled in.
        stream: the JetStream stream that keeps it, or None for core NATS (may be lost).
        once_by: attributes that make up ``Nats-Msg-Id``; repeats within the stream's window are dropped.
    """

    pattern: str
    stream: str | None = None
    once_by: Attributes = ()


class Stream(msgspec.Struct, frozen=True):
    """A JetStream stream: its subjects, and how long a message stays.

    Attributes:
        work_queue: a message goes once it is acknowledged. one_per_subject: a second one is refused.
    """

    name: str
    subjects: tuple[str, ...]
    work_queue: bool = False
    one_per_subject: bool = False
    max_messages: int = 1_000_000
    max_age_s: float = 0.0


_TRY: Attributes = ("job_uid", "group", "sample", "sender", "attempt")

ROUTES: dict[type[m.Message], Route] = {
    m.SubmitJob: Route("jobs.submit", "JOBS", ("job_uid",)),
    m.CancelJob: Route("jobs.cancel", "JOBS"),
    m.TrainingEnded: Route("jobs.training_ended", "JOBS"),
    m.JobEnded: Route("ended.{job_uid}", "ENDED"),
    m.StartRollout: Route("tasks.{job_uid}", "TASKS", _TRY),
    m.TrajectoryFinished: Route("trajectories.finished.{job_uid}", "TRAJECTORIES", _TRY),
    m.TrajectorySettled: Route("trajectories.settled.{job_uid}", "TRAJECTORIES", _TRY),
    m.DeadLetter: Route("dead.{sender}", "DEAD"),
    m.Decision: Route("decisions.{device}", "DECISIONS"),
    m.SubStageEntered: Route("telemetry.{sender}"),
    m.RolloutWindow: Route("telemetry.{sender}"),
    m.TrainerWindow: Route("telemetry.{sender}"),
}

STREAMS = (
    Stream("JOBS", ("jobs.>",), work_queue=True),
    Stream("ENDED", ("ended.*",), one_per_subject=True),
    Stream("TASKS", ("tasks.*",), work_queue=True),
    Stream("TRAJECTORIES", ("trajectories.>",), work_queue=True),
    Stream("DEAD", ("dead.>",), max_messages=100_000),
    Stream("DECISIONS", ("decisions.>",), max_messages=100_000, max_age_s=7 * 86400.0),
)

REQUESTS: dict[type[m.Message], str] = {
    m.Ping: "ping",
    m.Drain: "drain",
    m.ReleaseTrajectories: "release",
    m.AdoptTrajectories: "adopt",
}
"""What one instance can be asked, by the name of its endpoint."""

BUCKETS: dict[type[m.Message], str] = {
    m.Worker: "workers",
    m.Allocation: "allocations",
    m.Leadership: "leadership",
    m.PolicyPublished: "policies",
    m.JobRecord: "jobs",
    m.JobProgress: "progress",
}
"""Which KV bucket keeps the current value of each kind of state."""

BLOBS = "blobs"
"""Object store of uploaded datasets."""

LEADER_KEY = "scheduler"
"""KV key of the schedulers' lease."""

ALL_JOBS = "jobs.>"
ALL_TELEMETRY = "telemetry.>"

REWARD_CONSUMER = "reward"


def subject_of(message: m.Message) -> str:
    """The subject that a message is published on."""
    return ROUTES[type(message)].pattern.format_map(_Attributes(message))


def message_id(message: m.Message) -> str | None:
    """The deduplication id of a message, or None where repeats are wanted."""
    route = ROUTES[type(message)]
    if not route.once_by:
        return None
    return ".".join([type(message).__name__, *(str(getattr(message, name)) for name in route.once_by)])


def subscription(kind: type[m.Message], **known: str) -> str:
    """The subject filter for a message type; attributes that aren't given are wildcards."""
    return ROUTES[kind].pattern.format_map(_Wildcards(known))


def jobs_consumer(term: int) -> str:
    """Durable consumer through which the scheduler that leads in a term hears of jobs."""
    return f"jobs-{term}"


def tasks_consumer(job_uid: str) -> str:
    """Durable consumer through which rollout workers share a job's tasks."""
    return f"tasks-{job_uid}"


def settled_consumer(job_uid: str) -> str:
    """Durable consumer through which a job's trainer hears of settled trajectories."""
    return f"settled-{job_uid}"


def allocation_key(instance: str, job_uid: str) -> str:
    """KV key of an allocation; an instance watches everything below its own id."""
    return f"{instance}.{job_uid}"


def request_subject(instance: str, kind: type[m.Message]) -> str:
    """Endpoint of one instance for one kind of request."""
    return f"control.{instance}.{REQUESTS[kind]}"


class _Attributes:
    """Mapping view of a message's attributes, for ``str.format_map``."""

    def __init__(self, message: m.Message) -> None:
        self._message = message

    def __getitem__(self, name: str) -> str:
        return str(getattr(self._message, name))


class _Wildcards(dict[str, str]):
    """Known parts of a subject; the rest are wildcards."""

    def __missing__(self, key: str) -> str:
        return "*"
