"""Processes that die in the middle of a job: it ends all the same, with every sample trained once."""

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from libs.common.samples import read_samples, sampled_steps
from libs.node.node_file import read_node_file
from tests.e2e.conftest import NodeUnderTest

pytestmark = pytest.mark.timeout(240)

STEPS = 10


def processes(node: NodeUnderTest, module: str) -> list[psutil.Process]:
    """The node's processes that run a module, by their command line."""
    running = read_node_file(node.home)
    assert running is not None
    return [
        process for process in psutil.Process(running.pid).children(recursive=True) if module in " ".join(process.cmdline())
    ]


@pytest.mark.parametrize(
    "module",
    ["services.trainer.training_process", "services.trainer ", "services.rollout.engine_process", "services.rollout "],
)
def test_a_job_survives_a_kill(node: NodeUnderTest, tmp_path: Path, module: str) -> None:
    uid = node.submit(tmp_path, name="survives", train={"steps": STEPS, "checkpoint_every": 4}, rollout={"lease_s": 1.0})
    deadline = time.monotonic() + 90
    while len(node.show(uid)["rewards"]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    victim = processes(node, module)[0]
    os.kill(victim.pid, signal.SIGKILL)
    ended = node.wait(uid, timeout_s=150)
    assert ended["status"] == "succeeded", ended
    assert ended["trajectories_trained"] == STEPS * 16
    assert len(ended["rewards"]) == STEPS
    folder = node.home / "jobs" / uid
    assert sampled_steps(folder) == list(range(STEPS))
    numbers = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert numbers == list(range(STEPS))
    lines = [line for step in range(STEPS) for line in read_samples(folder, step)]
    assert set(Counter((line.group, line.sample) for line in lines).values()) == {1}
    assert len(lines) == STEPS * 16
    assert {line.state for line in lines} == {"scored"}
