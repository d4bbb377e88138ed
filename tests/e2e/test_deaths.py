"""Processes that die in the middle of a job: it ends all the same, with every sample trained once, as if nothing had been.

Sampling noise is keyed by (seed, position) and the model is fp32, so a job that was cut short must have the very rewards,
and up to rounding the very weights, of one that wasn't.
"""

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

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


def submit(node: NodeUnderTest, folder: Path, name: str) -> str:
    """The job of these tests: checkpoints seldom enough that a death costs steps which have to be done again."""
    return node.submit(folder, name=name, train={"steps": STEPS, "checkpoint_every": 4, "seed": 3}, rollout={"lease_s": 1.0})


@pytest.fixture(scope="module")
def undisturbed(node: NodeUnderTest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same job, left alone."""
    ended = node.wait(submit(node, tmp_path_factory.mktemp("undisturbed"), "undisturbed"))
    assert ended["status"] == "succeeded", ended
    return ended


@pytest.mark.parametrize(
    "module",
    ["services.trainer.training_process", "services.trainer ", "services.rollout.engine_process", "services.rollout "],
)
def test_a_job_survives_a_kill(node: NodeUnderTest, tmp_path: Path, module: str, undisturbed: dict[str, Any]) -> None:
    uid = submit(node, tmp_path, "survives")
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
    assert ended["rewards"] == undisturbed["rewards"]
    weights, expected = (load_file(Path(job["model_dir"]) / "model.safetensors") for job in (ended, undisturbed))
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-5)
    folder = node.home / "jobs" / uid
    assert sampled_steps(folder) == list(range(STEPS))
    numbers = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert numbers == list(range(STEPS))
    lines = [line for step in range(STEPS) for line in read_samples(folder, step)]
    assert set(Counter((line.group, line.sample) for line in lines).values()) == {1}
    assert len(lines) == STEPS * 16
    assert {line.state for line in lines} == {"scored"}
