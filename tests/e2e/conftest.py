"""One embedded node for all end-to-end tests, started and stopped the way a user does it, and a tiny real model."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import psutil
import pytest
import structlog

from libs.common import messages as m
from libs.common.bus import Bus
from libs.common.job import job_from
from libs.common.settings import PluginSettings, default_settings, save_settings
from libs.node.node_file import read_node_file
from tests.tiny_model import build_tiny_model

LENGTHS = {"kind": "uniform", "low": 4, "high": 12}
PLUGINS = Path(__file__).parents[1] / "plugins"


class NodeUnderTest:
    """A running node and the command line on it."""

    def __init__(self, home: Path, model: Path) -> None:
        self.home, self.model = home, model

    def jigsaw(self, *arguments: str, check: bool = True, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command on this node; its output as text."""
        command = [sys.executable, "-m", "libs.cli.main", *arguments, "--home", str(self.home)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        if check and done.returncode != 0:
            raise AssertionError(f"{arguments} exited {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def show(self, uid: str) -> dict[str, Any]:
        """``jigsaw show --json``."""
        shown: dict[str, Any] = json.loads(self.jigsaw("show", uid, "--json").stdout)
        return shown

    def submit(self, folder: Path, *, replayed: bool = False, **sections: Any) -> str:
        """Write a job file (tiny model, small steps; ``sections`` on top) and submit it; returns its uid.

        Args:
            replayed: engine and training are replays, for tests about something else than a model.
        """
        job = self._job(folder, sections)
        if replayed:
            job["rollout"] |= {"engine": "replay", "engine_args": {"lengths": LENGTHS, "vocab_size": 512}}
            job["train"] |= {"engine": "replay"}
        file = folder / f"{job['name']}.json"
        file.write_text(json.dumps(job))
        submitted = json.loads(self.jigsaw("submit", str(file), "--json").stdout)
        uid: str = submitted["job"]
        return uid

    def submit_unchecked(self, folder: Path, **sections: Any) -> str:
        """Hand a job in as a client would that checks nothing; returns its uid."""
        job = job_from(self._job(folder, sections), file="test")
        message = m.SubmitJob(sender="test", job_uid=f"{job.name}-unchecked", job=job, submitted_at=time.time())

        async def publish() -> None:
            node = read_node_file(self.home)
            assert node is not None
            bus = await Bus.connect(node.nats_url, instance="test", log=structlog.get_logger())
            await bus.publish(message)
            await bus.close()

        anyio.run(publish)
        return message.job_uid

    def _job(self, folder: Path, sections: dict[str, Any]) -> dict[str, Any]:
        job = tiny_job(self.model, folder)
        for section, values in sections.items():
            job[section] = {**job.get(section, {}), **values} if isinstance(values, dict) else values
        return job

    def wait(self, uid: str, *, timeout_s: float = 90) -> dict[str, Any]:
        """Wait for a job's end; returns what ``show`` says then."""
        deadline = time.monotonic() + timeout_s
        while (shown := self.show(uid))["status"] in ("queued", "running"):
            assert time.monotonic() < deadline, f"{uid} hasn't ended: {shown}"
            time.sleep(0.5)
        return shown


def tiny_job(model: Path, folder: Path) -> dict[str, Any]:
    """A job that runs in seconds."""
    data = folder / "data.jsonl"
    rows = [{"prompt": f"What is {number} plus 1?", "answer": str(number + 1)} for number in range(64)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "name": "tiny",
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"path": str(data)},
        "rollout": {"batch": 4, "group": 4, "max_new_tokens": 12, "kv_memory_mb": 64},
        "reward": {"function": "jigsaw_test_rewards:e_share"},
        "train": {"steps": 3, "learning_rate": 1e-3, "checkpoint_every": 2},
    }


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeUnderTest]:
    """A node with the test rewards allowed; nothing of it may be left afterwards."""
    home = tmp_path_factory.mktemp("node")
    model = build_tiny_model(tmp_path_factory.mktemp("model"))
    settings = msgspec.structs.replace(
        default_settings(home), plugins=PluginSettings(allow=["jigsaw_test_rewards.*"], folders=[str(PLUGINS)])
    )
    save_settings(settings, home / "node.toml")
    under_test = NodeUnderTest(home, model)
    under_test.jigsaw("up", "--detach", "--settings", str(home / "node.toml"))
    running = read_node_file(home)
    assert running is not None
    processes = [psutil.Process(running.pid), *psutil.Process(running.pid).children(recursive=True)]
    try:
        yield under_test
    finally:
        under_test.jigsaw("down")
        _, alive = psutil.wait_procs(processes, timeout=10)
        assert not alive, f"left behind: {alive}"
