"""Every message that passes between processes over NATS, and every value kept in a KV bucket.

Commands are imperative, events past tense. All are frozen and tagged with their own name, so that a reader can tell them
apart and an unknown one is a clear error; unknown *fields* are ignored, so that neighbouring versions understand each
other. Where each one travels is decided in :mod:`libs.common.subjects`. A message is a hint or a reference; the truth about
a trajectory is in the store, and weights are in the policy store.
"""

from enum import StrEnum
from typing import Any, Literal, TypeVar

import msgspec

from libs.common.errors import MessageError
from libs.common.history import History
from libs.common.job import Job
from libs.common.tokens import PolicyVersion


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all messages. ``sender`` is the instance id of who sent it."""

    sender: str


class Outcome(StrEnum):
    """How a job ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Phase(StrEnum):
    """Which stage a job's current step is in; what the scheduler gives units to."""

    STARTING = "starting"
    ROLLOUT = "rollout"
    TRAIN = "train"
    DONE = "done"


class Role(StrEnum):
    """What a worker instance does with its device."""

    ROLLOUT = "rollout"
    TRAINER = "trainer"


class SubStage(StrEnum):
    """What a device is really doing: the nodes of the sub-stage graph."""

    PREFILL = "prefill"
    WIDE_DECODE = "wide_decode"
    TAIL_DECODE = "tail_decode"
    TOOL_WAIT = "tool_wait"
    REWARD = "reward"
    TRAIN = "train"
    WEIGHT_SYNC = "weight_sync"
    IDLE = "idle"


# --- jobs ------------------------------------------------------------------------------------------------------------


class SubmitJob(Message, frozen=True, kw_only=True):
    """A user hands in a job; ``blobs`` maps a dataset path in the job to the digest it was uploaded under."""

    job_uid: str
    job: Job
    blobs: dict[str, str] = {}
    submitted_at: float


class CancelJob(Message, frozen=True, kw_only=True):
    """A user wants a job ended."""

    job_uid: str
    reason: str = "cancelled by the user"


class TrainingEnded(Message, frozen=True, kw_only=True):
    """A trainer is done with a job, one way or the other; the scheduler turns it into the terminal event.

    ``incarnation`` is the trainer's: the word of one that was replaced meanwhile is nothing to its successor.
    """

    job_uid: str
    incarnation: int
    outcome: Outcome
    reason: str = ""


class JobEnded(Message, frozen=True, kw_only=True):
    """The one terminal event of a job."""

    job_uid: str
    outcome: Outcome
    reason: str = ""
    ended_at: float


# --- trajectories ----------------------------------------------------------------------------------------------------


class TrajectoryNews(Message, frozen=True, kw_only=True):
    """Base of all word about one trajectory. ``attempt`` numbers repeats, or deduplication would swallow them."""

    job_uid: str
    step: int
    group: int
    sample: int
    attempt: int = 0


class StartRollout(TrajectoryNews, frozen=True, kw_only=True):
    """There is work: a trajectory record waits to be claimed.

    ``policy`` is the version that must be in force before the first token is sampled.
    """

    policy: PolicyVersion


class TrajectoryFinished(TrajectoryNews, frozen=True, kw_only=True):
    """A trajectory has its last token and waits for its score."""


class TrajectorySettled(TrajectoryNews, frozen=True, kw_only=True):
    """A trajectory reached a terminal state, scored or failed."""

    state: Literal["scored", "failed"]


News = TypeVar("News", bound=TrajectoryNews)


def following(news: TrajectoryNews, kind: type[News], *, sender: str, **more: Any) -> News:
    """What is to be said next of the same trajectory and attempt: ``more`` are the fields that ``kind`` adds."""
    same = {name: getattr(news, name) for name in ("job_uid", "step", "group", "sample", "attempt")}
    return kind(sender=sender, **same, **more)


class DeadLetter(Message, frozen=True, kw_only=True):
    """Something that couldn't be processed, kept for a person to look at and replay."""

    subject: str
    reason: str
    payload: bytes
    died_at: float


# --- decisions and telemetry -----------------------------------------------------------------------------------------

LENGTH_BIN = 32
"""Tokens of one bin in a histogram of response lengths."""


class Decision(Message, frozen=True, kw_only=True):
    """What the scheduler decided, for observers: the grants now in force on a device, and why."""

    device: str
    revision: int
    policy: str
    reason: str
    grants: dict[str, int]
    decided_at: float


class SubStageEntered(Message, frozen=True, kw_only=True):
    """A worker's sub-stage for a job changed, just now: what it does, or would do if it had units."""

    job_uid: str
    step: int
    sub_stage: SubStage


class RolloutWindow(Message, frozen=True, kw_only=True):
    """What one engine did in the last telemetry window.

    Attributes:
        tokens_prefill, tokens_decode: processed in the window. window_s: its length.
        lengths: histogram of the running sequences' response lengths in bins of :data:`LENGTH_BIN` tokens.
        kv_used: share of KV blocks, 0..1. units: in force. revision: of the allocation in force.
        thinking: trajectories held here that wait for their environment's answer.
        turns: sampled tokens of each turn that ended in the window. tools_s: how long each answer took that came in it.
        responses: (turns, sampled tokens) of each trajectory that finished in the window.
    """

    job_uid: str
    step: int
    window_s: float
    tokens_prefill: int
    tokens_decode: int
    running: int
    waiting: int
    lengths: list[int]
    kv_used: float
    units: int
    revision: int
    thinking: int = 0
    turns: list[int] = []
    tools_s: list[float] = []
    responses: list[tuple[int, int]] = []


