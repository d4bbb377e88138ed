"""Connections to Redis or Valkey that outlive an absence of the server, however it shows.

A command that fails because the server is away, cut off, still loads its files, or has no room for what is written is sent
again until it is answered or patience is over. So whatever is sent must be safe to repeat, also if it was carried out and
only its answer lost.
"""

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, OutOfMemoryError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from libs.common.patience import Tries

CONNECTIONS = 16
ANSWER_S = 10.0
CONNECT_S = 5.0

T = TypeVar("T")


def open_store(url: str, *, patience_s: float) -> Redis:
    """A client whose every command raises :class:`libs.common.errors.Unreachable` once patience is over, and not before.

    A task that finds all connections taken waits for one, whose user has patience of its own.
    """
    address = urlsplit(url)
    whom = f"the trajectory store at {address.scheme}://{address.hostname}:{address.port or 6379}"
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=CONNECTIONS,
        timeout=None,
        retry=_Patient(whom, patience_s),
        socket_timeout=ANSWER_S,
        socket_connect_timeout=CONNECT_S,
    )
    return Redis(connection_pool=pool)


class _NoRoom(RedisConnectionError):
    """The server's disk or memory is full: it doesn't write until there is room again, which is an absence like others."""


class _Patient(Retry):
    """Repeats by time instead of by count. ``BusyLoadingError`` is a kind of the client's ``ConnectionError``."""

    def __init__(self, whom: str, patience_s: float) -> None:
        super().__init__(NoBackoff(), retries=-1)
        self._whom, self._patience_s = whom, patience_s

    async def call_with_retry(
        self,
        do: Callable[[], Awaitable[T]],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """As the client calls it: ``fail`` drops the connection after each failure."""
        tries = Tries(self._whom, patience_s=self._patience_s)
        failures = 0
        while True:
            try:
                return await _answered(do)
            except AuthenticationError:
                raise
            except self._supported_errors as error:
                if is_retryable and not is_retryable(error):
                    raise
                failures += 1
                await (fail(error, failures) if with_failure_count else fail(error))
                pause_s = tries.failed(error)
            await asyncio.sleep(pause_s)

    def __deepcopy__(self, _: dict[int, Any]) -> "_Patient":
        return copy.copy(self)


async def _answered(do: Callable[[], Awaitable[T]]) -> T:
    """What ``do`` gives: the answer to a command, or a list of them that may hold errors.

    Raises:
        _NoRoom: the server refused, or refused some of it.
    """
    try:
        answer = await do()
    except ResponseError as error:
        _require_room(error)
        raise
    for part in answer if isinstance(answer, list) else ():
        _require_room(part)
    return answer


def _require_room(answer: object) -> None:
    if isinstance(answer, OutOfMemoryError):
        raise _NoRoom("its memory is full")
    if isinstance(answer, ResponseError) and "MISCONF" in str(answer):
        raise _NoRoom(str(answer).partition("MISCONF ")[2])
