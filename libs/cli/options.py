"""Options that several commands share, and how a command finds its node."""

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from libs.common.errors import JigsawError, NodeError
from libs.common.settings import Addresses, NodeSettings, default_home, load_settings
from libs.node.node_file import read_node_file

Home = Annotated[
    Path | None,
    typer.Option(help="The node's folder. Default: $JIGSAW_HOME, else jigsaw in your data folder.", show_default=False),
]
Url = Annotated[
    str | None,
    typer.Option(help="NATS address of a node elsewhere, such as nats://gpu1:4222.", envvar="JIGSAW_NATS_URL"),
]
RedisUrl = Annotated[
    str | None,
    typer.Option(help="Redis address of a node elsewhere, such as redis://gpu1:6379.", envvar="JIGSAW_REDIS_URL"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
JobRef = Annotated[
    str, typer.Argument(metavar="JOB", help="A job's name (the latest one of that name), its uid, or the start of its uid.")
]


class Target(msgspec.Struct, frozen=True):
    """A node to talk to.

    Attributes:
        nats_url, redis_url: its servers; ``redis_url`` is "" where it wasn't told.
        settings: of a node on this machine; None elsewhere.
    """

    nats_url: str
    redis_url: str
    settings: NodeSettings | None


def home_of(home: Path | None) -> Path:
    """The folder that a command means, absolute."""
    return (home or default_home()).expanduser().absolute()


def locate(home: Path | None, url: str | None, redis_url: str | None) -> Target:
    """The node at ``url``, else the one that is up in the home folder.

    Raises:
        NodeError: no node is up there.
    """
    if url is not None:
        return Target(url, redis_url or "", None)
    folder = home_of(home)
    node = read_node_file(folder)
    if node is None:
        raise NodeError(f"no node is up in {folder}: start one with `jigsaw up`, or name another with --home or --url")
    addresses: Addresses = node.addresses
    return Target(addresses.nats_url, addresses.redis_url, load_settings(folder / "settings.toml"))


def latest_uid(reference: str, uids: list[str]) -> str:
    """The uid that a user means, out of ``uids`` in order of submission.

    A uid is the job's name, a dash and 8 hex digits.

    Raises:
        JigsawError: none fits, or several start with it.
    """
    if reference in uids:
        return reference
    named = [uid for uid in uids if uid.rpartition("-")[0] == reference]
    if named:
        return named[-1]
    starting = [uid for uid in uids if uid.startswith(reference)]
    if len(starting) == 1:
        return starting[0]
    if starting:
        raise JigsawError(f"{reference!r} fits several jobs: {', '.join(starting)}")
    raise JigsawError(f"there is no job {reference!r}" + (f"; there are: {', '.join(uids[-10:])}" if uids else ""))


def instance_id() -> str:
    """How this command calls itself on the bus."""
    return f"cli-{os.getpid()}"
