"""What a power cut leaves of Valkey's log in a chaos campaign."""

import random
from pathlib import Path

from tests.chaos.append_log import AppendLog


def test_only_what_was_written_in_the_last_second_can_be_torn_off(tmp_path: Path) -> None:
    older, newest = tmp_path / "appendonly.aof.9.incr.aof", tmp_path / "appendonly.aof.10.incr.aof"
    older.write_bytes(b"an older part")
    newest.write_bytes(b"old")
    log = AppendLog(tmp_path)
    log.look(1.0)
    newest.write_bytes(b"old, safe")
    log.look(2.0)
    newest.write_bytes(b"old, safe" + bytes(1000))
    log.look(2.9)
    sizes = set()
    for seed in range(20):
        newest.write_bytes(b"old, safe" + bytes(1000))
        assert log.tear(before=3.0, draw=random.Random(seed)) == 2.0
        sizes.add(newest.stat().st_size)
    assert all(len(b"old, safe") <= size <= 1009 for size in sizes)
    assert min(sizes) < 300 and max(sizes) > 700
    assert older.read_bytes() == b"an older part"
