"""The trainer service's end of its training process: one request at a time, each awaited.

The process is as mortal as any: when it dies or gives up, the request in flight raises, and when none is,
:meth:`ComputeLink.until_lost` tells; the step loop starts over from the last checkpoint with a new process.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import anyio
from structlog.typing import FilteringBoundLogger

from libs.common.child import Child
from libs.common.errors import JigsawError, MessageError
from libs.common.job import Job
from services.trainer import wire
from services.trainer.process import child_environment

MODULES = {"torch": "services.trainer.training_process", "replay": "services.trainer.replay_process"}
"""What runs in the process, by the job's ``train.engine``."""

A = TypeVar("A")


class ComputeLost(JigsawError):
    """The training process died; a new one can go on from the last checkpoint."""


class ComputeFailed(JigsawError):
    """The training process says that what it was asked for can't be done; trying again can't help."""


class ComputeLink:
    """A running training process.

    Attributes:
        gone: why it has ended; "" while it runs. revision: of the allocation in force.
    """

    def __init__(
        self,
        child: Child[wire.FromTrainer],
        *,
        on_micro_batch: Callable[[wire.MicroBatchDone], None],
        log: FilteringBoundLogger,
    ) -> None:
        self._child, self._on_micro_batch, self._log = child, on_micro_batch, log
        self._answer: asyncio.Future[wire.FromTrainer] | None = None
        self.gone = ""
        self._has_failed = False
        self._died_idle = anyio.Event()
        self.revision = 0

    @classmethod
    async def start(
        cls,
        *,
        engine: str,
        cores: Sequence[int],
        on_micro_batch: Callable[[wire.MicroBatchDone], None],
        log: FilteringBoundLogger,
    ) -> Self:
        """Start a process for an ``engine`` on these cores; :meth:`load` is the first thing to ask of it."""
        child = await Child.start(
            MODULES[engine],
            receives=wire.FROM_TRAINER,
            environment=child_environment(threads=len(cores)),
            cores=cores,
        )
        return cls(child, on_micro_batch=on_micro_batch, log=log)

    async def run(self) -> None:
        """Take in what the process says, until it ends; a task of its own."""
        try:
            async for message in self._child.receive():
                self._take(message)
            self.gone = f"the training process ended: {await self._child.ended()}"
        except MessageError as error:
            self.gone = str(error)
        self._log.info("training_process_ended", reason=self.gone)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ComputeLost(self.gone))
        elif not self._has_failed:
            self._died_idle.set()

    async def until_lost(self) -> None:
        """Wait until the process has ended while nothing was asked of it, which no request can tell."""
        await self._died_idle.wait()

    async def load(self, job: Job, *, model: str, resume: list[str], cores: Sequence[int]) -> wire.Ready:
        """Load model and optimiser, from the first of the checkpoints ``resume`` that is whole."""
        return await self._ask(wire.Load(job, model, resume, list(cores)), wire.Ready)

    async def train(self, step: int, groups: list[wire.SampleGroup]) -> dict[str, float]:
        """Train one step; returns its metrics."""
        return (await self._ask(wire.Train(step, groups), wire.Trained)).metrics

    async def write_policy(self, directory: str) -> None:
        """Write the current policy."""
        await self._ask(wire.WritePolicy(directory), wire.Written)

    async def write_checkpoint(self, step: int, directory: str, *, extra: dict[str, Any]) -> None:
        """Write a checkpoint after ``step`` steps of the job."""
        await self._ask(wire.WriteCheckpoint(step, directory, extra), wire.Written)

    async def set_units(self, units: tuple[int, ...], *, revision: int) -> None:
        """Compute on these units from the next micro-batch on; none pauses."""
        await self._child.send(wire.SetUnits(units, revision))

    async def stop(self) -> None:
        """End the process."""
        await self._child.stop()

    async def _ask(self, request: wire.ToTrainer, expected: type[A]) -> A:
        if self.gone:
            raise ComputeLost(self.gone)
        self._answer = asyncio.get_running_loop().create_future()
        await self._child.send(request)
        answer = await self._answer
        if isinstance(answer, wire.Failed):
            raise (ComputeFailed if answer.final else ComputeLost)(answer.error)
        if not isinstance(answer, expected):
            raise ComputeLost(f"{type(answer).__name__} came where {expected.__name__} was expected")
        return answer

    def _take(self, message: wire.FromTrainer) -> None:
        match message:
            case wire.MicroBatchDone():
                self._on_micro_batch(message)
            case wire.UnitsApplied(revision=revision):
                self.revision = revision
            case _:
                self._has_failed = isinstance(message, wire.Failed)
                if self._answer is not None and not self._answer.done():
                    self._answer.set_result(message)
