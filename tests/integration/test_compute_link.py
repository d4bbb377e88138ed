"""The trainer service's link to a real process, which replays training: it loads, trains, writes, dies and goes on."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import psutil
import pytest
import structlog

from libs.common import manifest
from libs.common.job import Job, job_from
from libs.common.tokens import PolicyVersion, sampled
from services.trainer import wire
from services.trainer.checkpoints import Checkpoints
from services.trainer.compute_link import ComputeFailed, ComputeLink, ComputeLost
from services.trainer.replay_process import ReplayedPolicy

CORES = sorted(os.sched_getaffinity(0))[:1]


def replay_job(tokens_per_s: float = 0.0) -> Job:
    train = {"engine": "replay", "engine_args": {"tokens_per_s": tokens_per_s}, "micro_batch_tokens": 40}
    raw = {"name": "small", "model": {"path": "m"}, "data": {"task": "t"}, "rollout": {"engine": "replay"}, "train": train}
    return job_from(raw, file="test")


def groups(step: int) -> list[wire.SampleGroup]:
    tokens = sampled(range(step, step + 30), [-1.0] * 30, PolicyVersion(step)).tobytes()
    return [wire.SampleGroup([1, 2, 3], [wire.Sample(tokens, 0.0), wire.Sample(tokens, 1.0)])]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text(name)
    return folder


@asynccontextmanager
async def running(seen: list[wire.MicroBatchDone]) -> AsyncIterator[ComputeLink]:
    """A link whose process has a unit."""
    link = await ComputeLink.start(engine="replay", cores=CORES, on_micro_batch=seen.append, log=structlog.get_logger())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(link.run)
        try:
            await link.set_units((0,), revision=1)
            yield link
        finally:
            with anyio.CancelScope(shield=True):
                await link.stop()
        tasks.cancel_scope.cancel()


def process() -> psutil.Process:
    (found,) = [each for each in psutil.Process().children() if "services.trainer.replay_process" in each.cmdline()]
    return found


async def policy_of(link: ComputeLink, folder: Path) -> ReplayedPolicy:
    folder.mkdir()
    await link.write_policy(str(folder))
    return msgspec.json.decode((folder / "replay.json").read_bytes(), type=ReplayedPolicy)


async def test_a_job_goes_on_in_a_new_process_as_if_its_first_had_never_died(model: Path, tmp_path: Path) -> None:
    seen: list[wire.MicroBatchDone] = []
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    async with running(seen) as link:
        ready = await link.load(replay_job(), model=str(model), resume=[], cores=CORES)
        assert (ready.step, ready.resumed) == (0, "")
        for step in range(3):
            assert (await link.train(step, groups(step)))["grad_norm"] > 0
            if step in (0, 1):
                await link.write_checkpoint(step + 1, str(checkpoints.path(PolicyVersion(step + 1))), extra={"at": step + 1})
        expected = await policy_of(link, tmp_path / "policy")
    assert expected.step == 3
    assert [done.done for done in seen] == [1, 2] * 3
    checkpoints.verify(PolicyVersion(2))
    (checkpoints.path(PolicyVersion(2)) / manifest.MANIFEST).write_bytes(b"")

    async with running(seen) as link:
        newest_first = [str(path) for path in checkpoints.newest_first()]
        ready = await link.load(replay_job(), model=str(model), resume=newest_first, cores=CORES)
        assert (ready.step, ready.resumed, ready.extra) == (1, str(checkpoints.path(PolicyVersion(1))), {"at": 1})
        assert len(ready.passed_over) == 1
        for step in (1, 2):
            await link.train(step, groups(step))
        assert await policy_of(link, tmp_path / "again") == expected
        assert link.revision == 1


async def test_a_process_that_is_killed_in_a_step_is_lost(model: Path) -> None:
    first = anyio.Event()
    link = await ComputeLink.start(
        engine="replay", cores=CORES, on_micro_batch=lambda _: first.set(), log=structlog.get_logger()
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(link.run)
        await link.set_units((0,), revision=1)
        await link.load(replay_job(tokens_per_s=1000), model=str(model), resume=[], cores=CORES)

        async def kill() -> None:
            await first.wait()
            process().send_signal(signal.SIGKILL)

        tasks.start_soon(kill)
        with pytest.raises(ComputeLost, match="signal SIGKILL"):
            await link.train(0, groups(0) * 50)
        await link.stop()
        tasks.cancel_scope.cancel()


async def test_a_process_that_dies_while_nothing_is_asked_of_it_is_told_of_at_once(model: Path) -> None:
    async with running([]) as link:
        await link.load(replay_job(), model=str(model), resume=[], cores=CORES)
        assert link.gone == ""
        process().send_signal(signal.SIGKILL)
        with anyio.fail_after(5.0):
            await link.until_lost()
        assert link.gone == "the training process ended: signal SIGKILL"
        with pytest.raises(ComputeLost, match="signal SIGKILL"):
            await link.train(0, groups(0))


async def test_a_request_that_fails_is_told_by_its_answer_alone(model: Path, tmp_path: Path) -> None:
    async with running([]) as link:
        await link.load(replay_job(), model=str(model), resume=[], cores=CORES)
        with pytest.raises(ComputeFailed):
            await link.write_policy(str(tmp_path / "nowhere" / "at all"))
        with anyio.move_on_after(5.0):
            while not link.gone:
                await anyio.sleep(0.01)
        assert link.gone
        with anyio.move_on_after(0.1) as waited:
            await link.until_lost()
        assert waited.cancelled_caught


async def test_without_units_a_step_waits_and_with_them_it_goes_on(model: Path) -> None:
    seen: list[wire.MicroBatchDone] = []
    async with running(seen) as link, anyio.create_task_group() as tasks:
        await link.load(replay_job(), model=str(model), resume=[], cores=CORES)
        await link.set_units((), revision=2)
        ended = anyio.Event()

        async def train() -> None:
            await link.train(0, groups(0))
            ended.set()

        tasks.start_soon(train)
        await anyio.sleep(0.2)
        assert (seen, link.revision) == ([], 2)
        await link.set_units((0,), revision=3)
        with anyio.fail_after(10):
            await ended.wait()
        assert link.revision == 3


async def test_a_replay_that_cannot_go_on_from_any_checkpoint_fails_for_good(model: Path, tmp_path: Path) -> None:
    async with running([]) as link:
        with pytest.raises(ComputeFailed, match="no checkpoint can be used"):
            await link.load(replay_job(), model=str(model), resume=[str(tmp_path / "step-000001")], cores=CORES)
