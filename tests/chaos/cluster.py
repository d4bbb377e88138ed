"""A cluster to be attacked: its own servers, its own service processes, and a wire from each process to each server.

Two machines that share a disk, each a device with rollout workers, a trainer, a reward service and a scheduler, of which one
stands by. Every process comes back a moment after it has died, as under any supervisor, but never later and later:
here dying is the order of the day.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import anyio
import psutil
import structlog

from libs.common import messages as m
from libs.common.bus import Bus
from libs.common.errors import JigsawError
from libs.common.settings import (
    Addresses,
    DeviceSettings,
    NodeSettings,
    PluginSettings,
    RolloutSettings,
    SchedulerSettings,
    save_settings,
)
from libs.common.store import TrajectoryStore
from libs.node.servers import Server, start_nats, start_valkey
from tests.chaos.append_log import AppendLog
from tests.chaos.proxy import Wire
from tests.service_processes import start_service

PLUGINS = str(Path(__file__).parents[1] / "plugins")

MACHINES = ("left", "right")
WORKER_LOST_S = 2.0
SCHEDULER_LEASE_S = 1.0
COMES_BACK_S = 0.05
READY_S = 30.0
END_S = 15.0


class Instance:
    """One service process that comes back when it dies.

    Args:
        name: its id. bus, store: its wires. settings: its machine's. home: where its log lies.
    """

    def __init__(self, role: str, name: str, *, settings: Path, home: Path, bus: Wire, store: Wire) -> None:
        self.role, self.name, self.bus, self.store = role, name, bus, store
        self._settings, self._log = settings, home / "logs" / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._closing = False
        self.starts = 0

    async def keep_running(self) -> None:
        """Run it, and again whenever it has ended, until :meth:`close`."""
        while not self._closing:
            self._process = await self._start()
            self.starts += 1
            await self._process.wait()
            await asyncio.sleep(COMES_BACK_S)

    @property
    def is_up(self) -> bool:
        """Whether it has a process now."""
        return self._process is not None and self._process.returncode is None

    @property
    def process(self) -> psutil.Process:
        """Its process now.

        Raises:
            psutil.NoSuchProcess: it is dead at the moment.
        """
        if self._process is None or self._process.returncode is not None:
            raise psutil.NoSuchProcess(0, name=self.name)
        return psutil.Process(self._process.pid)

    def children(self, words: str) -> list[psutil.Process]:
        """Processes that it has started, with ``words`` in their command line."""
        found = []
        for child in self.process.children(recursive=True):
            try:
                if words in " ".join(child.cmdline()):
                    found.append(child)
            except psutil.NoSuchProcess:
                continue
        return found

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a dead process doesn't mind."""
        try:
            self.process.send_signal(number)
        except psutil.NoSuchProcess:
            return

    async def close(self) -> None:
        """End it in order, by force if that takes too long."""
        self._closing = True
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        if self._process is None:
            return
        with anyio.move_on_after(END_S):
            await self._process.wait()
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
            raise AssertionError(f"{self.name} didn't end within {END_S:g} s")

    async def _start(self) -> asyncio.subprocess.Process:
        return await start_service(
            self.role,
            self.name,
            settings=self._settings,
            addresses=Addresses(f"nats://127.0.0.1:{self.bus.port}", f"redis://127.0.0.1:{self.store.port}"),
            plugins=[PLUGINS],
            log=self._log,
        )


