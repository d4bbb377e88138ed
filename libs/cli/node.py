"""``jigsaw up`` and ``jigsaw down``: the embedded node."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import anyio
import msgspec
import psutil
import typer

from libs.cli import options, render
from libs.common.errors import NodeError
from libs.common.logging import configure
from libs.common.settings import NodeSettings, default_settings, load_settings
from libs.node.node_file import NodeFile, read_node_file, starting_node
from libs.node.servers import last_line
from libs.node.supervisor import Interrupted, Node, Ports, run_node

START_S = 90.0
STOP_S = 45.0

SettingsFile = Annotated[
    Path | None, typer.Option("--settings", help="The node's settings file (TOML); what it leaves out keeps its default.")
]
NatsPort = Annotated[int | None, typer.Option(min=1, max=65535, help="Port of NATS; a free one by default.")]
RedisPort = Annotated[int | None, typer.Option(min=1, max=65535, help="Port of Valkey; a free one by default.")]


def up(
    *,
    detach: Annotated[bool, typer.Option("--detach", help="Return once the node is up, and leave it running.")] = False,
    settings: SettingsFile = None,
    home: options.Home = None,
    nats_port: NatsPort = None,
    redis_port: RedisPort = None,
) -> None:
    """Start a node on this machine: NATS, Valkey, scheduler, reward, trainer and rollout services.

    It stays in the foreground until Ctrl-C, which takes everything down in order; a second Ctrl-C doesn't wait. Jobs that
    hadn't ended go on at the next `jigsaw up` with the same home.

    Example: jigsaw up --detach --home /data/jigsaw
    """
    node = node_settings(settings, home)
    if nats_port is not None and nats_port == redis_port:
        raise NodeError(f"--nats-port and --redis-port are both {nats_port}: they must differ")
    if detach:
        _detach(node, settings, Ports(nats_port, redis_port))
        return
    log = configure(instance="node", level=node.log_level)
    try:
        anyio.run(lambda: run_node(node, _stay, ports=Ports(nats_port, redis_port), log=log))
    except Interrupted as interrupted:
        render.say("the node is down")
        if interrupted.number != signal.SIGTERM:
            raise


def down(*, home: options.Home = None) -> None:
    """Take a node down: services drain first, then its servers stop. Its data stay.

    Example: jigsaw down --home /data/jigsaw
    """
    folder = options.home_of(home)
    node = read_node_file(folder)
    pid = node.pid if node is not None else starting_node(folder)
    if pid is None:
        raise NodeError(f"no node is up in {folder}")
    process = psutil.Process(pid)
    for patience_s in (STOP_S, 10.0):  # the second signal kills what hasn't drained
        process.terminate()
        try:
            process.wait(patience_s)
        except psutil.TimeoutExpired:
            continue
        render.say(f"the node in {folder} is down")
        return
    raise NodeError(f"the node in {folder} (process {pid}) doesn't end")


def node_settings(file: Path | None, home: Path | None) -> NodeSettings:
    """The node's settings: of the file, else of this machine; ``home`` from the option first, then the file.

    Raises:
        NodeError: the file can't be used.
    """
    if file is None:
        return default_settings(options.home_of(home))
    settings = load_settings(file)
    folders = [str((file.parent / folder).absolute()) for folder in settings.plugins.folders]
    if missing := [folder for folder in folders if not Path(folder).is_dir()]:
        raise NodeError(f"{file}: plugins.folders: {missing[0]} is no folder")
    return msgspec.structs.replace(
        settings,
        home=str(options.home_of(home or Path(settings.home))),
        plugins=msgspec.structs.replace(settings.plugins, folders=folders),
    )


async def _stay(node: Node) -> None:
    """Say what is up, then wait for a signal."""
    render.say(f"node up in {node.home}: {', '.join(node.instances)}")
    render.say(f"NATS {node.addresses.nats_url}, Valkey {node.addresses.redis_url}, logs {node.home / 'logs'}")
    render.say("Ctrl-C takes it down. Next: jigsaw submit JOB.toml")
    await anyio.sleep_forever()


def _detach(settings: NodeSettings, file: Path | None, ports: Ports) -> None:
    """Run ``jigsaw up`` in a session of its own, and wait until its node is up."""
    home = Path(settings.home)
    command = [sys.executable, "-m", "libs.cli.main", "up", "--home", str(home)]
    command += ["--settings", str(file.absolute())] if file else []
    command += ["--nats-port", str(ports.nats)] if ports.nats else []
    command += ["--redis-port", str(ports.redis)] if ports.redis else []
    log = home / "logs" / "node.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
    except OSError as error:
        raise NodeError(f"{home} can't be written: {error.strerror}") from None
    try:
        node = _started(process, home, log)
    except KeyboardInterrupt:
        process.terminate()
        process.wait(STOP_S)
        raise
    render.say(f"node up in {home} (process {node.pid}), NATS {node.nats_url}; `jigsaw down` ends it")


def _started(process: "subprocess.Popen[bytes]", home: Path, log: Path) -> NodeFile:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        node = read_node_file(home)
        if node is not None and node.pid == process.pid:
            return node
        if process.poll() is not None:
            raise NodeError(last_line(log).removeprefix("jigsaw: "))
        time.sleep(0.1)
    process.terminate()
    raise NodeError(f"the node isn't up after {START_S:.0f} s; see {log}")
