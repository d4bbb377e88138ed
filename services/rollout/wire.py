"""What the rollout service and its engine process say to each other, over their socket pair."""

from typing import Literal

import msgspec

from libs.common.messages import SubStage
from libs.common.replay import ReplayedRollout
from libs.common.tokens import PolicyVersion
from services.rollout.engine import StopReason, TurnRequest


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load an engine with a policy; the first thing said, once.

    Attributes:
        cores: the device's units, as core numbers; which of them to compute on comes with :class:`SetUnits`.
        flush_tokens, flush_ms: new tokens are handed over at the latest after so many per trajectory or so long.
    """

    kind: str
    replay: ReplayedRollout
    dtype: Literal["bfloat16", "float32"]
    max_context: int | None
    max_running: int
    kv_memory_mb: int
    compile: bool
    version: PolicyVersion
    directory: str
    cores: list[int]
    flush_tokens: int
    flush_ms: int


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Generate these turns."""

    requests: list[TurnRequest]


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Stop these turns at the step boundary; what they have so far is handed over first. ``number`` names the request."""

    number: int
    keys: list[str]


class SwitchPolicy(msgspec.Struct, frozen=True, tag=True):
    """Put another policy version in force at the step boundary."""

    version: PolicyVersion
    directory: str


class SetUnits(msgspec.Struct, frozen=True, tag=True):
    """Compute on these units from the next step on; none: pause with all state kept."""

    units: tuple[int, ...]
    revision: int


ToEngine = Load | Begin | Drop | SwitchPolicy | SetUnits


class Started(msgspec.Struct, frozen=True, tag=True):
    """The process has done its imports and waits to be told to load."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The engine is ready, or can't be: then ``error`` says why. ``max_context`` in tokens."""

    version: PolicyVersion
    seconds: float
    max_context: int
    error: str = ""


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one trajectory, in order, of one policy version; ``stopped`` when its turn ended with the last."""

    key: str
    ids: list[int]
    logprobs: list[float]
    stopped: StopReason | None


class Progress(msgspec.Struct, frozen=True, tag=True):
    """New tokens since the last one, all sampled from ``version``."""

    version: PolicyVersion
    segments: list[Segment]


class Dropped(msgspec.Struct, frozen=True, tag=True):
    """The turns of this request are gone from the engine; everything they had was handed over before."""

    number: int


class PolicySwitched(msgspec.Struct, frozen=True, tag=True):
    """The new version is in force."""

    version: PolicyVersion
    seconds: float


class UnitsApplied(msgspec.Struct, frozen=True, tag=True):
    """The units in force."""

    units: tuple[int, ...]
    revision: int


class Window(msgspec.Struct, frozen=True, tag=True):
    """What the engine did in the last telemetry window; fields as in :class:`libs.common.messages.RolloutWindow`."""

    window_s: float
    tokens_prefill: int
    tokens_decode: int
    running: int
    waiting: int
    lengths: list[int]
    kv_used: float


class Entered(msgspec.Struct, frozen=True, tag=True):
    """The engine's sub-stage changed."""

    sub_stage: SubStage


class StepFailed(msgspec.Struct, frozen=True, tag=True):
    """An engine step raised; the process ends after this."""

    error: str


FromEngine = Started | Loaded | Progress | Dropped | PolicySwitched | UnitsApplied | Window | Entered | StepFailed

TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
