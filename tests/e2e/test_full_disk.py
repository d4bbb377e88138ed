"""A disk that is full when a job wants to checkpoint: the job says so, and what it had saved is whole."""

import time
from pathlib import Path

import pytest

from services.trainer import checkpoint
from services.trainer.checkpoints import Checkpoints
from tests.e2e.conftest import NodeUnderTest
from tests.small_disk import small_disk

pytestmark = pytest.mark.timeout(120)


def test_a_job_without_room_for_a_checkpoint_fails_with_its_reason_and_keeps_the_last_one(
    node: NodeUnderTest, tmp_path: Path
) -> None:
    folder = node.home / "jobs" / "no-room-unchecked"
    checkpoints = Checkpoints(folder / "checkpoints")
    with small_disk(folder, size_mb=32) as disk:  # a checkpoint takes 6 MB
        uid = node.submit_unchecked(
            tmp_path,
            name="no-room",
            train={"steps": 10_000, "checkpoint_every": 2, "keep_best": 0},
            rollout={"engine": "replay", "engine_args": {"lengths": {"kind": "uniform", "low": 4, "high": 12}}},
        )
        deadline = time.monotonic() + 60
        while not checkpoints.versions():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        disk.fill(but_kb=2048)
        ended = node.wait(uid, timeout_s=60)
        assert ended["status"] == "failed", ended
        assert "No space left on device" in ended["reason"]
        assert "checkpoints/step-" in ended["reason"]
        assert len(ended["reason"].splitlines()) == 1
        (last,) = checkpoints.newest_first()
        assert [path.name for path in last.parent.iterdir()] == [last.name]
        whole = checkpoint.load(last)
        assert whole.state["step"] == checkpoints.versions()[0].step