class Cluster:
    """See :func:`running_cluster`; ``bus`` and ``store`` are the observer's own connections, which nobody cuts."""

    def __init__(self, home: Path, nats: Server, valkey: Server, bus: Bus, store: TrajectoryStore) -> None:
        self.home, self.nats, self.valkey, self.bus, self.store = home, nats, valkey, bus, store
        self.valkey_log = AppendLog(home / "valkey" / "appendonlydir")
        self.instances: dict[str, Instance] = {}

    def with_role(self, role: str) -> list[Instance]:
        """All instances of a service."""
        return [instance for instance in self.instances.values() if instance.role == role]

    async def all_answer(self) -> None:
        """Wait until every instance answers.

        Raises:
            TimeoutError: one doesn't.
        """
        with anyio.fail_after(READY_S):
            for name in self.instances:
                while not await self._answers(name):
                    await anyio.sleep(0.05)

    async def _answers(self, name: str) -> bool:
        try:
            await self.bus.request(name, m.Ping(sender="chaos"), timeout_s=1.0)
        except JigsawError:
            return False
        return True

    async def add(self, role: str, name: str, settings: Path) -> Instance:
        """Lay wires for an instance that is to be started."""
        bus, store = await Wire.lay(self.nats.port), await Wire.lay(self.valkey.port)
        instance = Instance(role, name, settings=settings, home=self.home, bus=bus, store=store)
        self.instances[name] = instance
        return instance

    @classmethod
    async def connect(cls, home: Path, nats: Server, valkey: Server) -> Self:
        """The cluster, still without any instance."""
        bus = await Bus.connect(nats.url, instance="chaos", log=structlog.get_logger())
        return cls(home, nats, valkey, bus, await TrajectoryStore.connect(valkey.url))


@asynccontextmanager
async def running_cluster(home: Path, *, rollouts: int) -> AsyncIterator[Cluster]:
    """A cluster that is up, with its files in ``home`` and ``rollouts`` on each machine; all of it is gone afterwards."""
    with start_nats(home) as nats, start_valkey(home) as valkey:
        nats.wait_until_answers()
        valkey.wait_until_answers()
        cluster = await Cluster.connect(home, nats, valkey)
        for role, name, machine in _layout(rollouts):
            await cluster.add(role, name, _settings(home, machine, rollouts))
        try:
            async with asyncio.TaskGroup() as tasks:
                looking = tasks.create_task(cluster.valkey_log.keep_looking())
                for instance in cluster.instances.values():
                    tasks.create_task(instance.keep_running())
                try:
                    await cluster.all_answer()
                    yield cluster
                finally:
                    looking.cancel()
                    await _close(cluster)
        finally:
            await cluster.store.close()
            await cluster.bus.close()


async def _close(cluster: Cluster) -> None:
    """Services first, then their wires."""
    instances = list(cluster.instances.values())
    ends = await asyncio.gather(*(instance.close() for instance in instances), return_exceptions=True)
    for instance in instances:
        await instance.bus.close()
        await instance.store.close()
    for end in ends:
        if isinstance(end, BaseException):
            raise end


def _layout(rollouts: int) -> list[tuple[str, str, str]]:
    """Role, name and machine of every instance."""
    workers = [
        (role, f"{role}-{machine}-{number}", machine)
        for machine in MACHINES
        for role, count in (("trainer", 1), ("rollout", rollouts))
        for number in range(count)
    ]
    return [
        ("scheduler", "scheduler-0", MACHINES[0]),
        ("scheduler", "scheduler-1", MACHINES[1]),
        ("reward", "reward-0", MACHINES[0]),
        ("reward", "reward-1", MACHINES[1]),
        *workers,
    ]


def _settings(home: Path, machine: str, rollouts: int) -> Path:
    """The settings file of a machine: devices of their own, one disk for both."""
    path = home / f"{machine}.toml"
    if not path.exists():
        (home / "logs").mkdir(exist_ok=True)
        cores = sorted(os.sched_getaffinity(0))[:2]
        settings = NodeSettings(
            home=str(home),
            device=DeviceSettings(id=machine, cores=cores, memory_mb=4096),
            rollout=RolloutSettings(instances=rollouts),
            plugins=PluginSettings(allow=["jigsaw_test_rewards.*"], folders=[PLUGINS]),
            scheduler=SchedulerSettings(policy="static-split", instances=2, lease_s=SCHEDULER_LEASE_S),
            worker_lost_s=WORKER_LOST_S,
        )
        save_settings(settings, path)
    return path
