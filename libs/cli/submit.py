"""``jigsaw submit``: checks a job file as far as it can, uploads its data, and queues it."""

import secrets
import time
from pathlib import Path
from typing import Annotated

import anyio
import msgspec
import typer

from libs.cli import options, render
from libs.cli.checks import check_job, data_sections
from libs.cli.follow import connected, follow, wait_until_accepted
from libs.common import blobs
from libs.common.bus import Bus
from libs.common.errors import JigsawError
from libs.common.job import Job, load_job
from libs.common.messages import JobState, Outcome, SubmitJob
from libs.common.settings import NodeSettings

ACCEPT_S = 15.0

Steps = Annotated[int | None, typer.Option(min=1, help="Train this many steps instead of the job file's train.steps.")]


def submit(
    file: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.")],
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="Follow the job until it ends; exit 0 only if it succeeds.")
    ] = False,
    steps: Steps = None,
    json: options.Json = False,
    home: options.Home = None,
    url: options.Url = None,
    redis_url: options.RedisUrl = None,
) -> None:
    """Check a job file and hand it to a node.

    The file, every row of its datasets, its model, its reward function and its prompts' lengths are checked first; if
    anything is wrong, nothing is queued. Local datasets travel with the job.

    Example: jigsaw submit examples/demo-products.toml --steps 5 --watch
    """
    job = _read(file, steps=steps)  # first, so that a mistake in the file is told even where no node is up
    target = options.locate(home, url, redis_url)
    check_job(job, file=str(file), settings=target.settings)
    anyio.run(_submit, target, job, watch, json)


def prepared(file: Path, *, steps: int | None, settings: NodeSettings | None) -> Job:
    """The job of a file, checked.

    Raises:
        JigsawError: what is wrong with it.
    """
    job = _read(file, steps=steps)
    check_job(job, file=str(file), settings=settings)
    return job


def _read(file: Path, *, steps: int | None) -> Job:
    job = load_job(file)
    if steps is None:
        return job
    return msgspec.structs.replace(job, train=msgspec.structs.replace(job.train, steps=steps))


async def queue(bus: Bus, job: Job) -> str:
    """Upload the job's data, hand it in and wait until the scheduler has it; returns its uid.

    Raises:
        JigsawError: the bus or the scheduler doesn't take it.
    """
    uid = f"{job.name}-{secrets.token_hex(4)}"
    paths = {section.path for section in data_sections(job) if section.path is not None}
    digests = {path: await blobs.upload(bus, Path(path)) for path in sorted(paths)}
    message = SubmitJob(sender=options.instance_id(), job_uid=uid, job=job, blobs=digests, submitted_at=time.time())
    await bus.publish(message)
    record = await wait_until_accepted(bus, uid, timeout_s=ACCEPT_S)
    if record.state is JobState.ENDED and record.outcome is Outcome.FAILED:
        raise JigsawError(f"{uid} was refused: {record.reason}")
    return uid


async def _submit(target: options.Target, job: Job, watch: bool, json: bool) -> None:
    async with connected(target) as bus:
        uid = await queue(bus, job)
        if not watch:
            if json:
                render.print_json({"job": uid})
            else:
                render.say(f"{uid} is queued: jigsaw watch {uid}")
            return
        with render.progress(quiet=json) as display:
            (summary,) = await follow(bus, {uid}, display.show)
    if json:
        render.print_json(summary)
    if summary.status != Outcome.SUCCEEDED:
        raise JigsawError(f"{uid} {summary.status}: {summary.reason}")
