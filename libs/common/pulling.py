"""Pulling messages from a durable consumer of a stream: never more than there is room for.

nats-py's own ``fetch`` isn't used, because it may have two requests at the server at once: what comes for the second one
waits in the client, unseen, until there is room again, or until the server gives it to somebody else after ``ack_wait``.
Here a fetch is one request with an inbox of its own, and nothing is sent to an inbox that nobody listens to any more.
"""

import contextlib
from collections.abc import Awaitable, Callable

import anyio
import msgspec
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import Header, StatusCode
from nats.js.errors import NotFoundError, ServiceUnavailableError

from libs.common import messages as m
from libs.common.connection import ANSWER_S, Connection, say
from libs.common.errors import MessageError, QueueGone

_NO_MORE = (StatusCode.NO_MESSAGES, StatusCode.REQUEST_TIMEOUT)

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

    def __init__(self, connection: Connection, *, stream: str, name: str, bury: Bury) -> None:
        self._connection, self._stream, self._name, self._bury = connection, stream, name, bury

    @classmethod
    async def bind(cls, connection: Connection, *, stream: str, name: str, bury: Bury) -> "Puller":
        """To a consumer that is there.

        Raises:
            QueueGone: it isn't.
        """
        await connection.ask(lambda: _require(connection.js, stream, name))
        return cls(connection, stream=stream, name=name, bury=bury)

    async def fetch(self, count: int, *, wait_s: float = 5.0) -> list[Delivery]:
        """What there is, at most ``count`` messages; if there is nothing, what comes first within ``wait_s``.

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
        """One request, up to its end: all that was asked for, or the server's word that there is no more."""
        client, found = self._connection.client, list[Msg]()
        inbox = client.new_inbox()
        subscription = await client.subscribe(inbox)
        try:
            # Both together: don't wait for more than there is; but wait, if there is nothing.
            request = {"batch": count, "no_wait": True, "expires": int(wait_s * 1e9)}
            await client.publish(self._next, msgspec.json.encode(request), reply=inbox)
            while len(found) < count:
                msg = await subscription.next_msg(timeout=wait_s + ANSWER_S)
                status = (msg.headers or {}).get(Header.STATUS)
                if status is None:
                    found.append(msg)
                elif status in _NO_MORE:
                    break
                else:  # the consumer is gone, or the server isn't ready
                    await _require(self._connection.js, self._stream, self._name)
                    raise ServiceUnavailableError(description=(msg.headers or {}).get(Header.DESCRIPTION))
        except TimeoutError:
            if not found:
                raise
        finally:
            with anyio.CancelScope(shield=True), contextlib.suppress(NatsError):
                await subscription.unsubscribe()
        return found

    @property
    def _next(self) -> str:
        return f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._name}"


async def _require(js: JetStreamContext, stream: str, name: str) -> None:
    """Ask the server once whether a durable consumer exists.

    Raises:
        QueueGone: it doesn't.
    """
    try:
        await js.consumer_info(stream, name)
    except NotFoundError:
        raise QueueGone(f"there is no consumer {name} on {stream}") from None
