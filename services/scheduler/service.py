"""The scheduler service: the world around :class:`services.scheduler.core.Scheduler`.

Sources turn what they hear into events on one bounded stream; one consumer hands them to the core in order and carries the
commands out in order. A jobs message is acknowledged when everything that follows from it has been done, so one that was
cut short comes again. All state is rebuilt from KV at the start; losing the process loses nothing. Of several schedulers one
leads, the others stand by: :mod:`services.scheduler.leadership`.
"""

import re
from typing import Self, assert_never

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from libs.common import messages as m
from libs.common import subjects
from libs.common.errors import TransitionError
from libs.common.pulling import Delivery
from libs.common.service import Context, now
from libs.common.tables import Table
from services.scheduler import commands as c
from services.scheduler import events as e
from services.scheduler.core import Limits, Scheduler
from services.scheduler.leadership import Leadership
from services.scheduler.policies.registry import policy_named

TICK_S = 1.0
EVENTS_WAITING = 1024
SWEEP = 3.0
"""An ended job is swept so many times later as a worker counts as lost: nobody who stops in order needs that long."""

PULL_AT_ONCE = 64
PULL_WAIT_S = 0.5
"""Also how long a standby waits at most for a leader that ends in order."""

_JOB_UID = re.compile(r"[A-Za-z0-9_-]{1,128}")


class Inbound(msgspec.Struct, frozen=True):
    """An event, with the jobs message that it came in, if any."""

    event: e.Event
    delivery: Delivery | None = None


Sink = MemoryObjectSendStream[Inbound]


class Tables(msgspec.Struct, frozen=True):
    """The KV tables that the scheduler reads and writes."""

    workers: Table[m.Worker]
    jobs: Table[m.JobRecord]
    allocations: Table[m.Allocation]
    progress: Table[m.JobProgress]

    @classmethod
    async def open(cls, context: Context) -> Self:
        """Bind to the tables, which exist since the bus was set up."""
        bus = context.bus
        return cls(
            workers=await bus.table(m.Worker),
            jobs=await bus.table(m.JobRecord),
            allocations=await bus.table(m.Allocation),
            progress=await bus.table(m.JobProgress),
        )


async def serve(context: Context) -> None:
    """Body of the service: stands by until it leads, then leads until ``context.stopping`` or until it is deposed.

    Raises:
        Deposed: another leads now, or might; the process ends, and comes back as a standby.
    """
    leadership = Leadership(
        await context.bus.table(m.Leadership),
        instance=context.instance,
        lease_s=context.settings.scheduler.lease_s,
        log=context.log,
    )
    term = await _term(leadership, context.stopping)
    if term is None:
        return
    try:
        with context.bus.only_while(leadership.require):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(leadership.keep)
                await lead(context, leadership, term)
                tasks.cancel_scope.cancel()
    finally:
        await leadership.release()


async def _term(leadership: Leadership, stopping: anyio.Event) -> int | None:
    """Stand by; the term in which this scheduler leads, or None if the service is to stop before that."""
    term = None
    async with anyio.create_task_group() as tasks:

        async def give_up() -> None:
            await stopping.wait()
            tasks.cancel_scope.cancel()

        tasks.start_soon(give_up)
        term = await leadership.take()
        tasks.cancel_scope.cancel()
    return term


async def lead(context: Context, leadership: Leadership, term: int) -> None:
    """Schedule; returns after the events that had come in before ``context.stopping`` are dealt with."""
    settings = context.settings
    policy = policy_named(settings.scheduler.policy)
    limits = Limits(worker_lost_s=settings.worker_lost_s, sweep_s=SWEEP * settings.worker_lost_s)
    scheduler = Scheduler(instance=context.instance, policy=policy, limits=limits)
    tables = await Tables.open(context)
    await context.bus.take_job_queue(subjects.jobs_consumer(term))
    effects = Effects(context, tables, leadership)
    await effects.carry_out(scheduler.handle(await restored(context, tables, term), now()))
    context.log.info("scheduling", policy=policy.name)
    sink, events = anyio.create_memory_object_stream[Inbound](EVENTS_WAITING)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listen, context, tables, sink, term)
        await consume(context, scheduler, effects=effects, events=events)


