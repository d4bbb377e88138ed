"""The jobs that a worker instance holds: what its allocations say, and what runs because of them.

A job is held while there is an allocation for it. What holding one means is the service's affair (:class:`Holding`); when it
begins, changes and ends is decided here, the same for rollout and trainer.
"""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from anyio.abc import TaskGroup

from libs.common import messages as m
from libs.common import subjects
from libs.common.changes import Changes
from libs.common.service import Context, now


class Holding(Protocol):
    """One job on one instance, from its first allocation to its last."""

    @property
    def revision(self) -> int:
        """Revision of the allocation in force."""

    @property
    def broken(self) -> str:
        """Why nothing of this job can be computed on this instance, or ""."""

    async def allocate(self, allocation: m.Allocation) -> None:
        """An allocation arrived; one that isn't newer than the last changes nothing."""

    async def run(self) -> None:
        """Until the job is done here, or after :meth:`stop`."""

    async def stop(self) -> None:
        """Make :meth:`run` give everything back and return."""


H = TypeVar("H", bound=Holding)


class Holdings(Generic[H]):
    """Everything that an instance holds.

    Args:
        role: of the instance. max_units: the most units of its device that it can use.
        make: begins to hold a job.
    """

    def __init__(self, context: Context, role: m.Role, *, max_units: int, make: Callable[[m.JobRecord], H]) -> None:
        self._context, self._role, self._max_units, self._make = context, role, max_units, make
        self._bus, self._instance = context.bus, context.instance
        self._started_at = now()
        self._held: dict[str, H] = {}
        self._stopped: set[str] = set()
        self._closed = False
        self._changes = Changes()

    def presence(self) -> m.Worker:
        """What this instance is and what it holds."""
        device = self._context.settings.device
        return m.Worker(
            sender=self._instance,
            role=self._role,
            device=device.id,
            units=len(device.cores),
            max_units=self._max_units,
            memory_mb=device.memory_mb,
            started_at=self._started_at,
            draining=self._context.stopping.is_set(),
            revisions={job_uid: held.revision for job_uid, held in self._held.items()},
            broken={job_uid: held.broken for job_uid, held in self._held.items() if held.broken},
        )

    async def follow(self, tasks: TaskGroup) -> None:
        """Begin, adjust and end holdings as allocations come, change and go, until cancelled."""
        table = await self._bus.table(m.Allocation)
        async for change in table.watch(subjects.allocation_key(self._instance, "*")):
            await self._apply(change.key.removeprefix(f"{self._instance}."), change.value, tasks)

    async def close(self) -> None:
        """Begin nothing more, stop everything, and return once it has ended."""
        self._closed = True
        for held in list(self._held.values()):
            await held.stop()
        await self._changes.until(lambda: not self._held)

    async def _apply(self, job_uid: str, allocation: m.Allocation | None, tasks: TaskGroup) -> None:
        held = self._held.get(job_uid)
        if allocation is None:
            if held is not None:
                self._stopped.add(job_uid)
                await held.stop()
            return
        if held is None:
            record = await (await self._bus.table(m.JobRecord)).get(job_uid)
            if record is None or record.state is m.JobState.ENDED or self._closed:
                return
            held = self._held[job_uid] = self._make(record)
            tasks.start_soon(self._run, job_uid, held, tasks)
        await held.allocate(allocation)

    async def _run(self, job_uid: str, held: H, tasks: TaskGroup) -> None:
        try:
            await held.run()
        finally:
            del self._held[job_uid]
            self._changes.notify()
        if job_uid in self._stopped:
            self._stopped.discard(job_uid)
            # An allocation that came back meanwhile went to a holding that was ending and no longer listened.
            again = await (await self._bus.table(m.Allocation)).get(subjects.allocation_key(self._instance, job_uid))
            await self._apply(job_uid, again, tasks)
