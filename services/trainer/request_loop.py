"""What every training process does, whatever learns in it: one request at a time, allocations whenever they come.

Between micro-batches it applies the newest allocation; with no units it waits there, with everything kept. Imports nothing
heavy.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from libs.common.child import Parent, ParentGone, die_with_parent
from libs.common.errors import JigsawError
from libs.common.partition import CpuPartition
from services.trainer import wire
from services.trainer.resume import Found

OnMicroBatch = Callable[[wire.MicroBatchDone], None]


class Learner(Protocol):
    """What a training process serves."""

    @property
    def step(self) -> int:
        """Steps of the job so far."""

    @property
    def extra(self) -> dict[str, Any]:
        """What the service saved with the checkpoint that this goes on from."""

    def set_threads(self, count: int) -> None:
        """Compute with this many threads from now on."""

    def train(self, step: int, groups: Sequence[wire.SampleGroup], *, on_micro_batch: OnMicroBatch) -> dict[str, float]:
        """Train one step and return its metrics; ``on_micro_batch`` may wait, or raise to give the step up."""

    def write_policy(self, directory: Path) -> None:
        """Write the current policy into an existing directory."""

    def write_checkpoint(self, directory: Path, *, step: int, extra: dict[str, Any]) -> None:
        """Write a durable checkpoint after ``step`` steps of the job, some of which may have had nothing to train on."""


Load = Callable[[wire.Load], tuple[Learner, Found[Any]]]
"""Makes a learner, from the first of the named checkpoints that is whole if there is one, and tells which it was."""


class RequestLoop:
    """Answers requests in order.

    Args:
        cores: the device's units, as core numbers. waiting: what came before the learner was loaded.
    """

    def __init__(
        self, parent: Parent[wire.ToTrainer], learner: Learner, *, cores: Sequence[int], waiting: Sequence[wire.ToTrainer]
    ) -> None:
        self._parent, self._learner = parent, learner
        self._partition = CpuPartition(cores, set_threads=learner.set_threads)
        self._requests: list[wire.ToTrainer] = []
        self._units: tuple[int, ...] = ()
        self._sort(waiting)

    def run(self) -> None:
        """Until the service closes the socket."""
        while True:
            self._take(wait_s=None)
            while self._requests:
                self._answer(self._requests.pop(0))

    def _take(self, *, wait_s: float | None) -> None:
        self._sort(self._parent.receive(wait_s=wait_s))

    def _sort(self, messages: Sequence[wire.ToTrainer]) -> None:
        """Allocations apply at once, requests wait for their turn."""
        for message in messages:
            if isinstance(message, wire.SetUnits):
                if message.units:
                    self._partition.apply(message.units)
                self._units = message.units
                self._parent.send(wire.UnitsApplied(message.units, message.revision))
            else:
                self._requests.append(message)

    def _answer(self, request: wire.ToTrainer) -> None:
        match request:
            case wire.Train(step=step, groups=groups):
                self._wait_for_units()
                metrics = self._learner.train(step, groups, on_micro_batch=self._between)
                self._parent.send(wire.Trained(step, metrics))
            case wire.WritePolicy(directory=directory):
                self._learner.write_policy(Path(directory))
                self._parent.send(wire.Written())
            case wire.WriteCheckpoint(step=step, directory=directory, extra=extra):
                self._learner.write_checkpoint(Path(directory), step=step, extra=extra)
                self._parent.send(wire.Written())
            case wire.Load() | wire.SetUnits():
                raise JigsawError(f"{type(request).__name__} is no request of a loaded training process")

    def _between(self, done: wire.MicroBatchDone) -> None:
        """At a micro-batch boundary: report, apply the newest allocation, wait while there are no units."""
        self._parent.send(done)
        self._take(wait_s=0)
        self._wait_for_units()

    def _wait_for_units(self) -> None:
        while not self._units:
            self._take(wait_s=None)


def serve(load: Load) -> None:
    """Body of a training process: load when told to, then answer until the service closes the socket."""
    die_with_parent()
    parent = Parent(wire.TO_TRAINER)
    try:
        told, waiting = _told_to_load(parent)
        try:
            started = time.monotonic()
            learner, found = load(told)
            parent.send(_ready(learner, found, seconds=time.monotonic() - started))
            RequestLoop(parent, learner, cores=told.cores, waiting=waiting).run()
        except (JigsawError, ValueError, RuntimeError, OSError, msgspec.MsgspecError) as error:
            if isinstance(error, ParentGone):
                raise
            # The boundary to torch and transformers: their reason is what the job has to show.
            final = isinstance(error, JigsawError | ValueError)
            text = str(error) if isinstance(error, JigsawError) else f"{type(error).__name__}: {error}"
            parent.send(wire.Failed(text, final=final))
    except ParentGone:
        # Nothing of a learner outlives its process; taking it apart in order would only keep the memory for longer.
        os._exit(0)


def _ready(learner: Learner, found: Found[Any], *, seconds: float) -> wire.Ready:
    return wire.Ready(
        step=learner.step,
        resumed=str(found.directory or ""),
        extra=learner.extra,
        passed_over=list(found.passed_over),
        seconds=seconds,
    )


def _told_to_load(parent: Parent[wire.ToTrainer]) -> tuple[wire.Load, list[wire.ToTrainer]]:
    """Wait for the word to load; allocations may come before it."""
    waiting: list[wire.ToTrainer] = []
    while True:
        for message in parent.receive(wait_s=None):
            if isinstance(message, wire.Load):
                return message, waiting
            waiting.append(message)
