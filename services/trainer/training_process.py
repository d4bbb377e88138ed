"""The training process: owns model and optimiser, answers one request at a time.

``python -m services.trainer.training_process``, started by the trainer service only. Between micro-batches it applies the
newest allocation; with no units it waits there, with everything kept.
"""

import os
import time
from pathlib import Path

import msgspec

from libs.common.child import Parent, ParentGone, die_with_parent
from libs.common.errors import JigsawError
from libs.common.partition import CpuPartition
from libs.common.tokens import from_bytes
from services.trainer import checkpoint, wire
from services.trainer.batches import Completion, Group
from services.trainer.grpo import advantages
from services.trainer.learner import Learner, Progress


class TrainingProcess:
    """The loop: requests in order, allocations whenever they come."""

    def __init__(
        self, parent: Parent[wire.ToTrainer], learner: Learner, load: wire.Load, *, waiting: list[wire.ToTrainer]
    ) -> None:
        self._parent, self._learner, self._job = parent, learner, load.job
        self._partition = CpuPartition(load.cores, set_threads=learner.set_threads)
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

    def _sort(self, messages: list[wire.ToTrainer]) -> None:
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
                batch = [self._group(group) for group in groups]
                metrics = self._learner.train(step, batch, on_micro_batch=self._between)
                self._parent.send(wire.Trained(step, metrics))
            case wire.WritePolicy(directory=directory):
                self._learner.write_policy(Path(directory))
                self._parent.send(wire.Written())
            case wire.WriteCheckpoint(step=step, directory=directory, extra=extra):
                self._learner.step = step  # a step without anything to learn from wasn't sent here, and counts all the same
                self._learner.save_checkpoint(Path(directory), extra=extra)
                self._parent.send(wire.Written())
            case wire.Load() | wire.SetUnits():
                raise JigsawError(f"{type(request).__name__} is no request of a loaded training process")

    def _between(self, progress: Progress) -> None:
        """At a micro-batch boundary: report, apply the newest allocation, wait while there are no units."""
        self._parent.send(wire.MicroBatchDone(progress.done, progress.total, progress.tokens, progress.seconds))
        self._take(wait_s=0)
        self._wait_for_units()

    def _wait_for_units(self) -> None:
        while not self._units:
            self._take(wait_s=None)

    def _group(self, group: wire.SampleGroup) -> Group:
        rewards = [sample.reward for sample in group.samples]
        return Group(
            prompt_ids=group.prompt_ids,
            completions=[Completion(from_bytes(sample.tokens)) for sample in group.samples],
            advantages_G=advantages(rewards, normalise=self._job.algorithm.normalise).tolist(),
        )


def main() -> None:
    """Entry point."""
    die_with_parent()
    parent = Parent(wire.TO_TRAINER)
    try:
        load, waiting = _told_to_load(parent)
        try:
            learner, ready = _loaded(load)
            parent.send(ready)
            TrainingProcess(parent, learner, load, waiting=waiting).run()
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


def _loaded(load: wire.Load) -> tuple[Learner, wire.Ready]:
    """The learner, continuing from the newest checkpoint that is whole."""
    started = time.monotonic()
    found = checkpoint.load_first([Path(path) for path in load.resume])
    learner = Learner(Path(load.model), load.job, seed=load.job.train.seed, resume=found.checkpoint)
    return learner, wire.Ready(
        step=learner.step,
        resumed=str(found.directory or ""),
        extra=learner.extra,
        passed_over=list(found.passed_over),
        seconds=time.monotonic() - started,
    )


def _told_to_load(parent: Parent[wire.ToTrainer]) -> tuple[wire.Load, list[wire.ToTrainer]]:
    """Wait for the word to load; allocations may come before it."""
    waiting: list[wire.ToTrainer] = []
    while True:
        for message in parent.receive(wait_s=None):
            if isinstance(message, wire.Load):
                return message, waiting
            waiting.append(message)


if __name__ == "__main__":
    main()
