"""The bus: typed messages over NATS core, JetStream and KV.

Services speak in messages; this module turns them into subjects, headers, acknowledgements and watches. What can't be
decoded becomes a dead letter and is terminated: no silent drop, no endless redelivery.

Everything outlives an absence of the server of up to :data:`libs.common.patience.PATIENCE_S`, and then raises
:class:`libs.common.errors.Unreachable`; the rule is :meth:`libs.common.connection.Connection.ask`. What was published is
published again if its answer was lost: on streams that deduplicate it is dropped, and every message may come twice anyway.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Self, TypeVar
from uuid import uuid4

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, PubAck
from nats.js.errors import APIError, NotFoundError, ServerError, ServiceUnavailableError
from structlog.typing import FilteringBoundLogger

from libs.common import messages as m
from libs.common import streams, subjects
from libs.common.connection import ANSWER_S, Connection, say
from libs.common.errors import JigsawError, MessageError, NodeError
from libs.common.patience import PATIENCE_S
from libs.common.pulling import Puller
from libs.common.tables import Table

ACK_WAIT_S = 10.0
"""What was fetched comes again so long after whoever has it last said that it works on it."""

REQUEST_ID = "Jigsaw-Request-Id"
"""Header by which an instance knows a request again that is repeated."""

M = TypeVar("M", bound=m.Message)
T = TypeVar("T")


class Bus:
    """The project's messages on one connection to NATS."""

    def __init__(self, connection: Connection, *, instance: str, log: FilteringBoundLogger) -> None:
        self._connection, self._instance, self._log = connection, instance, log
        self._js = connection.js

    @classmethod
    async def connect(cls, url: str, *, instance: str, log: FilteringBoundLogger, patience_s: float = PATIENCE_S) -> Self:
        """Connect, and stay connected for as long as it takes once the first connection was made.

        Args:
            url: of the server. instance: id of who connects. log: told of trouble.
            patience_s: how long the first connection is tried.

        Raises:
            NodeError: no server at the url.
        """
        connection = await Connection.open(url, instance=instance, log=log, patience_s=patience_s)
        return cls(connection, instance=instance, log=log)

    @property
    def client(self) -> Client:
        """The connection itself, for :mod:`nats.micro`."""
        return self._connection.client

    @property
    def js(self) -> JetStreamContext:
        """JetStream on this connection, for what isn't a message; what is asked of it goes through :meth:`ask`."""
        return self._js

    async def ask(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """As :meth:`Connection.ask`."""
        return await self._connection.ask(attempt)

    def only_while(self, permit: Callable[[], None]) -> AbstractContextManager[None]:
        """Inside, call ``permit`` before every attempt of everything; what it raises forbids it."""
        return self._connection.only_while(permit)

    async def close(self) -> None:
        """Send what is under way and close."""
        await self._connection.close()

    async def set_up(self, *, reward_ack_wait_s: float = ACK_WAIT_S) -> None:
        """Create streams, buckets and the consumer that all jobs share; safe to repeat. The scheduler alone does this.

        Args:
            reward_ack_wait_s: how long what a reward service has fetched and doesn't speak of waits for another one.
        """
        await self.ask(lambda: streams.create(self._js))
        finished = subjects.subscription(m.TrajectoryFinished)
        await self._ensure(m.TrajectoryFinished, subjects.REWARD_CONSUMER, finished, ack_wait_s=reward_ack_wait_s)
        await self.ask(lambda: self._js.create_object_store(subjects.BLOBS))

    async def wait_until_set_up(self, timeout_s: float) -> None:
        """Wait until the scheduler has created streams and buckets.

        Raises:
            NodeError: not within the time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                await self.ask(lambda: self._js.object_store(subjects.BLOBS))
                return
            except NotFoundError:
                if time.monotonic() > deadline:
                    raise NodeError(f"no scheduler has set the bus up within {timeout_s:.0f} s") from None
            await asyncio.sleep(0.1)

    # --- publish ---------------------------------------------------------------------------------------------------

    async def publish(self, message: m.Message) -> bool:
        """Publish one message; on a stream, wait until it is stored, elsewhere lose it rather than wait.

        Returns:
            False when the stream refused it as the second message on a subject that takes one.
        """
        route = subjects.ROUTES[type(message)]
        subject, payload = subjects.subject_of(message), m.encode(message)
        if route.stream is None:
            await say(self.client.publish(subject, payload))
            return True
        stream, tried = route.stream, False

        async def attempt() -> bool:
            nonlocal tried
            again, tried = tried, True
            try:
                await self._js.publish(subject, payload, headers=_headers(message))
            except APIError as error:
                if "maximum messages per subject" in (error.description or ""):
                    # An earlier attempt may have been the first message there, and only its answer lost.
                    return again and (await self._js.get_last_msg(stream, subject)).data == payload
                if isinstance(error, ServiceUnavailableError | ServerError):
                    raise
                raise JigsawError(f"the bus refused {type(message).__name__}: {error.description}") from error
            return True

        return await self.ask(attempt)

    async def publish_all(self, batch: Sequence[m.Message]) -> None:
        """Publish many messages on streams, acknowledged together: one round trip, not one each."""
        await self.ask(lambda: asyncio.wait_for(self._publish_once(batch), ANSWER_S))

    async def _publish_once(self, batch: Sequence[m.Message]) -> None:
        acks: list[asyncio.Future[PubAck]] = []
        try:
            for message in batch:
                data, headers = m.encode(message), _headers(message)
                acks.append(await self._js.publish_async(subjects.subject_of(message), data, headers=headers))
            await asyncio.gather(*acks)
        finally:
            for ack in acks:  # one that never comes would take up room in the client's window for ever
                ack.cancel()

    # --- consume ---------------------------------------------------------------------------------------------------

    async def ensure_consumer(self, kind: type[m.Message], name: str, **known: str) -> None:
        """Create a durable pull consumer for a message type; safe to repeat. The scheduler alone does this."""
        await self._ensure(kind, name, subjects.subscription(kind, **known))

    async def take_job_queue(self, name: str) -> None:
        """Make this the one consumer of everything on the jobs stream.

        What an earlier one had been given and hadn't acknowledged comes again at once, and if that one still acknowledges
        something, nobody hears it.
        """
        stream = streams.stream_of(m.SubmitJob)
        for consumer in await self.ask(lambda: self._js.consumers_info(stream)):
            if consumer.name != name:
                await self.drop_consumer(m.SubmitJob, consumer.name)
        await self._ensure(m.SubmitJob, name, subjects.ALL_JOBS)

    async def _ensure(self, kind: type[m.Message], name: str, subject: str, *, ack_wait_s: float = ACK_WAIT_S) -> None:
        config = ConsumerConfig(durable_name=name, filter_subject=subject, ack_wait=ack_wait_s, max_ack_pending=10_000)
        await self.ask(lambda: self._js.add_consumer(streams.stream_of(kind), config))

    async def drop_consumer(self, kind: type[m.Message], name: str) -> None:
        """Delete a durable consumer; one that is gone already is fine."""
        try:
            await self.ask(lambda: self._js.delete_consumer(streams.stream_of(kind), name))
        except NotFoundError:
            self._log.debug("consumer_already_gone", consumer=name)

    async def purge(self, kind: type[m.Message], **known: str) -> None:
        """Drop what is left of a message type on its stream."""
        stream, subject = streams.stream_of(kind), subjects.subscription(kind, **known)
        await self.ask(lambda: self._js.purge_stream(stream, subject=subject))

    async def pull(self, kind: type[m.Message], name: str) -> Puller:
        """Bind to a durable consumer.

        Raises:
            QueueGone: it doesn't exist: the scheduler creates it, and deletes a job's when the job has ended.
        """
        return await Puller.bind(self._connection, stream=streams.stream_of(kind), name=name, bury=self._bury)

    async def _bury(self, msg: Msg, reason: str) -> None:
        """Publish a dead letter of a message that can't be processed, then terminate the message."""
        letter = m.DeadLetter(
            sender=self._instance, subject=msg.subject, reason=reason, payload=msg.data, died_at=time.time()
        )
        await self.publish(letter)
        await say(msg.term())
        self._log.error("dead_letter", subject=msg.subject, reason=reason)

    async def replay(self, letter: m.DeadLetter) -> None:
        """Publish what a dead letter holds where it was published before."""
        await self.ask(lambda: self._js.publish(letter.subject, letter.payload))

    async def telemetry(self) -> AsyncIterator[m.AnyMessage]:
        """Everything on the telemetry subjects from now on; what can't be decoded is skipped with a warning."""
        subscription = await self.client.subscribe(subjects.ALL_TELEMETRY, pending_msgs_limit=65536)
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
        stream, subject = streams.stream_of(kind), subjects.subscription(kind, **known)
        messages = (m.decode(data) for data in await self.ask(lambda: streams.contents(self._js, stream, subject)))
        return [message for message in messages if isinstance(message, kind)]

    # --- state -----------------------------------------------------------------------------------------------------

    async def table(self, kind: type[M]) -> "Table[M]":
        """The KV table of one kind of state."""
        bucket = subjects.BUCKETS[kind]
        values = await self.ask(lambda: self._js.key_value(bucket))
        return Table(self._connection, values, bucket=bucket, kind=kind)

    # --- request and reply -----------------------------------------------------------------------------------------

    async def request(self, instance: str, request: m.Message, *, timeout_s: float = 5.0) -> m.Answer:
        """Ask one instance for something, and wait for its answer.

        A call that the server's absence swallowed is repeated; if only its answer was, it is answered as the first time.

        Raises:
            NodeError: the server is there, but nobody answers, or it refuses.
        """
        subject, asked = subjects.request_subject(instance, type(request)), subjects.REQUESTS[type(request)]
        headers = {REQUEST_ID: uuid4().hex}

        async def attempt() -> m.AnyMessage:
            try:
                reply = await self.client.request(subject, m.encode(request), timeout=timeout_s, headers=headers)
            except (NoRespondersError, NatsTimeoutError) as error:
                raise NodeError(f"{instance} doesn't answer {asked!r}: {error}") from None
            return m.decode(reply.data)

        answer = await self.ask(attempt)
        if not isinstance(answer, m.Answer):
            raise NodeError(f"{instance} answers {asked!r} with {type(answer).__name__}")
        if answer.refused:
            raise NodeError(f"{instance} refuses {asked!r}: {answer.refused}")
        return answer


def _headers(message: m.Message) -> dict[str, str] | None:
    id = subjects.message_id(message)
    return {"Nats-Msg-Id": id} if id else None
