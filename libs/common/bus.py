"""The bus: typed messages over NATS core, JetStream and KV.

Services speak in messages; this module turns them into subjects, headers, acknowledgements and watches. What can't be
decoded becomes a dead letter and is terminated: no silent drop, no endless redelivery.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Self, TypeVar

import msgspec
import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoServersError
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, DiscardPolicy, KeyValueConfig, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import (
    APIError,
    BadRequestError,
    NotFoundError,
    ServiceUnavailableError,
)
from structlog.typing import FilteringBoundLogger

from libs.common import messages as m
from libs.common import subjects
from libs.common.errors import JigsawError, MessageError, NodeError, QueueGone
from libs.common.tables import Table

CONNECT_S = 20.0
DEDUPE_WINDOW_S = 120.0
ACK_WAIT_S = 30.0
NOT_READY_S = 0.5
PUBLISH_S = 10.0
PUBLISH_TRIES = 3

M = TypeVar("M", bound=m.Message)


class Delivery(msgspec.Struct, frozen=True, eq=False):
    """A message from a stream, to be acknowledged once its effect is safe."""

    message: m.AnyMessage
    deliveries: int
    _msg: Msg

    async def ack(self) -> None:
        """Its effect is safe: never deliver it again."""
        await self._msg.ack()

    async def extend(self) -> None:
        """It is being worked on: wait longer before delivering it to someone else."""
        await self._msg.in_progress()

    async def retry(self, after_s: float) -> None:
        """Deliver it again later, to anyone."""
        await self._msg.nak(delay=after_s)


class Bus:
    """One connection to NATS, with the project's messages on it."""

    def __init__(self, client: Client, *, instance: str, log: FilteringBoundLogger) -> None:
        self._client, self._instance, self._log = client, instance, log
        self._js: JetStreamContext = client.jetstream(timeout=10.0)

    @classmethod
    async def connect(cls, url: str, *, instance: str, log: FilteringBoundLogger, patience_s: float = CONNECT_S) -> Self:
        """Connect, and stay connected for as long as it takes once the first connection was made.

        Args:
            url: of the server. instance: id of who connects. log: told of trouble.
            patience_s: how long the first connection is tried.

        Raises:
            NodeError: no server at the url.
        """

        async def note_error(error: Exception) -> None:
            log.warning("bus_error", error=str(error) or type(error).__name__)

        async def note_reconnect() -> None:
            log.info("bus_reconnected")

        try:
            async with asyncio.timeout(patience_s):  # the client's own patience is endless, from the first connection on
                client = await nats.connect(
                    url,
                    name=instance,
                    error_cb=note_error,
                    reconnected_cb=note_reconnect,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=1,
                    connect_timeout=5,
                    allow_reconnect=True,
                    inbox_prefix=f"_INBOX.{instance}",
                )
        except (NoServersError, OSError) as error:  # a TimeoutError is an OSError
            raise NodeError(f"no NATS server answers at {url}: {error or type(error).__name__}") from None
        return cls(client, instance=instance, log=log)

    @property
    def client(self) -> Client:
        """The connection itself, for :mod:`nats.micro`."""
        return self._client

    async def close(self) -> None:
        """Send what is buffered and close; bounded, because a drain can hang."""
        try:
            await asyncio.wait_for(self._client.flush(timeout=2), 3.0)
        except (NatsError, TimeoutError):
            self._log.warning("bus_flush_failed")
        with contextlib.suppress(OSError):  # of a connection that broke just now
            await self._client.close()

    async def set_up(self) -> None:
        """Create streams, buckets and the consumer that all jobs share. The scheduler alone does this."""
        for stream in subjects.STREAMS:
            config = _stream_config(stream)
            try:
                await self._js.add_stream(config)
            except BadRequestError:
                await self._js.update_stream(config)
        for bucket in subjects.BUCKETS.values():
            await self._js.create_key_value(KeyValueConfig(bucket=bucket, history=1, storage=StorageType.FILE))
        await self.ensure_consumer(m.TrajectoryFinished, subjects.REWARD_CONSUMER)
        await self._js.create_object_store(subjects.BLOBS)

    async def wait_until_set_up(self, timeout_s: float) -> None:
        """Wait until the scheduler has created streams and buckets.

        Raises:
            NodeError: not within the time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                await self._js.object_store(subjects.BLOBS)
                return
            except (NotFoundError, NatsError):
                if time.monotonic() > deadline:
                    raise NodeError(f"no scheduler has set the bus up within {timeout_s:.0f} s") from None
            await asyncio.sleep(0.1)

    # --- publish ---------------------------------------------------------------------------------------------------

    async def publish(self, message: m.Message) -> bool:
        """Publish one message; on a stream, wait until it is stored.

        Returns:
            False when the stream refused it as the second message on a subject that takes one.
        """
        route = subjects.ROUTES[type(message)]
        subject, payload = subjects.subject_of(message), m.encode(message)
        if route.stream is None:
            await self._client.publish(subject, payload)
            return True
        try:
            await self._js.publish(subject, payload, headers=_headers(message))
        except APIError as error:
            if "maximum messages per subject" in (error.description or ""):
                return False
            raise JigsawError(f"the bus refused {type(message).__name__}: {error.description}") from error
        return True

    async def publish_all(self, batch: Sequence[m.Message]) -> None:
        """Publish many messages on streams, acknowledged together: one round trip, not one each.

        Raises:
            JigsawError: the bus doesn't confirm them.
        """
        for _ in range(PUBLISH_TRIES):
            try:
                await asyncio.wait_for(self._publish_once(batch), PUBLISH_S)
                return
            except (
                TimeoutError,
                NatsError,
            ) as error:  # a reconnect forgets acknowledgements: ask again, repeats are dropped
                self._log.warning("publish_unconfirmed", messages=len(batch), error=str(error) or type(error).__name__)
        raise JigsawError(f"the bus didn't confirm {len(batch)} messages in {PUBLISH_TRIES * PUBLISH_S:.0f} s")

    async def _publish_once(self, batch: Sequence[m.Message]) -> None:
        acks = [
            await self._js.publish_async(subjects.subject_of(message), m.encode(message), headers=_headers(message))
            for message in batch
        ]
        await asyncio.gather(*acks)

    # --- consume ---------------------------------------------------------------------------------------------------

    async def ensure_consumer(self, kind: type[m.Message], name: str, **known: str) -> None:
        """Create a durable pull consumer for a message type; safe to repeat. The scheduler alone does this."""
        await self._ensure(kind, name, subjects.subscription(kind, **known))

    async def ensure_job_queue(self, name: str) -> None:
        """The consumer for everything on the jobs stream."""
        await self._ensure(m.SubmitJob, name, "jobs.>")

    async def _ensure(self, kind: type[m.Message], name: str, subject: str) -> None:
        config = ConsumerConfig(durable_name=name, filter_subject=subject, ack_wait=ACK_WAIT_S, max_ack_pending=10_000)
        await self._js.add_consumer(_stream_of(kind), config)

    async def drop_consumer(self, kind: type[m.Message], name: str) -> None:
        """Delete a durable consumer; one that is gone already is fine."""
        try:
            await self._js.delete_consumer(_stream_of(kind), name)
        except NotFoundError:
            self._log.debug("consumer_already_gone", consumer=name)

    async def purge(self, kind: type[m.Message], **known: str) -> None:
        """Drop what is left of a message type on its stream."""
        await self._js.purge_stream(_stream_of(kind), subject=subjects.subscription(kind, **known))

    async def pull(self, kind: type[m.Message], name: str) -> "Puller":
        """Bind to a durable consumer.

        Raises:
            QueueGone: it doesn't exist: the scheduler creates it, and deletes a job's when the job has ended.
        """
        await self.require_consumer(_stream_of(kind), name)  # binding alone doesn't ask whether it is there
        subscription = await self._js.pull_subscribe_bind(consumer=name, stream=_stream_of(kind))
        return Puller(self, subscription, stream=_stream_of(kind), name=name)

    async def require_consumer(self, stream: str, name: str) -> None:
        """Ask the server whether a durable consumer exists.

        Raises:
            QueueGone: it doesn't.
        """
        try:
            await self._js.consumer_info(stream, name)
        except NotFoundError:
            raise QueueGone(f"there is no consumer {name} on {stream}") from None

    async def bury(self, msg: Msg, reason: str) -> None:
        """Publish a dead letter of a message that can't be processed, then terminate the message."""
        letter = m.DeadLetter(
            sender=self._instance, subject=msg.subject, reason=reason, payload=msg.data, died_at=time.time()
        )
        await self.publish(letter)
        await msg.term()
        self._log.error("dead_letter", subject=msg.subject, reason=reason)

    async def telemetry(self) -> AsyncIterator[m.AnyMessage]:
        """Everything on the telemetry subjects from now on; what can't be decoded is skipped with a warning."""
        subscription = await self._client.subscribe("telemetry.>", pending_msgs_limit=65536)
        try:
            async for msg in subscription.messages:
                try:
                    yield m.decode(msg.data)
                except MessageError as error:
                    self._log.warning("telemetry_undecodable", error=str(error))
        finally:
            await subscription.unsubscribe()

    async def history(self, kind: type[M], **known: str) -> list[M]:
        """What a limits stream holds of a message type, oldest first."""
        subject = subjects.subscription(kind, **known)
        subscription = await self._js.pull_subscribe(
            subject, stream=_stream_of(kind), config=ConsumerConfig(ack_policy=None)
        )
        found: list[M] = []
        info = await subscription.consumer_info()
        remaining = info.num_pending or 0
        while remaining > 0:
            for msg in await subscription.fetch(min(remaining, 256), timeout=5):
                await msg.ack()
                remaining -= 1
                message = m.decode(msg.data)
                if isinstance(message, kind):
                    found.append(message)
        await subscription.unsubscribe()
        return found

    # --- state -----------------------------------------------------------------------------------------------------

    async def table(self, kind: type[M]) -> "Table[M]":
        """The KV table of one kind of state."""
        bucket = subjects.BUCKETS[kind]
        return Table(self._js, await self._js.key_value(bucket), bucket=bucket, kind=kind, log=self._log)

    # --- request and reply -----------------------------------------------------------------------------------------

    async def request(self, instance: str, command: str, *, timeout_s: float = 5.0) -> str:
        """Call an endpoint of an instance; returns its answer.

        Raises:
            NodeError: nobody answers.
        """
        try:
            reply = await self._client.request(subjects.control_subject(instance, command), b"", timeout=timeout_s)
        except NatsError as error:
            raise NodeError(f"{instance} doesn't answer {command!r}: {error or type(error).__name__}") from None
        return reply.data.decode()


