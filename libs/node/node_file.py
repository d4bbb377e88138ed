"""What a running node leaves in its home for others to find it by, and the lock that keeps a second one out."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil

from libs.common.errors import NodeError
from libs.common.settings import Addresses


class NodeFile(msgspec.Struct, frozen=True):
    """``node.json``: a node that is up.

    Attributes:
        pid: of its supervisor. pid_created: that process's start, so that a reused pid isn't mistaken for it.
        nats_url, redis_url: its servers. started_at: wall-clock seconds. instances: its services.
    """

    pid: int
    pid_created: float
    nats_url: str
    redis_url: str
    started_at: float
    instances: list[str]

    @property
    def addresses(self) -> Addresses:
        """Where its servers are."""
        return Addresses(self.nats_url, self.redis_url)


def read_node_file(home: Path) -> NodeFile | None:
    """The node that is up in ``home``, or None."""
    try:
        node = msgspec.json.decode(_path(home).read_bytes(), type=NodeFile)
    except (OSError, msgspec.MsgspecError):
        return None
    try:
        created = psutil.Process(node.pid).create_time()
    except psutil.NoSuchProcess:
        return None
    return node if abs(created - node.pid_created) < 1.0 else None


def write_node_file(home: Path, node: NodeFile) -> None:
    """Tell others that the node is up; they see all of it or nothing."""
    aside = home / f".node.json.{os.getpid()}"
    aside.write_bytes(msgspec.json.format(msgspec.json.encode(node)))
    aside.replace(_path(home))


def remove_node_file(home: Path) -> None:
    """The node is no longer up."""
    _path(home).unlink(missing_ok=True)


@contextmanager
def sole_node(home: Path) -> Iterator[None]:
    """Hold the home for one node.

    Raises:
        NodeError: another node holds it, or it isn't writable.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = (home / "node.lock").open("a+")
    except OSError as error:
        raise NodeError(f"{home} can't be written: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            node = read_node_file(home)
            who = f" (process {node.pid})" if node else ""
            raise NodeError(f"a node is running in {home} already{who}: `jigsaw down` ends it") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def starting_node(home: Path) -> int | None:
    """Process id of whoever holds the home, also before its node is up; None if nobody does."""
    path = home / "node.lock"
    try:
        with path.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
    except BlockingIOError:
        held = path.read_text(encoding="utf-8")
        return int(held) if held.isdigit() else None
    except OSError:
        return None


def _path(home: Path) -> Path:
    return home / "node.json"
