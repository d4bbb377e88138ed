"""The jobs that a worker instance holds: what its allocations say, and what runs because of them.

A job is held while there is an allocation for it. What holding one means is the service's affair (:class:`Holding`); when it
begins, changes and ends is decided here, the same for rollout and trainer. So is what the instance tells of itself.
"""

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import anyio
from anyio.abc import TaskGroup
from nats.errors import Error as NatsError
from redis.exceptions import RedisError

from libs.common import messages as m
from libs.common import subjects
from libs.common.changes import Changes
from libs.common.errors import Unreachable, leaves
from libs.common.service import Context, now

HEARTBEATS = 5
"""So often does an instance tell that it is there within the time after which it would count as gone."""
CRASHES = 3
"""So often a job may crash here before this instance gives it up."""


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

    async def run(self) -> bool:
        """Until the job is done here, or after :meth:`stop`; whether it is to be begun anew if it is still allocated."""

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
        self._stopped: set[str] = set()  # told to stop, and not ended yet
        self._done: set[str] = set()  # ended by themselves: nothing is left to do here
        self._crashes = Counter[str]()
        self._broken: dict[str, str] = {}
        self._draining = False
        self._tasks: TaskGroup | None = None
        self._changes = Changes()

    async def run(self) -> None:
        """Be there for allocations and requests until the service is to stop; then give everything back."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self._announce)
            tasks.start_soon(self._follow)
            await self._context.endpoints.answer(m.Drain, self._drain)
            await self._context.stopping.wait()
            await self.close()
            tasks.cancel_scope.cancel()

    def held(self, job_uid: str) -> H | None:
        """What is held of a job."""
        return self._held.get(job_uid)

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
            draining=self._draining,
            revisions={job_uid: held.revision for job_uid, held in self._held.items()},
            broken=self._broken | {job_uid: held.broken for job_uid, held in self._held.items() if held.broken},
        )

    async def close(self) -> None:
        """Begin nothing more, stop everything, and return once it has ended."""
        self._draining = True
        self._changes.notify()
        for job_uid in list(self._held):
            await self._stop(job_uid)
        await self._changes.until(lambda: not self._held)

    async def _drain(self, request: m.Drain) -> m.Answer:
        """The same as before an end, but it stays, and can be undone."""
        if not request.undo:
            count = len(self._held)
            await self.close()
            return m.Answer(sender=self._instance, count=count)
        self._draining = False
        self._changes.notify()
        for allocation in (await (await self._bus.table(m.Allocation)).all()).values():
            if allocation.instance == self._instance:  # the scheduler hadn't taken it back yet
                await self._apply(allocation.job_uid, allocation)
        return m.Answer(sender=self._instance, count=len(self._held))

    async def _announce(self) -> None:
        """Keep this worker's presence fresh until cancelled; then say that it is gone."""
        table = await self._bus.table(m.Worker)
        heartbeat_s = self._context.settings.worker_lost_s / HEARTBEATS
        try:
            while True:
                await table.put(self._instance, self.presence())
                with anyio.move_on_after(heartbeat_s):
                    await self._changes.next()
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(1.0), contextlib.suppress(Unreachable):
                await table.delete(self._instance)

    async def _follow(self) -> None:
        """Begin, adjust and end holdings as allocations come, change and go, until cancelled."""
        table = await self._bus.table(m.Allocation)
        async for change in table.watch(subjects.allocation_key(self._instance, "*")):
            await self._apply(change.key.removeprefix(f"{self._instance}."), change.value)

    async def _apply(self, job_uid: str, allocation: m.Allocation | None) -> None:
        if allocation is None:
            self._crashes.pop(job_uid, None)
            self._broken.pop(job_uid, None)
            self._done.discard(job_uid)
            await self._stop(job_uid)
            return
        if job_uid in self._done:
            return
        if job_uid not in self._held:
            record = await (await self._bus.table(m.JobRecord)).get(job_uid)
            if record is None or record.state is m.JobState.ENDED or self._draining or job_uid in self._broken:
                return
            self._begin(record)
        await self._held[job_uid].allocate(allocation)

    async def _stop(self, job_uid: str) -> None:
        if (held := self._held.get(job_uid)) is not None:
            self._stopped.add(job_uid)
            await held.stop()

    def _begin(self, record: m.JobRecord) -> None:
        """Hold a job, unless somebody has begun to while its record was looked up."""
        if record.job_uid not in self._held:
            assert self._tasks is not None
            held = self._held[record.job_uid] = self._make(record)
            self._tasks.start_soon(self._run, record.job_uid, held)
            self._changes.notify()

    async def _run(self, job_uid: str, held: H) -> None:
        again = False
        try:
            again = await held.run()
        except Exception as error:
            if _is_infrastructure(error):
                raise
            again = True
            self._note_crash(job_uid, error)
        finally:
            del self._held[job_uid]
            self._changes.notify()
        if not again and job_uid not in self._stopped:
            self._done.add(job_uid)
        else:
            self._stopped.discard(job_uid)
            # An allocation that came back meanwhile went to a holding that was ending and no longer listened.
            allocation = await (await self._bus.table(m.Allocation)).get(subjects.allocation_key(self._instance, job_uid))
            await self._apply(job_uid, allocation)

    def _note_crash(self, job_uid: str, error: Exception) -> None:
        """A job that crashes must not take the others with it: it is begun again a few times, then left as broken."""
        self._crashes[job_uid] += 1
        self._context.log.error("job_crashed", job=job_uid, crashes=self._crashes[job_uid], exc_info=error)
        if self._crashes[job_uid] >= CRASHES:
            self._broken[job_uid] = _reason(error)


def _is_infrastructure(error: BaseException) -> bool:
    """Whether bus or store are gone, which is no job's fault: the process ends, and begins anew when they are back."""
    return any(isinstance(leaf, (NatsError, RedisError, Unreachable)) for leaf in leaves(error))


def _reason(error: BaseException) -> str:
    """What went wrong first, in words."""
    first = leaves(error)[0]
    return f"{type(first).__name__}: {first}"
