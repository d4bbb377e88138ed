"""What an instance can be asked: request-reply endpoints, registered through ``nats.micro``.

So the ecosystem's own tools (``nats micro ls``, ``info``, ``stats``) see every instance and count its requests.
"""

import importlib.metadata
from collections.abc import Awaitable, Callable
from typing import Self, TypeVar

from nats.micro import add_service
from nats.micro.request import Request
from nats.micro.service import Service
from structlog.typing import FilteringBoundLogger

from libs.common import messages as m
from libs.common import subjects
from libs.common.bus import Bus
from libs.common.errors import JigsawError

R = TypeVar("R", bound=m.Message)


class Endpoints:
    """The requests that one instance answers."""

    def __init__(self, service: Service, *, instance: str, log: FilteringBoundLogger) -> None:
        self._service, self._instance, self._log = service, instance, log

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

        async def respond(request: Request) -> None:
            try:
                asked = m.decode(request.data)
                if not isinstance(asked, kind):
                    raise JigsawError(f"{type(asked).__name__} came where {kind.__name__} was expected")
                answer = await handler(asked)
            except JigsawError as error:
                self._log.warning("request_refused", request=subjects.REQUESTS[kind], reason=str(error))
                answer = m.Answer(sender=self._instance, refused=str(error))
            await request.respond(m.encode(answer))

        subject = subjects.request_subject(self._instance, kind)
        await self._service.add_endpoint(name=subjects.REQUESTS[kind], subject=subject, handler=respond)

    async def _pong(self, _: m.Ping) -> m.Answer:
        return m.Answer(sender=self._instance)