class TrainerWindow(Message, frozen=True, kw_only=True):
    """One micro-batch done: ``tokens`` trained in ``seconds``; ``done`` of ``total`` in this step."""

    job_uid: str
    step: int
    done: int
    total: int
    tokens: int
    seconds: float
    units: int
    revision: int


# --- requests to one instance, and their answers -----------------------------------------------------------------------


class Ping(Message, frozen=True, kw_only=True):
    """Are you there?"""


class Drain(Message, frozen=True, kw_only=True):
    """Give back everything and take no more work; ``undo`` ends that."""

    undo: bool = False


class ReleaseTrajectories(Message, frozen=True, kw_only=True):
    """Let go of ``count`` running trajectories of a job, to the instance ``target`` ("": to any that wants them)."""

    job_uid: str
    target: str
    count: int


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """A trajectory that was handed over, and the epoch that its new owner writes with."""

    group: int
    sample: int
    epoch: int


class AdoptTrajectories(Message, frozen=True, kw_only=True):
    """These trajectories are yours, if you say so before their leases run out."""

    job_uid: str
    offers: list[Offer]


class Answer(Message, frozen=True, kw_only=True):
    """What became of a request: how many trajectories it concerned, or why it can't be."""

    count: int = 0
    refused: str = ""


# --- current state, in KV --------------------------------------------------------------------------------------------


class Worker(Message, frozen=True, kw_only=True):
    """Presence of a rollout or trainer instance: where it runs and what it can take. Renewed; stale means gone.

    Attributes:
        device: id of the device it computes on. units: how many units the device has in all.
        max_units: the most units that this instance can use.
        memory_mb: of the device, shared by all its instances.
        draining: takes no new work.
        revisions: per job the allocation revision in force.
        broken: per job that can't be computed here, why.
    """

    role: Role
    device: str
    units: int
    max_units: int
    memory_mb: int
    started_at: float
    draining: bool = False
    revisions: dict[str, int] = {}
    broken: dict[str, str] = {}


class Allocation(Message, frozen=True, kw_only=True):
    """What an instance may use for a job: these units of its device, so much memory, so many running trajectories.

    No units: paused with its state kept. Applied at the next step boundary if ``revision`` is newer than the one in force.
    """

    instance: str
    job_uid: str
    units: tuple[int, ...]
    memory_mb: int
    max_running: int
    revision: int


class Leadership(Message, frozen=True, kw_only=True):
    """Which scheduler leads, its sender. Renewed by compare-and-set only; ``held`` is false once it has let go.

    Every take-over has a higher term than all before it.
    """

    term: int
    held: bool = True


class PolicyPublished(Message, frozen=True, kw_only=True):
    """The current policy of a job; the pointer moves by compare-and-set only. ``digest`` is the manifest's sha256."""

    job_uid: str
    version: PolicyVersion
    url: str
    digest: str


class JobState(StrEnum):
    """The scheduler's view of a job."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


class JobRecord(Message, frozen=True, kw_only=True):
    """An accepted job and what the scheduler did with it; ``trainer`` is the instance that runs its step loop."""

    job_uid: str
    job: Job
    state: JobState
    submitted_at: float
    blobs: dict[str, str] = {}
    trainer: str = ""
    outcome: Outcome | None = None
    reason: str = ""
    ended_at: float | None = None


class JobProgress(Message, frozen=True, kw_only=True):
    """Where a job's step loop is, told by its trainer.

    Attributes:
        step: of the current step, 0-based; ``steps`` in all. settled, expected: trajectories of this step.
        history: of all finished steps, abridged. artifacts: where model, log and checkpoints lie.
        incarnation: of the trainer; one that was replaced can't set this value any more.
    """

    job_uid: str
    incarnation: int = 0
    phase: Phase
    step: int
    steps: int
    settled: int
    expected: int
    history: History = msgspec.field(default_factory=History)
    artifacts: dict[str, str] = {}


AnyMessage = (
    SubmitJob
    | CancelJob
    | TrainingEnded
    | JobEnded
    | StartRollout
    | TrajectoryFinished
    | TrajectorySettled
    | DeadLetter
    | Ping
    | Drain
    | ReleaseTrajectories
    | AdoptTrajectories
    | Answer
    | Decision
    | SubStageEntered
    | RolloutWindow
    | TrainerWindow
    | Worker
    | Allocation
    | Leadership
    | PolicyPublished
    | JobRecord
    | JobProgress
)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """Message to msgpack."""
    return _ENCODER.encode(message)


def decode(data: bytes) -> AnyMessage:
    """Msgpack to message.

    Raises:
        MessageError: not one of ours, or of a version that this one can't read.
    """
    try:
        return _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise MessageError(f"undecodable message of {len(data)} bytes: {error}") from None
