"""What an instance can be asked: request-reply endpoints, registered through ``nats.micro``.

So the ecosystem's own tools (``nats micro ls``, ``info``, ``stats``) see every instance and count its requests.

A request that is repeated, because its answer was lost with the connection, is answered as the first time and not carried
out again: letting go of three trajectories twice would be letting go of six.
"""

import importlib.metadata
import time
from collections.abc import Awaitable, Callable
from typing import Self, TypeVar

from nats.micro import add_service
from nats.micro.request import Request
from nats.micro.service import Service
from structlog.typing import FilteringBoundLogger

from libs.common import messages as m
from libs.common import subjects
from libs.common.bus import REQUEST_ID, Bus
from libs.common.connection import say
from libs.common.errors import JigsawError
from libs.common.patience import PATIENCE_S

R = TypeVar("R", bound=m.Message)

REMEMBERED_S = 2 * PATIENCE_S
"""A request isn't repeated for longer than patience lasts."""


class Endpoints:
    """The requests that one instance answers."""

    def __init__(self, service: Service, *, instance: str, log: FilteringBoundLogger) -> None:
        self._service, self._instance, self._log = service, instance, log
        self._answered: dict[str, tuple[float, bytes]] = {}  # by the request's id, oldest first

    @classmethod
    async def register(cls, bus: Bus, role: str, *, instance: str, log: FilteringBoundLogger) -> Self:
        """Make an instance of a role visible; it answers pings from now on."""
        service = await add_service(
            bus.client,
            name=f"jigsaw-{role}",
            version=importlib.metadata.version("jigsawrl"),
            description=f"JigsawRL {role}",
            metadata={"instance": instance},
        )
        endpoints = cls(service, instance=instance, log=log)
        await endpoints.answer(m.Ping, endpoints._pong)
        return endpoints

    async def answer(self, kind: type[R], handler: Callable[[R], Awaitable[m.Answer]]) -> None:
        """Answer requests of a kind; a :class:`JigsawError` of the handler is a refusal with its text."""

        async def respond(request: Request) -> None:  # one at a time
            id = (request.headers or {}).get(REQUEST_ID)
            if id is not None and id in self._answered:
                _, data = self._answered[id]
            else:
                data = await reply(request.data)
                self._remember(id, data)
            await say(request.respond(data))

        async def reply(data: bytes) -> bytes:
            try:
                asked = m.decode(data)
                if not isinstance(asked, kind):
                    raise JigsawError(f"{type(asked).__name__} came where {kind.__name__} was expected")
                answer = await handler(asked)
            except JigsawError as error:
                self._log.warning("request_refused", request=subjects.REQUESTS[kind], reason=str(error))
                answer = m.Answer(sender=self._instance, refused=str(error))
            return m.encode(answer)

        subject = subjects.request_subject(self._instance, kind)
        await self._service.add_endpoint(name=subjects.REQUESTS[kind], subject=subject, handler=respond)

    def _remember(self, id: str | None, answer: bytes) -> None:
        now = time.monotonic()
        while self._answered and now - next(iter(self._answered.values()))[0] > REMEMBERED_S:
            del self._answered[next(iter(self._answered))]
        if id is not None:
            self._answered[id] = (now, answer)

    async def _pong(self, _: m.Ping) -> m.Answer:
        return m.Answer(sender=self._instance)
