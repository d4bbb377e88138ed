"""The context of a service, for tests that run its parts in their own process."""

import anyio
import structlog

from libs.common.bus import Bus
from libs.common.endpoints import Endpoints
from libs.common.service import Context
from libs.common.settings import NodeSettings
from libs.common.store import TrajectoryStore


async def context_of(instance: str, settings: NodeSettings, bus: Bus, store: TrajectoryStore) -> Context:
    """A service instance on real servers."""
    log = structlog.get_logger()
    endpoints = await Endpoints.register(bus, instance.partition("-")[0], instance=instance, log=log)
    return Context(instance, settings, bus, store, log, endpoints, anyio.Event())