async def restored(context: Context, tables: Tables, term: int) -> e.StateRestored:
    """What is known of the world from KV, and of endings that were cut short from the stream of terminal events."""
    records = await tables.jobs.all()
    alive = [uid for uid, record in records.items() if record.state is not m.JobState.ENDED]
    ended = [message for uid in alive for message in await context.bus.history(m.JobEnded, job_uid=uid)]
    return e.StateRestored(
        term=term,
        jobs=tuple(records.values()),
        allocations=tuple((await tables.allocations.all()).values()),
        progress=tuple((await tables.progress.all()).values()),
        workers=tuple((await tables.workers.all()).values()),
        ended=tuple(ended),
    )


async def listen(context: Context, tables: Tables, sink: Sink, term: int) -> None:
    """All sources, until the service is to stop; then no more events come."""
    async with sink, anyio.create_task_group() as sources:
        sources.start_soon(_workers, tables, sink)
        sources.start_soon(_progress, tables, sink)
        sources.start_soon(_telemetry, context, sink)
        sources.start_soon(_ticks, sink)
        await _jobs(context, sink, term)
        sources.cancel_scope.cancel()


async def consume(
    context: Context, scheduler: Scheduler, *, effects: "Effects", events: MemoryObjectReceiveStream[Inbound]
) -> None:
    """Handle events in order, one at a time, each with all its effects."""
    async with events:
        async for inbound in events:
            try:
                todo = scheduler.handle(inbound.event, now())
            except TransitionError as error:
                await effects.refuse(inbound, str(error))
            else:
                await effects.carry_out(todo)
            if inbound.delivery is not None:
                await inbound.delivery.ack()


class Effects:
    """Carries commands out, as long as this scheduler leads: the bus asks before every attempt of what goes over it."""

    def __init__(self, context: Context, tables: Tables, leadership: Leadership) -> None:
        self._leadership = leadership
        self._bus, self._store, self._log = context.bus, context.store, context.log
        self._instance, self._tables = context.instance, tables

    async def carry_out(self, commands: list[c.Command]) -> None:
        """In order.

        Raises:
            Deposed: this scheduler leads no longer.
            Unreachable: bus or store don't answer; the process ends, and begins again from what is stored.
        """
        self._leadership.require()  # also where there is nothing to do: the event is acknowledged next
        for command in commands:
            await self._do(command)

    async def refuse(self, inbound: Inbound, reason: str) -> None:
        """Set aside a message that asks for the impossible, where a person can look at it."""
        if inbound.delivery is None:
            self._log.error("event_refused", reason=reason)
            return
        message = inbound.delivery.message
        letter = m.DeadLetter(
            sender=self._instance,
            subject=subjects.subject_of(message),
            reason=reason,
            payload=m.encode(message),
            died_at=now(),
        )
        await self._bus.publish(letter)
        self._log.error("dead_letter", subject=letter.subject, reason=reason)

    async def _do(self, command: c.Command) -> None:
        match command:
            case c.PutJob(record=record):
                await self._tables.jobs.put(record.job_uid, record)
                self._log.info("job", job_uid=record.job_uid, state=record.state, trainer=record.trainer or None)
            case c.CreateConsumers(job_uid=uid):
                await self._bus.ensure_consumer(m.StartRollout, subjects.tasks_consumer(uid), job_uid=uid)
                await self._bus.ensure_consumer(m.TrajectorySettled, subjects.settled_consumer(uid), job_uid=uid)
            case c.PutAllocation(allocation=allocation):
                key = subjects.allocation_key(allocation.instance, allocation.job_uid)
                await self._tables.allocations.put(key, allocation)
            case c.DropAllocation(instance=instance, job_uid=uid):
                await self._tables.allocations.delete(subjects.allocation_key(instance, uid))
            case c.PublishDecision(decision=decision):
                await self._bus.publish(decision)
                self._log.info("decided", device=decision.device, revision=decision.revision, reason=decision.reason)
            case c.PublishEnded(ended=ended):
                first = await self._bus.publish(ended)
                self._log.info("job_ended", job_uid=ended.job_uid, outcome=ended.outcome, reason=ended.reason, first=first)
            case c.CleanUpJob(job_uid=uid):
                await self._clean_up(uid)
            case c.ForgetWorker(instance=instance):
                await self._tables.workers.delete(instance)
                self._log.warning("worker_lost", worker=instance)
            case c.Note(text=text, fields=fields):
                self._log.warning(text, **fields)
            case _:
                assert_never(command)

    async def _clean_up(self, uid: str) -> None:
        """Consumers before messages, so that nobody takes work of an ended job."""
        await self._bus.drop_consumer(m.StartRollout, subjects.tasks_consumer(uid))
        await self._bus.drop_consumer(m.TrajectorySettled, subjects.settled_consumer(uid))
        for kind in (m.StartRollout, m.TrajectoryFinished, m.TrajectorySettled):
            await self._bus.purge(kind, job_uid=uid)
        self._leadership.require()
        await self._store.forget_job(uid)


