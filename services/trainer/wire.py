"""What the trainer service and its training process say to each other, over their socket pair."""

from typing import Any

import msgspec

from libs.common.job import Job


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load the model and the optimiser; the first thing said, once.

    Attributes:
        model: directory of the initial policy.
        resume: checkpoints to continue from, the newest first; one that is damaged is passed over for the next.
        cores: the device's units, as core numbers.
    """

    job: Job
    model: str
    resume: list[str]
    cores: list[int]


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One trajectory to train on: its tokens as stored, and its reward."""

    tokens: bytes
    reward: float


class SampleGroup(msgspec.Struct, frozen=True, array_like=True):
    """The valid samples of one prompt."""

    prompt_ids: list[int]
    samples: list[Sample]


class Train(msgspec.Struct, frozen=True, tag=True):
    """Do one step of the job on these groups."""

    step: int
    groups: list[SampleGroup]


class WritePolicy(msgspec.Struct, frozen=True, tag=True):
    """Write the current policy into this (existing, empty) directory."""

    directory: str


class WriteCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Write a checkpoint after ``step`` steps of the job as this directory; ``extra`` comes back on resume."""

    step: int
    directory: str
    extra: dict[str, Any]


class SetUnits(msgspec.Struct, frozen=True, tag=True):
    """Compute on these units from the next micro-batch on; none: pause."""

    units: tuple[int, ...]
    revision: int


ToTrainer = Load | Train | WritePolicy | WriteCheckpoint | SetUnits


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded: ``step`` steps have been trained.

    Attributes:
        resumed: the checkpoint that it goes on from, or "". extra: what was saved with it.
        passed_over: why newer checkpoints weren't used.
    """

    step: int
    resumed: str
    extra: dict[str, Any]
    passed_over: list[str]
    seconds: float


class MicroBatchDone(msgspec.Struct, frozen=True, tag=True):
    """``done`` of ``total`` micro-batches of a step; the last one computed ``tokens`` in ``seconds``."""

    done: int
    total: int
    tokens: int
    seconds: float


class Trained(msgspec.Struct, frozen=True, tag=True):
    """A step is trained; metrics by TensorBoard name."""

    step: int
    metrics: dict[str, float]


class Written(msgspec.Struct, frozen=True, tag=True):
    """The policy, or the checkpoint, lies in its directory."""


class UnitsApplied(msgspec.Struct, frozen=True, tag=True):
    """The units in force."""

    units: tuple[int, ...]
    revision: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """What was asked for can't be done; the process ends after this. ``final``: trying again can't help."""

    error: str
    final: bool


FromTrainer = Ready | MicroBatchDone | Trained | Written | UnitsApplied | Failed

TO_TRAINER: msgspec.msgpack.Decoder[ToTrainer] = msgspec.msgpack.Decoder(ToTrainer)
FROM_TRAINER: msgspec.msgpack.Decoder[FromTrainer] = msgspec.msgpack.Decoder(FromTrainer)
