"""The life of an engine process as the service steers it; the engine in it is a replay."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import psutil
import pytest
import structlog

from libs.common.child import Child
from libs.common.job import job_from
from libs.common.replay import ReplayedRollout
from libs.common.tokens import PolicyVersion
from services.rollout import wire
from services.rollout.engine import TurnRequest
from services.rollout.engine_link import EngineLink

V = PolicyVersion(1, 1)


@asynccontextmanager
async def running(**engine_args: Any) -> AsyncIterator[EngineLink]:
    """A link with a policy and a unit, to a replay; nobody checks its settings here."""
    raw = {
        "name": "small",
        "model": {"path": "m"},
        "data": {"task": "t"},
        "rollout": {"engine": "replay"},
    }

    async def receive(message: wire.FromEngine) -> None:
        return None

    job = job_from(raw, file="test")
    rollout = msgspec.structs.replace(job.rollout, engine_args=ReplayedRollout(**engine_args))
    link = EngineLink(msgspec.structs.replace(job, rollout=rollout), cores=[0], receiver=receive, log=structlog.get_logger())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(link.run)
        link.want_policy(V, Path())
        await link.set_units((0,), revision=1, memory_mb=100)
        yield link
        await link.stop()
        tasks.cancel_scope.cancel()


def turn(key: str) -> TurnRequest:
    return TurnRequest(key=key, prompt_ids=[1], token_ids=[], turn_start=0, max_new_tokens=50, temperature=1.0, seed=0)


async def eventually(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not condition():
            await anyio.sleep(0.02)


def engines() -> list[psutil.Process]:
    """Engine processes of this test."""
    return [child for child in psutil.Process().children() if "services.rollout.engine_process" in child.cmdline()]


async def test_an_unloaded_engine_is_gone_and_the_next_units_load_it_again() -> None:
    async with running() as link:
        await eventually(lambda: link.ready and link.revision == 1)
        await link.set_units((), revision=2, memory_mb=100)
        await link.unload()
        await eventually(lambda: not link.ready)
        assert engines() == []
        await link.set_units((), revision=3, memory_mb=100)
        await anyio.sleep(0.2)
        assert engines() == []
        assert link.revision == 3
        await link.set_units((0,), revision=4, memory_mb=100)
        await eventually(lambda: link.ready and link.revision == 4)
        assert len(engines()) == 1
        assert not link.broken
    assert engines() == []


async def test_an_engine_whose_process_dies_whenever_it_is_told_to_load_is_broken() -> None:
    async with running(vocab_size=1) as link:
        await eventually(lambda: bool(link.broken))
        assert link.broken == "the engine process keeps dying"
        assert not link.ready


async def test_turns_that_begin_together_reach_the_engine_together_and_before_their_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    posted: list[Any] = []
    post = Child.post

    def noted(child: Child[Any], message: msgspec.Struct) -> None:
        if isinstance(message, (wire.Begin, wire.Drop)):
            posted.append(message)
        post(child, message)

    monkeypatch.setattr(Child, "post", noted)
    async with running(decode_ms=10.0) as link:
        await eventually(lambda: link.ready and link.revision == 1)
        async with anyio.create_task_group() as tasks:
            for key in ("a", "b", "c"):
                tasks.start_soon(link.begin, turn(key))
        await link.begin(turn("d"))
        await link.drop(["a", "d"])
    assert [[request.key for request in begun.requests] for begun in posted[:2]] == [["a", "b", "c"], ["d"]]
    assert posted[2].keys == ["a", "d"]
