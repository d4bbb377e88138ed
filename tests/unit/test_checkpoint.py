"""Checkpoints are complete or invisible, verified when read, and never replaced by something worse."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from libs.common.errors import JigsawError
from services.trainer import checkpoint
from services.trainer.resume import load_first

STATE = {"step": 3, "extra": {"row": 7, "raw": b"\x00\xff", "big": 2**63 - 1, "share": 0.1}}


def tensors(value: float = 1.0) -> dict[str, dict[str, torch.Tensor]]:
    return {"weights": {"a": torch.full((400, 300), value), "b": torch.arange(5)}, "optimiser": {"m/a": torch.ones(2)}}


@contextmanager
def disk_full_after(size: int) -> Iterator[None]:
    """Writes to a file fail beyond ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "3", tensors=tensors(), state=STATE)
    loaded = checkpoint.load(tmp_path / "3")
    assert loaded.state == STATE
    for name, group in tensors().items():
        assert loaded.tensors[name].keys() == group.keys()
        assert all(torch.equal(loaded.tensors[name][key], value) for key, value in group.items())
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_saving_again_replaces(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        checkpoint.save(tmp_path / "3", tensors=tensors(value), state=STATE)
    assert checkpoint.load(tmp_path / "3").tensors["weights"]["a"][0, 0] == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_a_full_disk_is_reported_and_leaves_the_last_one_intact(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "3", tensors=tensors(1.0), state=STATE)
    for target in ("3", "4"):
        with disk_full_after(100_000), pytest.raises(JigsawError, match=f"{target} can't be written"):
            checkpoint.save(tmp_path / target, tensors=tensors(2.0), state=STATE)
    assert [path.name for path in tmp_path.iterdir()] == ["3"]
    assert checkpoint.load(tmp_path / "3").tensors["weights"]["a"][0, 0] == 1.0


@pytest.mark.parametrize("name", ["weights.safetensors", "optimiser.safetensors", "state.msgpack"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_damage_is_found(tmp_path: Path, name: str, harm: str) -> None:
    checkpoint.save(tmp_path / "3", tensors=tensors(), state=STATE)
    path = tmp_path / "3" / name
    content = bytearray(path.read_bytes())
    if harm == "remove":
        path.unlink()
    elif harm == "cut":
        path.write_bytes(content[:-1])
    else:
        content[-1] ^= 1
        path.write_bytes(content)
    with pytest.raises(JigsawError, match=name):
        checkpoint.load(tmp_path / "3")


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    for step in (3, 6):
        checkpoint.save(tmp_path / str(step), tensors=tensors(float(step)), state=STATE)
    (tmp_path / "6" / "weights.safetensors").write_bytes(b"")
    found = load_first([tmp_path / "6", tmp_path / "3"], checkpoint.load)
    assert found.directory == tmp_path / "3"
    assert found.checkpoint is not None
    assert found.checkpoint.tensors["weights"]["a"][0, 0] == 3.0
    assert len(found.passed_over) == 1
    assert "wrong size" in found.passed_over[0]


def test_a_job_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "3", tensors=tensors(), state=STATE)
    (tmp_path / "3" / "weights.safetensors").unlink()
    with pytest.raises(JigsawError, match="no checkpoint can be used"):
        load_first([tmp_path / "3"], checkpoint.load)
    assert load_first([], checkpoint.load).checkpoint is None


@pytest.mark.parametrize("manifest", [None, b"{", b'{"format": 99}'])
def test_no_checkpoint_or_an_unknown_one_is_refused(tmp_path: Path, manifest: bytes | None) -> None:
    checkpoint.save(tmp_path / "3", tensors=tensors(), state=STATE)
    if manifest is None:
        (tmp_path / "3" / "manifest.json").unlink()
    else:
        (tmp_path / "3" / "manifest.json").write_bytes(manifest)
    with pytest.raises(JigsawError, match="not complete"):
        checkpoint.load(tmp_path / "3")


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("exists", [True, False])
def test_a_kill_at_any_rename_leaves_a_whole_checkpoint_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int, exists: bool
) -> None:
    if exists:
        checkpoint.save(tmp_path / "3", tensors=tensors(1.0), state=STATE)
    renames = 0
    rename = Path.rename

    def dies(self: Path, target: Path) -> Path:
        nonlocal renames
        renames += 1
        if renames == nth:
            raise Killed
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", dies)
    died = exists or nth == 1
    if died:
        with pytest.raises(Killed):
            checkpoint.save(tmp_path / "3", tensors=tensors(2.0), state=STATE)
    else:
        checkpoint.save(tmp_path / "3", tensors=tensors(2.0), state=STATE)
    monkeypatch.undo()
    if exists:
        assert checkpoint.load(tmp_path / "3").tensors["weights"]["a"][0, 0] == 1.0
    elif died:
        with pytest.raises(JigsawError):
            checkpoint.load(tmp_path / "3")
    checkpoint.save(tmp_path / "3", tensors=tensors(3.0), state=STATE)
    assert checkpoint.load(tmp_path / "3").tensors["weights"]["a"][0, 0] == 3.0
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_everything_is_durable_before_it_becomes_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def record_sync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def record_rename(self: Path, target: Path) -> Path:
        events.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "rename", record_rename)
    checkpoint.save(tmp_path / "3", tensors=tensors(), state=STATE)
    before = events[: events.index("rename")]
    assert {"weights.safetensors", "optimiser.safetensors", "state.msgpack", "manifest.json", ".3.partial"} == set(before)
    assert events[-1] == tmp_path.name
