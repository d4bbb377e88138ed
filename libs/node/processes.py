"""The service processes of the embedded node: each in a session of its own, restarted when it dies, ended for good."""

import asyncio
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from structlog.typing import FilteringBoundLogger

from libs.common.child import die_with_parent
from libs.common.errors import NodeError
from libs.common.settings import Addresses, NodeSettings, save_settings
from libs.node.servers import last_line

RESTARTS = 5
RESTART_WINDOW_S = 60.0
FIRST_BACKOFF_S = 0.5


class Deaths:
    """Counts the recent deaths of what is started again: soon at first, then later and later, and not for ever."""

    def __init__(self) -> None:
        self._deaths: deque[float] = deque(maxlen=RESTARTS + 1)

    def another(self) -> int:
        """Note a death; returns how many there have been lately."""
        now = time.monotonic()
        self._deaths.append(now)
        return sum(died > now - RESTART_WINDOW_S for died in self._deaths)

    @staticmethod
    async def pause(recent: int) -> None:
        """Wait as long as it becomes after so many deaths."""
        await asyncio.sleep(FIRST_BACKOFF_S * 2 ** (recent - 1))


class ServiceProcess:
    """Keeps one service instance running.

    Args:
        role: the service, ``services.<role>``. instance: its id.
        settings: the node's settings file. home: its working directory. log: file that its output is added to.
        environment: addresses and the like, added to this process's own.
    """

    def __init__(
        self,
        *,
        role: str,
        instance: str,
        settings: Path,
        home: Path,
        environment: Mapping[str, str],
        log: FilteringBoundLogger,
    ) -> None:
        self.instance = instance
        self._command = [sys.executable, "-m", f"services.{role}", "--settings", str(settings), "--instance", instance]
        self._home, self._log_file = home, home / "logs" / f"{instance}.log"
        self._environment, self._log = environment, log
        self._process: asyncio.subprocess.Process | None = None
        self._ending = asyncio.Event()

    async def keep_running(self) -> None:
        """Run the service, and again when it dies.

        Raises:
            NodeError: it died too often in too short a time; with the last thing that it said.
        """
        deaths = Deaths()
        while not self._ending.is_set():
            self._process = await self._start()
            code = await self._process.wait()
            self._kill_session(self._process.pid)  # what it left behind would hold memory and cores
            if self._ending.is_set():
                return
            recent = deaths.another()
            self._log.warning("service_died", service=self.instance, code=code, deaths=recent)
            if recent > RESTARTS:
                raise NodeError(f"{self.instance} keeps dying (code {code}): {last_line(self._log_file)}")
            await deaths.pause(recent)

    def ask_to_end(self) -> None:
        """SIGTERM: it drains and ends, and isn't started again."""
        self._ending.set()
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and all that it started, at once."""
        self._ending.set()
        if self._process is not None:
            self._kill_session(self._process.pid)

    async def ended(self) -> None:
        """Wait until the process is gone."""
        if self._process is not None:
            await self._process.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        with self._log_file.open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *self._command,
                cwd=self._home,
                env={**os.environ, **self._environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    @staticmethod
    def _kill_session(pid: int) -> None:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # nobody is left in it


def planned(
    roles: Sequence[str], settings: NodeSettings, addresses: Addresses, *, log: FilteringBoundLogger
) -> list[ServiceProcess]:
    """A process for each of the roles, ``role-0``, ``role-1`` and so on, none of which runs yet.

    Raises:
        NodeError: their settings can't be written into the node's home.
    """
    home = Path(settings.home)
    file = home / "settings.toml"
    try:
        save_settings(settings, file)
    except OSError as error:
        raise NodeError(f"{file} can't be written: {error.strerror}") from None
    source = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [source, *settings.plugins.folders, os.environ.get("PYTHONPATH")]))
    environment = {**addresses.to_environment(), "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    return [
        ServiceProcess(
            role=role,
            instance=f"{role}-{roles[:index].count(role)}",
            settings=file,
            home=home,
            environment=environment,
            log=log,
        )
        for index, role in enumerate(roles)
    ]
