"""``jigsaw jobs``, ``show``, ``watch`` and ``cancel``: what became of the jobs of a node."""

from collections import Counter
from typing import Annotated

import anyio
import msgspec
import typer

from libs.cli import options, render
from libs.cli.follow import CONNECT_S, all_jobs, connected, find_job, follow
from libs.cli.summary import summaries, summarise
from libs.common.bus import Bus
from libs.common.errors import JigsawError
from libs.common.history import History
from libs.common.messages import CancelJob, JobProgress, JobRecord, JobState
from libs.common.store import TrajectoryStore

CANCEL_S = 20.0

DURABILITY = ("resumes", "moves", "retries", "deaths", "recomputed_tokens")
"""What it took to get the samples, of a job's history: see :class:`libs.common.history.History`."""


def jobs(
    *, json: options.Json = False, home: options.Home = None, url: options.Url = None, redis_url: options.RedisUrl = None
) -> None:
    """List the node's jobs, oldest first, with where they are.

    Example: jigsaw jobs --json
    """

    async def run() -> None:
        async with connected(options.locate(home, url, redis_url)) as bus:
            found = summaries(*await all_jobs(bus))
        if json:
            render.print_json({"jobs": found})
        else:
            render.print_jobs(found)

    anyio.run(run)


def show(
    job: options.JobRef,
    *,
    json: options.Json = False,
    home: options.Home = None,
    url: options.Url = None,
    redis_url: options.RedisUrl = None,
) -> None:
    """Show one job: settings, rewards so far, evaluations, warnings, where its results lie.

    Example: jigsaw show demo-products
    """
    anyio.run(_show, options.locate(home, url, redis_url), job, json)


async def _show(target: options.Target, reference: str, json: bool) -> None:
    async with connected(target) as bus:
        record = await find_job(bus, reference)
        progress = await (await bus.table(JobProgress)).get(record.job_uid)
    trajectories = await _trajectories(target.redis_url, record.job_uid) if target.redis_url else {}
    summary = summarise(record, progress)
    history = progress.history if progress else History()
    rewards = history.rewards
    durability = {name: getattr(history, name) for name in DURABILITY}
    if json:
        plain = msgspec.to_builtins(summary)
        settings = msgspec.to_builtins(record.job)
        render.print_json(
            plain | {"rewards": rewards, "trajectories": trajectories, "durability": durability, "job": settings}
        )
        return
    facts = {
        "model": record.job.model.path,
        "trainer": record.trainer,
        "trajectories in the store": ", ".join(f"{count} {state}" for state, count in sorted(trajectories.items())),
        "interruptions": ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in durability.items() if count),
        "trained model": summary.model_dir or "",
        "log": summary.tensorboard_dir or "",
    }
    render.job_details(summary, rewards, facts)


async def _trajectories(redis_url: str, job_uid: str) -> dict[str, int]:
    """How many of the job's trajectories in the store are in which state."""
    store = await TrajectoryStore.connect(redis_url, patience_s=CONNECT_S)
    try:
        states = await store.states(await store.members(job_uid))
    finally:
        await store.close()
    return dict(Counter(states))


def watch(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="A job; without one, all jobs.")] = None,
    *,
    home: options.Home = None,
    url: options.Url = None,
    redis_url: options.RedisUrl = None,
) -> None:
    """Follow a job until it ends, or all jobs until Ctrl-C.

    Example: jigsaw watch demo-products
    """

    async def run() -> None:
        async with connected(options.locate(home, url, redis_url)) as bus:
            wanted = {(await find_job(bus, job)).job_uid} if job is not None else set()
            with render.progress() as display:
                await follow(bus, wanted, display.show)

    anyio.run(run)


def cancel(
    job: options.JobRef, *, home: options.Home = None, url: options.Url = None, redis_url: options.RedisUrl = None
) -> None:
    """End a job now, queued or running. What it has saved stays.

    Example: jigsaw cancel demo-products
    """

    async def run() -> None:
        async with connected(options.locate(home, url, redis_url)) as bus:
            record = await find_job(bus, job)
            if record.state is JobState.ENDED:
                raise JigsawError(f"{record.job_uid} has ended already: {record.outcome}")
            await bus.publish(CancelJob(sender=options.instance_id(), job_uid=record.job_uid))
            ended = await _wait_until_ended(bus, record.job_uid)
        render.say(f"{record.job_uid} {ended.outcome}")

    anyio.run(run)


async def _wait_until_ended(bus: Bus, uid: str) -> JobRecord:
    with anyio.move_on_after(CANCEL_S):
        async for change in (await bus.table(JobRecord)).watch(uid):
            if change.value is not None and change.value.state is JobState.ENDED:
                return change.value
    raise JigsawError(f"{uid} hasn't ended after {CANCEL_S:.0f} s: is the scheduler up?")
