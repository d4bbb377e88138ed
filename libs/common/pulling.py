"""Pulling messages from a durable consumer of a stream."""

import contextlib
from collections.abc import Awaitable, Callable

import msgspec
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError, ServiceUnavailableError

from libs.common import messages as m
from libs.common.connection import Connection, say
from libs.common.errors import MessageError, QueueGone

Bury = Callable[[Msg, str], Awaitable[None]]


class Delivery(msgspec.Struct, frozen=True, eq=False):
    """A message from a stream, to be acknowledged once its effect is safe.

    What is said of it while the server is away is lost: the message comes again, which every receiver must bear anyway.
    """

    message: m.AnyMessage
    deliveries: int
    _msg: Msg

    async def ack(self) -> None:
        """Its effect is safe: never deliver it again."""
        await say(self._msg.ack())

    async def extend(self) -> None:
        """It is being worked on: wait longer before delivering it to someone else."""
        await say(self._msg.in_progress())

    async def retry(self, after_s: float) -> None:
        """Deliver it again later, to anyone."""
        await say(self._msg.nak(delay=after_s))


class Puller:
    """A durable pull consumer: fetches, decodes, buries what can't be decoded.

    Args:
        bury: sets a message aside, with the reason.
    """

    def __init__(
        self, connection: Connection, subscription: JetStreamContext.PullSubscription, *, stream: str, name: str, bury: Bury
    ) -> None:
        self._connection, self._subscription, self._bury = connection, subscription, bury
        self._stream, self._name = stream, name

    @classmethod
    async def bind(cls, connection: Connection, stream: str, name: str, *, bury: Bury) -> "Puller":
        """To a consumer that is there.

        Raises:
            QueueGone: it isn't.
        """
        await connection.ask(lambda: _require(connection.js, stream, name))  # binding alone doesn't ask whether it is there
        subscription = await connection.ask(lambda: connection.js.pull_subscribe_bind(consumer=name, stream=stream))
        return cls(connection, subscription, stream=stream, name=name, bury=bury)

    async def fetch(self, count: int, *, wait_s: float = 5.0) -> list[Delivery]:
        """Up to ``count`` messages; empty when there is no work within ``wait_s``.

        Raises:
            QueueGone: the consumer was deleted.
        """
        msgs = await self._connection.ask(lambda: self._fetch(count, wait_s))
        deliveries = []
        for msg in msgs:
            try:
                deliveries.append(Delivery(m.decode(msg.data), msg.metadata.num_delivered or 1, msg))
            except MessageError as error:
                await self._bury(msg, str(error))
        return deliveries

    async def _fetch(self, count: int, wait_s: float) -> list[Msg]:
        try:
            return await self._subscription.fetch(count, timeout=wait_s)
        except TimeoutError:  # nats-py raises its own or the built-in one; its own is a kind of the built-in
            return []
        except ServiceUnavailableError:  # nobody serves the consumer: it is gone, or the server isn't ready
            await _require(self._connection.js, self._stream, self._name)
            raise

    async def close(self) -> None:
        """Stop pulling; what was fetched and not acknowledged is delivered again."""
        with contextlib.suppress(NatsError):
            await self._subscription.unsubscribe()


async def _require(js: JetStreamContext, stream: str, name: str) -> None:
    """Ask the server once whether a durable consumer exists.

    Raises:
        QueueGone: it doesn't.
    """
    try:
        await js.consumer_info(stream, name)
    except NotFoundError:
        raise QueueGone(f"there is no consumer {name} on {stream}") from None