class Puller:
    """A durable pull consumer: fetches, decodes, buries what can't be decoded."""

    def __init__(self, bus: Bus, subscription: JetStreamContext.PullSubscription, *, stream: str, name: str) -> None:
        self._bus, self._subscription, self._stream, self._name = bus, subscription, stream, name

    async def fetch(self, count: int, *, wait_s: float = 5.0) -> list[Delivery]:
        """Up to ``count`` messages; empty when there is no work within ``wait_s``.

        Raises:
            QueueGone: the consumer was deleted.
        """
        try:
            msgs = await self._subscription.fetch(count, timeout=wait_s)
        except TimeoutError:  # nats-py raises its own or the built-in one; its own is a kind of the built-in
            return []
        except ServiceUnavailableError:  # nobody serves the consumer: it is gone, or the server isn't ready
            await self._bus.require_consumer(self._stream, self._name)
            await asyncio.sleep(NOT_READY_S)
            return []
        deliveries = []
        for msg in msgs:
            try:
                deliveries.append(Delivery(m.decode(msg.data), msg.metadata.num_delivered or 1, msg))
            except MessageError as error:
                await self._bus.bury(msg, str(error))
        return deliveries

    async def close(self) -> None:
        """Stop pulling; what was fetched and not acknowledged is delivered again."""
        try:
            await self._subscription.unsubscribe()
        except NatsError:
            return


def _stream_of(kind: type[m.Message]) -> str:
    stream = subjects.ROUTES[kind].stream
    if stream is None:
        raise MessageError(f"{kind.__name__} travels on no stream")
    return stream


def _headers(message: m.Message) -> dict[str, str] | None:
    id = subjects.message_id(message)
    return {"Nats-Msg-Id": id} if id else None


def _stream_config(stream: subjects.Stream) -> StreamConfig:
    return StreamConfig(
        name=stream.name,
        subjects=list(stream.subjects),
        retention=RetentionPolicy.WORK_QUEUE if stream.work_queue else RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        duplicate_window=DEDUPE_WINDOW_S,
        max_msgs=stream.max_messages,
        max_age=stream.max_age_s or None,
        max_msgs_per_subject=1 if stream.one_per_subject else -1,
        discard=DiscardPolicy.NEW if stream.one_per_subject else DiscardPolicy.OLD,
        discard_new_per_subject=stream.one_per_subject,
        allow_direct=True,
    )
