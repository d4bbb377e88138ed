"""Datasets through the object store of a real NATS server."""

import hashlib
import random
import time
from pathlib import Path

import pytest

from libs.common import blobs, subjects
from libs.common.bus import Bus
from libs.common.errors import JigsawError

MEGABYTES = 20


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(random.Random(0).randbytes(MEGABYTES << 20))
    return path


async def test_a_large_file_comes_back_whole_and_quickly(bus: Bus, large: Path, tmp_path: Path) -> None:
    digest = await blobs.upload(bus, large)
    uploaded = time.perf_counter()
    copy = await blobs.download(bus, digest, tmp_path / "data")
    took_s = time.perf_counter() - uploaded
    assert digest == hashlib.sha256(large.read_bytes()).hexdigest()
    assert copy.name == f"{digest}.jsonl"
    assert copy.read_bytes() == large.read_bytes()
    assert took_s < 5.0, "20 MB take a quarter of a second when chunks are read in one pass"


async def test_what_is_there_is_not_sent_again(bus: Bus, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"rows")
    digest = await blobs.upload(bus, path)
    before = await bus.client.jetstream().stream_info(f"OBJ_{subjects.BLOBS}")
    assert await blobs.upload(bus, path) == digest
    after = await bus.client.jetstream().stream_info(f"OBJ_{subjects.BLOBS}")
    assert after.state.last_seq == before.state.last_seq
    copy = await blobs.download(bus, digest, tmp_path / "data")
    inode = copy.stat().st_ino
    assert (await blobs.download(bus, digest, tmp_path / "data")).stat().st_ino == inode


async def test_an_empty_file_is_a_file(bus: Bus, tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.touch()
    assert (await blobs.download(bus, await blobs.upload(bus, path), tmp_path / "data")).read_bytes() == b""


async def test_a_damaged_copy_is_refused_and_removed(bus: Bus, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"rows")
    digest = await blobs.upload(bus, path)
    copy = await blobs.download(bus, digest, tmp_path / "data")
    copy.write_bytes(b"rowz")
    with pytest.raises(JigsawError, match="damaged"):
        await blobs.download(bus, digest, tmp_path / "data")
    assert (await blobs.download(bus, digest, tmp_path / "data")).read_bytes() == b"rows"


async def test_errors_are_one_line(bus: Bus, tmp_path: Path) -> None:
    with pytest.raises(JigsawError, match="no dataset with digest"):
        await blobs.download(bus, "0" * 64, tmp_path)
    with pytest.raises(JigsawError, match="can't be read: No such file"):
        await blobs.upload(bus, tmp_path / "absent.jsonl")
