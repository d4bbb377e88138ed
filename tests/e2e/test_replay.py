"""A whole job whose engine and training are replays: everything but the model is real."""

import json
from pathlib import Path

import pytest

from libs.common.samples import read_samples, sampled_steps
from tests.e2e.conftest import NodeUnderTest

pytestmark = pytest.mark.timeout(120)

STEPS = 5


def test_a_replayed_job_succeeds(node: NodeUnderTest, tmp_path: Path) -> None:
    uid = node.submit(tmp_path, replayed=True, name="replayed", train={"steps": STEPS})
    ended = node.wait(uid)
    assert ended["status"] == "succeeded", ended
    assert ended["trajectories_trained"] == STEPS * 16
    folder = node.home / "jobs" / uid
    assert json.loads((folder / "model" / "replay.json").read_text())["step"] == STEPS
    assert sampled_steps(folder) == list(range(STEPS))
    lines = [line for step in range(STEPS) for line in read_samples(folder, step)]
    assert {line.state for line in lines} == {"scored"}
    assert all(4 <= line.tokens <= 12 for line in lines)
