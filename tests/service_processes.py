"""Services as processes of their own, as a node runs them: for tests that kill or freeze them."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from libs.common.child import die_with_parent
from libs.common.settings import Addresses, NodeSettings, save_settings
from tests.waiting import until

START_S = 30.0
ROOT = Path(__file__).parents[1]


async def start_service(
    role: str, instance: str, *, settings: Path, addresses: Addresses, plugins: Sequence[str], log: Path
) -> asyncio.subprocess.Process:
    """Start an instance in a session of its own; it dies with this process.

    Args:
        plugins: folders that users' code is imported from. log: file that its output is added to.
    """
    path = os.pathsep.join([str(ROOT), *plugins])
    with log.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", f"services.{role}", "--settings", str(settings), "--instance", instance),
            cwd=log.parent,
            env={**os.environ, **addresses.to_environment(), "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


class Services:
    """Service processes on one home.

    Args:
        folder: of settings and logs.
    """

    def __init__(self, folder: Path, settings: NodeSettings, addresses: Addresses) -> None:
        self._folder, self._settings, self._addresses = folder, folder / "node.toml", addresses
        self._plugins = settings.plugins.folders
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        save_settings(settings, self._settings)

    async def start(self, role: str, instance: str, *, said: str = "service_started") -> None:
        """Start an instance, and wait until it has said something."""
        self.processes[instance] = await start_service(
            role,
            instance,
            settings=self._settings,
            addresses=self._addresses,
            plugins=self._plugins,
            log=self._log(instance),
        )
        await until(lambda: said in self.log(instance), START_S)

    def log(self, instance: str) -> str:
        """Everything that an instance has said."""
        return self._log(instance).read_text()

    def send(self, instance: str, number: signal.Signals) -> None:
        """Send a signal to an instance alone."""
        self.processes[instance].send_signal(number)

    def send_all(self, instance: str, number: signal.Signals) -> None:
        """Send a signal to an instance and all its children, as if their machine stood still."""
        os.killpg(self.processes[instance].pid, number)

    def children(self, instance: str) -> list[psutil.Process]:
        """What an instance has started."""
        return psutil.Process(self.processes[instance].pid).children(recursive=True)

    async def ended(self, instance: str) -> int:
        """Wait for an instance's end; returns its exit code."""
        async with asyncio.timeout(20.0):
            return await self.processes[instance].wait()

    async def end(self) -> None:
        """Kill whatever is left."""
        for instance, process in self.processes.items():
            if process.returncode is None:
                self.send_all(instance, signal.SIGKILL)
                await process.wait()

    def _log(self, instance: str) -> Path:
        return self._folder / f"{instance}.log"


@asynccontextmanager
async def services(folder: Path, settings: NodeSettings, addresses: Addresses) -> AsyncIterator[Services]:
    """Services that are gone afterwards."""
    found = Services(folder, settings, addresses)
    try:
        yield found
    finally:
        await found.end()
