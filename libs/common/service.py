"""The shell that every service shares: connect, register, announce, run one task group, end cleanly on a signal.

A service's ``__main__`` names its role and hands over its body. The body gets a :class:`Context`; it returns when it has
drained after ``context.stopping`` was set. A task that dies takes the process down with a non-zero exit: a supervisor
restarts it, and everything that matters is in the store and on the bus.
"""

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import msgspec
from structlog.typing import FilteringBoundLogger

from libs.common.bus import Bus
from libs.common.endpoints import Endpoints
from libs.common.errors import JigsawError, leaves
from libs.common.logging import configure
from libs.common.settings import Addresses, NodeSettings, load_settings
from libs.common.store import TrajectoryStore

DRAIN_S = 20.0
SET_UP_PATIENCE_S = 60.0


class Context(msgspec.Struct):
    """What a service body works with."""

    instance: str
    settings: NodeSettings
    bus: Bus
    store: TrajectoryStore
    log: FilteringBoundLogger
    endpoints: Endpoints
    stopping: anyio.Event


Body = Callable[[Context], Awaitable[None]]


def run_service(role: str, body: Body, *, sets_up_bus: bool = False) -> None:
    """Entry point of a service process; ends it with exit code 0, or 1 after one clear line.

    Args:
        role: name of the service in the registry and of its instances by default.
        body: the service.
        sets_up_bus: whether this service creates streams and buckets (the scheduler) instead of waiting for them.
    """
    parser = argparse.ArgumentParser(prog=f"python -m services.{role}", description=f"JigsawRL {role} service")
    parser.add_argument("--settings", type=Path, required=True, help="the node's settings file (TOML)")
    parser.add_argument("--instance", default=f"{role}-{socket.gethostname()}-{os.getpid()}", help="unique instance id")
    arguments = parser.parse_args()
    log = configure(instance=arguments.instance)
    try:
        settings = load_settings(arguments.settings)
        log = configure(instance=arguments.instance, level=settings.log_level)
        shell = _Shell(role, body, arguments.instance, settings, log, sets_up_bus)
        anyio.run(_serve, shell)
    except* JigsawError as group:
        failures: list[JigsawError] = leaves(group)
        for error in failures:
            log.error("service_failed", error=str(error))
        sys.exit(1)


class _Shell(msgspec.Struct, frozen=True):
    """What :func:`run_service` was called with, once the settings are read."""

    role: str
    body: Body
    instance: str
    settings: NodeSettings
    log: FilteringBoundLogger
    sets_up_bus: bool


async def _serve(shell: _Shell) -> None:
    addresses = Addresses.from_environment()
    bus = await Bus.connect(addresses.nats_url, instance=shell.instance, log=shell.log)
    try:
        store = await TrajectoryStore.connect(addresses.redis_url)
        try:
            await store.install(replace=shell.sets_up_bus)
            if shell.sets_up_bus:
                await bus.set_up(reward_ack_wait_s=shell.settings.worker_lost_s)
            else:
                await bus.wait_until_set_up(SET_UP_PATIENCE_S)
            endpoints = await Endpoints.register(bus, shell.role, instance=shell.instance, log=shell.log)
            context = Context(shell.instance, shell.settings, bus, store, shell.log, endpoints, anyio.Event())
            shell.log.info("service_started", role=shell.role)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_stop_on_signal, context, tasks.cancel_scope)
                await shell.body(context)
                tasks.cancel_scope.cancel()
            shell.log.info("service_stopped")
        finally:
            await store.close()
    finally:
        await bus.close()


async def _stop_on_signal(context: Context, scope: anyio.CancelScope) -> None:
    """First signal: drain, for a bounded time. Second: stop now."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        waiting = aiter(signals)
        number = await anext(waiting)
        context.log.info("draining", signal=signal.Signals(number).name)
        context.stopping.set()
        with anyio.move_on_after(DRAIN_S):
            await anext(waiting)
        context.log.warning("drain_cut_short")
        scope.cancel()


def now() -> float:
    """Wall-clock time in seconds, for messages."""
    return time.time()
