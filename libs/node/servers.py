"""The embedded node's two servers: NATS with JetStream and Valkey, on this machine only, on files in the node's home.

A server dies with the process that started it (with the *thread*, to be exact: start them from the main one), so that
nothing is left behind however that process ends. Starting is quick; waiting until a server answers is a step of its own.
"""

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self
from urllib.error import HTTPError

import anyio
from structlog.typing import FilteringBoundLogger

from libs.common.child import die_with_parent
from libs.common.errors import NodeError
from libs.node import binaries
from libs.node.space import free_space_mb

HOST = "127.0.0.1"
ANSWER_S = 15.0
STOP_S = 10.0
LOOK_S = 5.0
ROOM_MB = 16
"""A server that ran out of disk is started again once so much is free."""

# The limit of the file store is the disk: left out, it would be a share of what is free at the start, for ever.
_NATS_CONFIG = """\
listen: "{host}:{port}"
http: "{host}:{monitor}"
server_name: jigsaw
write_deadline: "10s"
jetstream {{
  store_dir: "{store}"
  max_memory_store: 64MB
  max_file_store: 1TB
}}
"""


class Server:
    """A server: running from the first, and again after :meth:`start_again`, on the same port and files.

    Args:
        name: for people. scheme: of the url where clients connect. port: of this machine. log: its output.
        command: that runs it. health: url at which it tells whether it is well, if it does.
    """

    def __init__(self, *, name: str, scheme: str, port: int, log: Path, command: list[str], health: str = "") -> None:
        self.name, self.port, self.url = name, port, f"{scheme}://{HOST}:{port}"
        self.command, self._log, self._health = command, log, health
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        with _writable(self._log):
            output = self._log.open("ab")
        with output:
            return subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509  # a plain system call, nothing that needs a lock
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_answers(self) -> None:
        """Block until the server answers.

        Raises:
            NodeError: it ended, or doesn't answer in time; with the last line that it said.
        """
        deadline = time.monotonic() + ANSWER_S
        while not self._answers():
            if (code := self._process.poll()) is not None:
                raise NodeError(f"{self.name} ended with code {code}: {last_line(self._log)}")
            if time.monotonic() > deadline:
                raise NodeError(f"{self.name} doesn't answer at {self.url} after {ANSWER_S:.0f} s; its log: {self._log}")
            time.sleep(0.02)

    async def ended(self) -> int:
        """Wait until the process has ended; returns its exit code, negative for a signal."""
        if (code := self._process.poll()) is not None:
            return code
        descriptor = os.pidfd_open(self._process.pid)
        try:
            await anyio.wait_readable(descriptor)
        finally:
            os.close(descriptor)
        return self._process.wait()

    def start_again(self) -> None:
        """Run it anew after it has ended; what it had stored is on its files. Doesn't wait until it answers."""
        self._process = self._start()

    @property
    def last_words(self) -> str:
        """The last line of its log that says something."""
        return last_line(self._log)

    def trouble(self) -> str:
        """What the server itself says is wrong with it, or ""."""
        if not self._health:
            return ""
        try:
            with urllib.request.urlopen(self._health, timeout=1.0):
                return ""
        except HTTPError as answer:
            with answer:
                return str(json.load(answer).get("error", answer.reason))
        except (OSError, ValueError):
            return ""  # it isn't there, which others notice

    def kill(self) -> None:
        """End it at once; its files survive that."""
        self._process.kill()

    def stop(self) -> None:
        """End it in order, by force if it takes too long; one that has ended is fine."""
        process = self._process  # there is another as soon as it has ended, if it is kept running
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _answers(self) -> bool:
        """NATS greets whoever connects; Valkey answers PING, with an error while it still loads its files."""
        try:
            with socket.create_connection((HOST, self.port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith((b"INFO ", b"+PONG"))
        except OSError:
            return False


def start_nats(home: Path, *, port: int | None = None) -> Server:
    """Start NATS with JetStream on files in ``home``/nats; ``port`` None takes a free one.

    Raises:
        NodeError: no binary, port taken, or home not writable.
    """
    binary, port, monitor = binaries.nats_server(), _usable_port("NATS", port), _usable_port("NATS", None)
    folder = _folder(home / "nats")
    config = folder / "nats.conf"
    with _writable(config):
        config.write_text(_NATS_CONFIG.format(host=HOST, port=port, monitor=monitor, store=folder), encoding="utf-8")
    command, health = [str(binary), "--config", str(config)], f"http://{HOST}:{monitor}/healthz"
    log = _folder(home / "logs") / "nats.log"
    return Server(name="NATS", scheme="nats", port=port, log=log, command=command, health=health)


def start_valkey(home: Path, *, port: int | None = None, binary: Path | None = None) -> Server:
    """Start Valkey on files in ``home``/valkey: nothing is evicted, appended to disk every second; ``port`` as above.

    Args:
        binary: of another Valkey or Redis than the one that would be found.

    Raises:
        NodeError: no binary, port taken, or home not writable.
    """
    binary, port = binary or binaries.valkey_server(), _usable_port("Valkey", port)
    options = {
        "bind": HOST,
        "port": str(port),
        "dir": str(_folder(home / "valkey")),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
        "save": "",
        "daemonize": "no",
    }
    command = [str(binary), *(part for key, value in options.items() for part in (f"--{key}", value))]
    return Server(name="Valkey", scheme="redis", port=port, log=_folder(home / "logs") / "valkey.log", command=command)


async def end_when_stuck(server: Server, *, home: Path, log: FilteringBoundLogger, look_s: float = LOOK_S) -> None:
    """End a server whose writes have failed, as soon as there is room, so that whoever keeps it running starts it again.

    A stream of NATS that couldn't write once refuses everything until the server is started anew, however much room there is
    by then. What it had confirmed is on its files. Runs until cancelled.
    """
    told = ""
    while True:
        await anyio.sleep(look_s)
        trouble = await anyio.to_thread.run_sync(server.trouble)
        if "write error" not in trouble:
            told = ""
            continue
        if trouble != told:
            log.warning("server_cannot_write", server=server.name, reason=trouble)
            told = trouble
        if free_space_mb(home) >= ROOM_MB:
            await anyio.to_thread.run_sync(server.stop)


def last_line(log: Path) -> str:
    """The last line of a log that says something, for an error message."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def port_is_free(port: int) -> bool:
    """Whether a server could listen on a port of this machine (0: some port)."""
    return _bound(port) is not None


def _bound(port: int) -> int | None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
            listener.listen(1)
        except OSError:
            return None
        number: int = listener.getsockname()[1]
        return number


def _usable_port(name: str, wanted: int | None) -> int:
    port = _bound(wanted or 0)
    if port is None:
        raise NodeError(f"port {wanted} for {name} is taken: stop what listens there or choose another")
    return port


def _folder(path: Path) -> Path:
    with _writable(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    """What can't be written (no space, no permission) is one clear error."""
    try:
        yield
    except OSError as error:
        raise NodeError(f"{path} can't be written: {error.strerror}") from None
