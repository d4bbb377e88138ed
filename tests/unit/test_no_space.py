"""A full disk is one clear error wherever a node or a job writes, and nothing is started or half-written."""

import errno
from pathlib import Path
from typing import Any

import pytest

from libs.common.errors import JigsawError, NodeError
from libs.common.manifest import complete_or_invisible
from libs.common.samples import write_samples
from libs.node import servers
from services.trainer.run_log import RunLog


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_node_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(NodeError, match=r"nats\.conf can't be written: No space left on device"):
        servers.start_nats(tmp_path)


def test_a_server_without_a_log_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(NodeError, match=r"valkey\.log can't be written: No space left on device"):
        servers.start_valkey(tmp_path)


def test_a_log_that_cannot_be_written_ends_the_job_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RunLog(tmp_path, 0)
    log.scalars(0, {"reward/mean": 0.5})
    with Path("/dev/full").open("ab", buffering=0) as no_space, monkeypatch.context() as patch:
        patch.setattr(log, "_metrics", no_space)
        with pytest.raises(JigsawError, match="can't be written: No space left on device"):
            log.scalars(1, {"reward/mean": 0.5})
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1


def test_samples_are_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(JigsawError, match="No space left on device"):
        write_samples(tmp_path, 0, [])
    assert not list((tmp_path / "samples").iterdir())


def test_a_policy_or_checkpoint_is_whole_or_absent(tmp_path: Path) -> None:
    with pytest.raises(JigsawError, match="No space left on device"), complete_or_invisible(tmp_path / "x", durable=True):
        full()
    assert not list(tmp_path.iterdir())


def test_a_resumed_log_forgets_the_steps_that_are_done_again(tmp_path: Path) -> None:
    log = RunLog(tmp_path, 0)
    for step in range(4):
        log.scalars(step, {"reward/mean": float(step)})
    log.close()
    RunLog(tmp_path, 2).close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ['{"step":0', '{"step":1']
