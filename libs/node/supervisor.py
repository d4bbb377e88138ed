"""The embedded node: its own NATS and Valkey and the four services as child processes, for as long as something needs it.

However it ends (its work is done, an error, a signal, even its own violent death), nothing of it is left running. Services
go first and drain, the servers after them. A second signal doesn't wait for anyone.
"""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec
import psutil
from structlog.typing import FilteringBoundLogger

from libs.common.bus import Bus
from libs.common.errors import JigsawError, NodeError, leaves
from libs.common.messages import Ping
from libs.common.settings import Addresses, NodeSettings
from libs.node.node_file import NodeFile, remove_node_file, sole_node, write_node_file
from libs.node.processes import RESTARTS, Deaths, ServiceProcess, planned
from libs.node.servers import Server, end_when_stuck, start_nats, start_valkey
from libs.node.space import require_space

READY_S = 60.0
DRAIN_S = 25.0
MIN_DISK_MB = 256
"""For the servers' files and the logs; what a job needs is checked when it is submitted."""

Result = TypeVar("Result")


class Interrupted(NodeError):
    """A signal ended the node before its work was done; everything has been cleaned up."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"ended by {signal.Signals(number).name}")


class Ports(msgspec.Struct, frozen=True):
    """Ports of the node's servers; None takes a free one."""

    nats: int | None = None
    redis: int | None = None


class Node(msgspec.Struct, frozen=True):
    """A node that is up."""

    home: Path
    settings: NodeSettings
    addresses: Addresses
    instances: list[str]


async def run_node(
    settings: NodeSettings, body: Callable[[Node], Awaitable[Result]], *, ports: Ports, log: FilteringBoundLogger
) -> Result:
    """Start a node, run ``body`` with it, and take everything down again. Call it from the main thread.

    Args:
        settings: with an absolute ``home``.
        body: what the node is for. ports: of its servers. log: of the supervisor.

    Raises:
        NodeError: the node can't start, or one of its services or servers doesn't stay up.
        Interrupted: SIGINT or SIGTERM came.
    """
    home = Path(settings.home)
    require_space(home, MIN_DISK_MB, purpose="a node")
    failures: list[JigsawError] = []
    with sole_node(home):
        try:
            return await _Supervisor(settings, home, log).run(body, ports)
        except* JigsawError as group:
            failures += leaves(group)  # what went wrong first took everything else down
    raise failures[0]


class _Supervisor:
    """The state of one run: which processes there are, and which signal came."""

    def __init__(self, settings: NodeSettings, home: Path, log: FilteringBoundLogger) -> None:
        self._settings, self._home, self._log = settings, home, log
        self._servers: list[Server] = []
        self._services: list[ServiceProcess] = []
        self._scope = anyio.CancelScope()
        self._signal: int | None = None

    async def run(self, body: Callable[[Node], Awaitable[Result]], ports: Ports) -> Result:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        results: list[Result] = []
        try:
            with self._scope:
                try:
                    results.append(await self._run(body, ports))
                finally:
                    with anyio.CancelScope(shield=True):
                        await self._take_down()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        if self._signal is not None:
            raise Interrupted(self._signal)
        return results[0]

    async def _run(self, body: Callable[[Node], Awaitable[Result]], ports: Ports) -> Result:
        addresses = await self._start_servers(ports)
        schedulers, rollouts = self._settings.scheduler.instances, self._settings.rollout.instances
        roles = [*["scheduler"] * schedulers, "reward", "trainer", *["rollout"] * rollouts]
        self._services = planned(roles, self._settings, addresses, log=self._log)
        node = Node(self._home, self._settings, addresses, [service.instance for service in self._services])
        async with anyio.create_task_group() as tasks:
            for server in self._servers:
                tasks.start_soon(self._keep_running, server)
                tasks.start_soon(self._end_when_stuck, server)
            for service in self._services:
                tasks.start_soon(service.keep_running)
            await self._wait_until_ready(node)
            self._announce(node)
            result = await body(node)
            tasks.cancel_scope.cancel()
        return result

    async def _start_servers(self, ports: Ports) -> Addresses:
        self._servers.append(start_nats(self._home, port=ports.nats))
        self._servers.append(start_valkey(self._home, port=ports.redis))
        for server in self._servers:
            await anyio.to_thread.run_sync(server.wait_until_answers, abandon_on_cancel=True)
        nats, redis = self._servers
        return Addresses(nats.url, redis.url)

    async def _keep_running(self, server: Server) -> None:
        """Start a server that ended again: it goes on from its files, and the services wait for it.

        Raises:
            NodeError: it ended too often in too short a time. Its data are on disk, and the next `up` goes on from there.
        """
        deaths = Deaths()
        while True:
            code = await server.ended()
            recent = deaths.another()
            self._log.warning("server_died", server=server.name, code=code, deaths=recent)
            if recent > RESTARTS:
                raise NodeError(f"{server.name} keeps dying (code {code}): {server.last_words}")
            await deaths.pause(recent)
            server.start_again()

    async def _end_when_stuck(self, server: Server) -> None:
        await end_when_stuck(server, home=self._home, log=self._log)

    async def _wait_until_ready(self, node: Node) -> None:
        """Until every service answers."""
        bus = await Bus.connect(node.addresses.nats_url, instance=f"supervisor-{os.getpid()}", log=self._log)
        try:
            deadline = time.monotonic() + READY_S
            for instance in node.instances:
                while not await _answers(bus, instance):
                    if time.monotonic() > deadline:
                        raise NodeError(f"{instance} isn't up after {READY_S:.0f} s; see {self._home / 'logs'}")
                    await anyio.sleep(0.1)
        finally:
            with anyio.CancelScope(shield=True):
                await bus.close()

    def _announce(self, node: Node) -> None:
        process = psutil.Process()
        write_node_file(
            self._home,
            NodeFile(
                pid=process.pid,
                pid_created=process.create_time(),
                nats_url=node.addresses.nats_url,
                redis_url=node.addresses.redis_url,
                started_at=time.time(),
                instances=node.instances,
            ),
        )

    async def _take_down(self) -> None:
        remove_node_file(self._home)
        for service in self._services:
            service.ask_to_end()
        with anyio.move_on_after(DRAIN_S):
            for service in self._services:
                await service.ended()
        for service in self._services:
            service.kill()
            await service.ended()
        for server in self._servers:
            await anyio.to_thread.run_sync(server.stop)

    def _on_signal(self, number: int) -> None:
        """First: end in order. Then: end."""
        if self._signal is None:
            self._signal = number
            self._scope.cancel()
            return
        for service in self._services:
            service.kill()
        for server in self._servers:
            server.kill()


async def _answers(bus: Bus, instance: str) -> bool:
    try:
        await bus.request(instance, Ping(sender="supervisor"), timeout_s=2.0)
    except NodeError:
        return False
    return True
