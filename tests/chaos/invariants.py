"""What must hold however a job was attacked, and what must not be left behind."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import anyio
import msgspec
import psutil
import torch
from redis.asyncio import Redis
from safetensors.torch import load_file

from libs.common import messages as m
from libs.common.job import Job
from libs.common.samples import SampleLine, read_samples, sampled_steps
from tests.chaos.cluster import Cluster

CLEANED_UP_S = 10.0
OBSERVATION = 16
"""Tokens around an observation's own, more or less; a token is at least a byte."""


class Ending(msgspec.Struct, frozen=True):
    """All that an attack must not change about a job.

    Attributes:
        trained: digest of every id and reward that was trained, in order, by step; "" if training is no replay.
        samples: every trajectory as it ended, by (group, sample).
    """

    trained: str
    samples: list[SampleLine]


async def ended(cluster: Cluster, uid: str) -> m.JobEnded:
    """A job's terminal event, of which there is exactly one."""
    (event,) = await cluster.bus.history(m.JobEnded, job_uid=uid)
    return event


def check_same_samples(uid: str, lines: Sequence[SampleLine], expected: Sequence[SampleLine]) -> None:
    """Trajectories that have ended as those of an undisturbed job did.

    Raises:
        AssertionError: with the first that hasn't.
    """
    for line, other in zip(lines, expected, strict=True):
        assert line == other, f"{uid} has a sample that an undisturbed job has not: {line} instead of {other}"


def check_cancelled(cluster: Cluster, uid: str, expected: Ending) -> None:
    """A cancelled job has trained the first steps of an undisturbed one, however many.

    Raises:
        AssertionError: it has trained something else.
    """
    folder = cluster.home / "jobs" / uid
    steps = sampled_steps(folder)
    assert steps == list(range(len(steps))), f"{uid} has samples of the steps {steps}"
    lines = [line for step in steps for line in read_samples(folder, step)]
    same_steps = [line for line in expected.samples if line.step < len(steps)]
    check_same_samples(uid, sorted(lines, key=_place), same_steps)


async def ending_of(cluster: Cluster, uid: str, job: Job) -> Ending:
    """How a job ended, once all that holds of every job has been checked.

    Raises:
        AssertionError: it ended as none may end.
    """
    end = await ended(cluster, uid)
    assert end.outcome is m.Outcome.SUCCEEDED, f"{uid} {end.outcome}: {end.reason}"
    folder, steps = cluster.home / "jobs" / uid, job.train.steps
    assert sampled_steps(folder) == list(range(steps))
    numbers = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert numbers == list(range(steps)), f"{uid}: the log of numbers has steps {numbers}"
    lines = [line for step in range(steps) for line in read_samples(folder, step)]
    assert len(lines) == steps * job.rollout.batch * job.rollout.group
    assert set(Counter((line.group, line.sample) for line in lines).values()) == {1}, "each is trained once"
    assert all(line.tokens <= budget_of(job) for line in lines)
    scored = [line for line in lines if line.state == "scored"]
    progress = await (await cluster.bus.table(m.JobProgress)).get(uid)
    assert progress is not None
    assert progress.history.trained == len(scored), f"{uid}: {progress.history.trained} trained of {len(scored)}"
    trained = ""
    if job.train.engine == "replay":
        replay = json.loads((folder / "model" / "replay.json").read_text())
        assert replay["step"] == steps
        trained = replay["trained"]
    return Ending(trained, sorted(lines, key=_place))


def _place(line: SampleLine) -> tuple[int, int]:
    return line.group, line.sample


def check_same_weights(home: Path) -> None:
    """The models that were trained under attack are those of undisturbed jobs, as far as floating point lets them be.

    Raises:
        AssertionError: one isn't, or there is none.
    """
    paths = sorted(home.glob("jobs/*/model/model.safetensors"), reverse=True)
    undisturbed, *attacked = [load_file(path) for path in paths]
    assert attacked, f"no model was trained under attack in {home}"
    for weights in attacked:
        for name, tensor in undisturbed.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-5)


def budget_of(job: Job) -> int:
    """Tokens that a trajectory may have at most: sampled ones, and those of what the environment says."""
    replies = job.environment.args.get("replies", [])
    return job.rollout.max_new_tokens + sum(OBSERVATION + len(reply) for reply in replies)


async def check_nothing_left(cluster: Cluster, uids: list[str]) -> None:
    """All jobs have ended: nobody has anything of them any more, and everyone is there for the next.

    Raises:
        AssertionError: something was left behind, or someone is gone.
    """
    await cluster.all_answer()
    left: list[str] = ["everything"]
    with anyio.move_on_after(CLEANED_UP_S):  # the last clean-up may still be under way
        while left:
            left = await _left(cluster)
            await anyio.sleep(0.1)
    assert not left, f"left behind: {left}"
    half_written = [path for uid in uids for path in (cluster.home / "jobs" / uid).rglob("*") if "partial" in path.name]
    assert not half_written, f"left behind: {half_written}"


async def _left(cluster: Cluster) -> list[str]:
    """What there still is of any job."""
    left = [f"key {key}" for key in await _keys(cluster.valkey.url)]
    for stream in ("TASKS", "TRAJECTORIES", "JOBS"):
        info = await cluster.bus.js.stream_info(stream)
        left += [f"{info.state.messages} messages on {stream}"] if info.state.messages else []
        consumers = [consumer.name for consumer in await cluster.bus.js.consumers_info(stream)]
        left += [f"consumer {name}" for name in consumers if name.startswith(("tasks-", "settled-"))]
    left += [f"allocation {key}" for key in await (await cluster.bus.table(m.Allocation)).all()]
    services = {instance.process.pid for instance in cluster.instances.values() if instance.is_up}
    left += [f"process {command}" for pid, command in _commands(cluster.home) if pid not in services]
    left += [f"policy {path}" for path in (cluster.home / "policies").glob("*/*")]
    return left


def _commands(home: Path) -> Iterator[tuple[int, str]]:
    """The processes that work in the cluster's home, whoever started them and is dead by now."""
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
            if Path(process.cwd()).is_relative_to(home) and ("services." in command or "multiprocessing.spawn" in command):
                yield process.pid, command
        except (psutil.Error, OSError):
            continue  # it has just ended


async def _keys(url: str) -> list[str]:
    redis: Redis = Redis.from_url(url)
    try:
        return [key.decode() for key in await redis.keys("jigsaw:*")]
    finally:
        await redis.aclose()