# --- sources ---------------------------------------------------------------------------------------------------------


async def _jobs(context: Context, sink: Sink, term: int) -> None:
    """Until the service is to stop. A pull isn't cut short: what it gets would have to wait for its redelivery."""
    puller = await context.bus.pull(m.SubmitJob, subjects.jobs_consumer(term))
    while not context.stopping.is_set():
        for delivery in await puller.fetch(PULL_AT_ONCE, wait_s=PULL_WAIT_S):
            event = job_event(delivery.message)
            if event is None:
                context.log.error("jobs_message_ignored", message=type(delivery.message).__name__)
                await delivery.ack()
            else:
                await sink.send(Inbound(event, delivery))


def job_event(message: m.AnyMessage) -> e.Event | None:
    """The event that a message on the jobs stream is; None for one that can't be meant.

    A job's id becomes part of subjects and keys, so one with other characters is never accepted.
    """
    match message:
        case m.SubmitJob() if _JOB_UID.fullmatch(message.job_uid):
            return e.JobSubmitted(message)
        case m.CancelJob():
            return e.CancelRequested(message.job_uid, message.reason)
        case m.TrainingEnded():
            return e.TrainingFinished(
                job_uid=message.job_uid,
                trainer=message.sender,
                incarnation=message.incarnation,
                outcome=message.outcome,
                reason=message.reason,
            )
        case _:
            return None


async def _workers(tables: Tables, sink: Sink) -> None:
    async for change in tables.workers.watch():
        await sink.send(Inbound(e.WorkerLeft(change.key) if change.value is None else e.WorkerSeen(change.value)))


async def _progress(tables: Tables, sink: Sink) -> None:
    async for change in tables.progress.watch():
        if change.value is not None:
            await sink.send(Inbound(e.ProgressSeen(change.value)))


async def _telemetry(context: Context, sink: Sink) -> None:
    """Reports are dropped rather than let wait: the next one says more."""
    async for report in context.bus.telemetry():
        if isinstance(report, m.SubStageEntered | m.RolloutWindow | m.TrainerWindow):
            try:
                sink.send_nowait(Inbound(e.TelemetrySeen(report)))
            except anyio.WouldBlock:
                context.log.debug("telemetry_dropped", sender=report.sender)


async def _ticks(sink: Sink) -> None:
    while True:
        await anyio.sleep(TICK_S)
        await sink.send(Inbound(e.Tick()))
