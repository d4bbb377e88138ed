"""What checkpointing costs: rollout throughput of the same job with the default checkpoints and with none.

*Off* stores a trajectory once, when it ends (``checkpoint_tokens`` and ``checkpoint_ms`` are out of reach); leases, records
and messages stay. Training is a replay that takes no time, so that nothing dilutes the cost. Every response has exactly
``max_new_tokens`` tokens, long enough for many checkpoints, which the store's own count of appends confirms. The CPU time
that checkpoints add is measured beside throughput: other work on the machine changes it less.
"""

import statistics
from collections.abc import Callable
from pathlib import Path

import msgspec
from redis.asyncio import Redis

from benchmarks.node_jobs import Finished, fresh_home, on_node, run_job
from benchmarks.processes import Activity
from benchmarks.report import Readings, Report, ratios
from libs.common.errors import JigsawError
from libs.common.job import Job
from libs.node.supervisor import Node

NEVER = 1_000_000_000


class Run(msgspec.Struct, frozen=True):
    """One job after its first step.

    Attributes:
        tokens_per_s: completion tokens per second of rollout.
        engine_ms, rest_ms: CPU time per completion token, of the engines and of everything else.
        appends: to stored trajectories, per trajectory; over the whole job.
    """

    tokens_per_s: float
    engine_ms: float
    rest_ms: float
    appends: float


def off(job: Job) -> Job:
    """The same job without checkpoints."""
    rollout = msgspec.structs.replace(job.rollout, checkpoint_tokens=NEVER, checkpoint_ms=NEVER)
    return msgspec.structs.replace(job, rollout=rollout)


def measure(report: Report, folder: Path, *, job: Job, rounds: int) -> None:
    """Both jobs in turn on one node, ``rounds`` times, each round in the other order."""
    with_checkpoints: list[Run] = []
    without: list[Run] = []

    async def on(node: Node) -> None:
        for number in range(rounds):
            pair = [(job, with_checkpoints), (off(job), without)]
            for each, runs in pair if number % 2 == 0 else reversed(pair):
                runs.append(await _run(node, each))
            speeds = f"{with_checkpoints[-1].tokens_per_s:.1f} tokens/s, without {without[-1].tokens_per_s:.1f}"
            report.say(f"checkpoints, round {number}: {speeds}")

    on_node(fresh_home(folder, "cost"), on)
    _note(report, with_checkpoints, without, new_tokens=job.rollout.max_new_tokens)


def _note(report: Report, on: list[Run], off: list[Run], *, new_tokens: int) -> None:
    def both(read: Callable[[Run], float]) -> tuple[list[float], list[float]]:
        return [read(run) for run in on], [read(run) for run in off]

    speeds, speeds_off = both(lambda run: run.tokens_per_s)
    rest, rest_off = both(lambda run: run.rest_ms)
    added = [100 * (run.rest_ms - bare.rest_ms) / (run.rest_ms + run.engine_ms) for run, bare in zip(on, off, strict=True)]
    stored, stored_off = both(lambda run: run.appends)
    report.add("cost.tokens_per_s", Readings.of(speeds), "tokens/s", f"responses of {new_tokens} tokens, checkpoints on")
    report.add("cost.off_tokens_per_s", Readings.of(speeds_off), "tokens/s", "stored at their end only")
    report.add("cost.throughput_ratio", ratios(speeds, speeds_off), "x", "on over off, at least 0.97")
    report.add("cost.rest_cpu_ms", Readings.of(rest), "ms", "CPU time per token of everything but the engines")
    report.add("cost.off_rest_cpu_ms", Readings.of(rest_off), "ms", "the same without checkpoints")
    report.add("cost.added_cpu", Readings.of(added), "%", "the difference, of all CPU time: at most 3")
    report.add("cost.appends", Readings.of(stored), "", "per trajectory")
    report.add("cost.off_appends", Readings.of(stored_off), "", "per trajectory")


async def _run(node: Node, job: Job) -> Run:
    before = await _appends(node)
    with Activity() as activity:
        finished = await run_job(node, job)
    appends = await _appends(node) - before
    rows = finished.rows[1:]
    trajectories = job.rollout.batch * job.rollout.group
    _require_lengths(finished, job.rollout.max_new_tokens)
    tokens = trajectories * job.rollout.max_new_tokens
    used = activity.cpu_s(finished.rows[0].time, finished.rows[-1].time)
    engine = used.pop("engine", 0.0)
    return Run(
        tokens_per_s=tokens / statistics.median(row.rollout for row in rows),
        engine_ms=1000 * engine / (tokens * len(rows)),
        rest_ms=1000 * sum(used.values()) / (tokens * len(rows)),
        appends=appends / (trajectories * len(finished.rows)),
    )


def _require_lengths(finished: Finished, new_tokens: int) -> None:
    lengths = {length for row in finished.rows for length in (row.length_min, row.length_max)}
    if lengths != {new_tokens}:
        raise JigsawError(f"completions have {min(lengths):g} to {max(lengths):g} tokens, not {new_tokens}")


async def _appends(node: Node) -> int:
    """How often the server has appended to a string since it started."""
    redis = Redis.from_url(node.addresses.redis_url)
    try:
        counts = await redis.info("commandstats")
        return int(counts.get("cmdstat_append", {"calls": 0})["calls"])
    finally:
        await redis.aclose()
