"""One connection to NATS that comes back by itself, and the rule by which it is asked again what it didn't answer.

The client reconnects for as long as it takes, but it forgets what was under way: answers to what was asked before never
come, and what is asked meanwhile fails in a dozen ways. So whatever wants an answer goes through :meth:`Connection.ask`. It
stops waiting the moment that the connection is lost, and asks again once it is back. Hence everything that is asked must be
safe to repeat, and an attempt must be able to tell that an earlier one had got through.

Nothing is buffered while the server is away: what was to be said then may no longer be true, or allowed, later.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Self, TypeVar

import anyio
from nats.aio.client import Client
from nats.errors import (
    ConnectionClosedError,
    ConnectionReconnectingError,
    NoRespondersError,
    OutboundBufferLimitError,
    StaleConnectionError,
)
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.errors import NoStreamResponseError, ServerError, ServiceUnavailableError, TooManyStalledMsgsError
from structlog.typing import FilteringBoundLogger

from libs.common.errors import NodeError, Unreachable
from libs.common.patience import PATIENCE_S, Tries

ANSWER_S = 10.0
"""How long one attempt waits for its answer, where the connection seems to stand."""

PING_S = 5.0
PINGS_UNANSWERED = 2
"""A connection that is cut without a word is found out, and made anew, after (PINGS_UNANSWERED + 1) * PING_S."""

RECONNECT_S = 0.25

T = TypeVar("T")


class CutOff(NatsError):
    """The connection was lost while an answer was awaited."""

    def __str__(self) -> str:
        return "the connection was lost"


TRANSIENT = (
    CutOff,
    TimeoutError,  # nats-py raises its own or the built-in one; its own is a kind of the built-in
    ConnectionError,
    ConnectionReconnectingError,
    OutboundBufferLimitError,
    StaleConnectionError,
    NoRespondersError,
    NoStreamResponseError,
    ServiceUnavailableError,
    ServerError,  # its disk is full, say
    TooManyStalledMsgsError,  # what the client makes of a cancelled publication
)
"""What a server raises that is away, back but not ready yet, or out of room."""


async def say(word: Awaitable[None]) -> None:
    """Say something that nobody answers; while the server is away, it is lost."""
    with contextlib.suppress(OutboundBufferLimitError, ConnectionClosedError):
        await word


class Connection:
    """A connection that was made once; see :meth:`open`."""

    def __init__(self, client: Client, *, url: str, log: FilteringBoundLogger) -> None:
        self.client, self._url, self._log = client, url, log
        self.js: JetStreamContext = client.jetstream(timeout=ANSWER_S)
        self._up = anyio.Event()
        self._last_error = ""
        self._waiting: set[anyio.CancelScope] = set()
        self._permit: Callable[[], None] = lambda: None

    @classmethod
    async def open(cls, url: str, *, instance: str, log: FilteringBoundLogger, patience_s: float) -> Self:
        """Connect, and stay connected for as long as it takes once the first connection was made.

        Args:
            url: of the server. instance: id of who connects. log: told of trouble.
            patience_s: how long the first connection is tried.

        Raises:
            NodeError: no server at the url.
        """
        client = Client()
        connection = cls(client, url=url, log=log)
        try:
            async with asyncio.timeout(patience_s):  # the client's own patience is endless, from the first connection on
                await client.connect(
                    url,
                    name=instance,
                    error_cb=connection._note_error,
                    disconnected_cb=connection._went_down,
                    reconnected_cb=connection._came_back,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=RECONNECT_S,  # type: ignore[arg-type]  # any number of seconds will do
                    connect_timeout=5,
                    allow_reconnect=True,
                    ping_interval=PING_S,  # type: ignore[arg-type]  # likewise
                    max_outstanding_pings=PINGS_UNANSWERED,
                    pending_size=0,
                    inbox_prefix=f"_INBOX.{instance}",
                )
        except (NatsError, OSError, ValueError) as error:  # a TimeoutError is an OSError
            why = connection._last_error or str(error) or type(error).__name__
            raise NodeError(f"no NATS server answers at {url}: {why}") from None
        connection._up.set()
        return connection

    async def close(self) -> None:
        """Send what is under way and close; bounded, because it can hang. Without a server there is nothing to send."""
        if self.client.is_connected:
            try:
                await asyncio.wait_for(self.client.flush(timeout=2), 3.0)
            except (NatsError, TimeoutError):
                self._log.warning("bus_flush_failed")
        with contextlib.suppress(OSError):  # of a connection that broke just now
            await self.client.close()

    @contextlib.contextmanager
    def only_while(self, permit: Callable[[], None]) -> Iterator[None]:
        """Inside, call ``permit`` before every attempt; what it raises forbids it."""
        before, self._permit = self._permit, permit
        try:
            yield
        finally:
            self._permit = before

    async def ask(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The answer of ``attempt``, which is repeated while the server is away.

        Args:
            attempt: safe to repeat, also when an earlier one got through and only its answer was lost.

        Raises:
            Unreachable: patience is over, or the connection was closed for good.
        """
        tries = Tries(f"NATS at {self._url}", patience_s=PATIENCE_S)
        while True:
            self._permit()
            try:
                return await self.while_up(attempt)
            except ConnectionClosedError:
                raise Unreachable(f"the connection to NATS at {self._url} is closed") from None
            except TRANSIENT as error:
                why = str(error) or type(error).__name__
                pause_s = tries.failed(why)
                self._log.debug("asked_again", why=why)
            with anyio.move_on_after(tries.left_s):
                await self._up.wait()
            await anyio.sleep(pause_s)

    async def while_up(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The answer of ``attempt``.

        Raises:
            CutOff: the connection was lost before it came.
        """
        if not self._up.is_set():
            raise CutOff
        with anyio.CancelScope() as scope:
            self._waiting.add(scope)
            try:
                return await attempt()
            finally:
                self._waiting.discard(scope)
        raise CutOff

    async def _went_down(self) -> None:
        if not self._up.is_set():
            return
        self._up = anyio.Event()
        if not self.client.is_closed:
            self._log.warning("bus_away")
        for scope in list(self._waiting):
            scope.cancel()

    async def _came_back(self) -> None:
        self._log.info("bus_reconnected")
        self._up.set()

    async def _note_error(self, error: Exception) -> None:
        """An error that no caller sees; while the server is away, that it is says enough."""
        self._last_error = str(error)
        tell = self._log.warning if self._up.is_set() else self._log.debug
        tell("bus_error", error=str(error) or type(error).__name__)
