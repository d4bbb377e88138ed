"""A node's settings: which device it has, how many instances of each service, which policy, what users may plug in.

One TOML file per node, decoded strictly. Addresses and secrets come from the environment instead (:class:`Addresses`),
because they differ between a laptop and a container while the rest doesn't.
"""

import os
import socket
import tomllib
from pathlib import Path
from typing import Annotated, Literal, Self

import msgspec
import psutil
from msgspec import Meta

from libs.common.errors import NodeError

Count = Annotated[int, Meta(ge=1)]


class DeviceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The device that pipelines share.

    Attributes:
        id: unique in the cluster. cores: the CPU cores that are its units, in order.
        memory_mb: what models, KV caches and optimisers may use together.
    """

    id: str
    cores: list[int]
    memory_mb: Count


class RolloutSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rollout instances of this node.

    Attributes:
        instances: how many. max_units: the most units that one can use.
        unload_after_s: a job's engine that has been paused for so long is unloaded; its next units load it again.
    """

    instances: Annotated[int, Meta(ge=1, le=256)]
    max_units: Count = 1
    unload_after_s: Annotated[float, Meta(gt=0)] = 300.0


class RewardSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Scoring on this node: how many processes run each job's scorer."""

    workers: Count = 1


class PluginSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Users' own reward functions and environments on this node.

    Attributes:
        allow: what jobs may name, as ``package.module:function`` or ``package.*``.
        folders: where user packages are imported from.
    """

    allow: list[str] = []
    folders: list[str] = []


class SchedulerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Scheduling on this node.

    Attributes:
        policy: by name.
        instances: schedulers, of which one leads and the others stand by.
        lease_s: how long the leader leads without renewing it; a standby takes over that long after the leader's death.
            A leader that can't reach the bus for that long gives up.
    """

    policy: Literal["sequential", "static-split"] = "sequential"
    instances: Count = 1
    lease_s: Annotated[float, Meta(gt=0)] = 5.0


class NodeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that a node's services need to know besides addresses.

    Attributes:
        home: folder of logs, checkpoints, uploaded data and the embedded servers' files.
        policy_url: where policy versions lie (fsspec URL or folder); None: inside ``home``.
        worker_lost_s: a worker that hasn't been heard of for this long is gone; what a reward service was scoring then goes
            to another.
    """

    home: str
    device: DeviceSettings
    rollout: RolloutSettings
    reward: RewardSettings = RewardSettings()
    plugins: PluginSettings = PluginSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    policy_url: str | None = None
    worker_lost_s: Annotated[float, Meta(gt=0)] = 10.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def policies(self) -> str:
        """Where policy versions lie."""
        return self.policy_url or str(Path(self.home) / "policies")

    def job_folder(self, job_uid: str) -> Path:
        """Where a job's checkpoints and logs lie."""
        return Path(self.home) / "jobs" / job_uid


class Addresses(msgspec.Struct, frozen=True):
    """Where the bus and the store are."""

    nats_url: str
    redis_url: str

    @classmethod
    def from_environment(cls) -> Self:
        """From ``JIGSAW_NATS_URL`` and ``JIGSAW_REDIS_URL``.

        Raises:
            NodeError: one isn't set.
        """
        values = {name: os.environ.get(name, "") for name in ("JIGSAW_NATS_URL", "JIGSAW_REDIS_URL")}
        for name, value in values.items():
            if not value:
                raise NodeError(f"{name} is not set: a service needs the address")
        return cls(values["JIGSAW_NATS_URL"], values["JIGSAW_REDIS_URL"])

    def to_environment(self) -> dict[str, str]:
        """The same as environment variables."""
        return {"JIGSAW_NATS_URL": self.nats_url, "JIGSAW_REDIS_URL": self.redis_url}


def default_home() -> Path:
    """``JIGSAW_HOME``, else ``jigsaw`` in the user's data folder."""
    if home := os.environ.get("JIGSAW_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_DATA_HOME", Path.home() / ".local/share")) / "jigsaw"


def default_settings(home: Path) -> NodeSettings:
    """Settings for this machine: its usable cores as units, one rollout instance per core."""
    cores = sorted(os.sched_getaffinity(0))
    return NodeSettings(
        home=str(home),
        device=DeviceSettings(
            id=f"{socket.gethostname()}-cpu", cores=cores, memory_mb=max(1, int(psutil.virtual_memory().total * 0.9) >> 20)
        ),
        rollout=RolloutSettings(instances=len(cores)),
    )


def load_settings(path: Path) -> NodeSettings:
    """Read a node's settings; keys that the file leaves out keep this machine's defaults.

    Raises:
        NodeError: with file and key.
    """
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise NodeError(f"{path}: {error}") from None
    home = Path(str(given.get("home", default_home())))
    merged = msgspec.to_builtins(default_settings(home))
    for key, value in given.items():
        merged[key] = {**merged[key], **value} if isinstance(value, dict) and isinstance(merged.get(key), dict) else value
    try:
        settings = msgspec.convert(merged, NodeSettings)
    except msgspec.ValidationError as error:
        raise NodeError(f"{path}: {error}") from None
    usable = os.sched_getaffinity(0)
    if not settings.device.cores or not usable.issuperset(settings.device.cores):
        raise NodeError(f"{path}: device.cores: {settings.device.cores} of this machine's usable cores {sorted(usable)}")
    return settings


def save_settings(settings: NodeSettings, path: Path) -> None:
    """Write settings as a file that :func:`load_settings` reads."""
    import tomli_w

    plain = {key: value for key, value in msgspec.to_builtins(settings).items() if value is not None}
    path.write_text(tomli_w.dumps(plain), encoding="utf-8")
