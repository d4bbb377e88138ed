"""``jigsaw demo``: a node, two different jobs, and what came out of them."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import anyio
import msgspec
import typer

from libs.cli import options, render
from libs.cli.follow import connected, follow
from libs.cli.node import node_settings
from libs.cli.submit import Steps, prepared, queue
from libs.cli.summary import JobSummary
from libs.common.errors import JigsawError, NodeError
from libs.common.job import Job
from libs.common.logging import configure
from libs.common.messages import Outcome
from libs.common.models import resolve_model
from libs.node.supervisor import Node, Ports, run_node

JOB_FILES = ("demo-products.toml", "demo-chain-sum.toml")


def demo(
    *,
    steps: Steps = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the final table to this file as JSON.")] = None,
    home: Annotated[
        Path | None, typer.Option(help="Keep everything here. Default: a new folder runs/demo-TIME.", show_default=False)
    ] = None,
) -> None:
    """Train a small language model on two arithmetic tasks at once, on this machine.

    Starts a node of its own, submits the two demo jobs, shows how they go, and takes the node down again. Models, logs and
    samples stay in the home folder.

    Example: jigsaw demo --steps 3 --json result.json
    """
    if json is not None and (json.is_dir() or not json.absolute().parent.is_dir()):
        raise JigsawError(f"--json {json}: a file in a folder that exists is expected")
    folder = (home or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")).absolute()
    settings = node_settings(None, folder)
    jobs = [prepared(file, steps=steps, settings=settings) for file in _job_files()]
    for path in {job.model.path for job in jobs}:
        resolve_model(path, note=render.say)
    log = configure(instance="node", level="warning")
    render.say(f"starting a node in {folder}")
    try:
        results = anyio.run(lambda: run_node(settings, partial(_run, jobs), ports=Ports(), log=log))
    finally:
        render.say(f"the node is down; everything it made is in {folder}")
    render.final_table(results)
    if json is not None:
        _write(json, results)
    failed = [job.name for job in results if job.status != Outcome.SUCCEEDED]
    if failed:
        raise JigsawError(f"{', '.join(failed)} didn't succeed; logs: {folder / 'logs'}")


def as_json(results: Sequence[JobSummary]) -> dict[str, Any]:
    """The final table for programs."""
    keys = [
        *("name", "status", "steps", "trajectories_trained", "reward_first", "reward_last"),
        *("tokens_per_s", "mismatch_kl", "model_dir"),
    ]
    return {"jobs": [{key: getattr(job, key) for key in keys} for job in results]}


async def _run(jobs: Sequence[Job], node: Node) -> list[JobSummary]:
    target = options.Target(node.addresses.nats_url, node.addresses.redis_url, node.settings)
    async with connected(target) as bus:
        uids = [await queue(bus, job) for job in jobs]
        with render.progress() as display:
            return await follow(bus, uids, display.show)


def _job_files() -> list[Path]:
    folder = Path(__file__).parents[2] / "examples"
    files = [folder / name for name in JOB_FILES]
    if missing := [file for file in files if not file.is_file()]:
        raise NodeError(f"{missing[0]} is missing: the demo runs from a checkout of the project")
    return files


def _write(path: Path, results: Sequence[JobSummary]) -> None:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(as_json(results))) + b"\n")
    except OSError as error:
        raise JigsawError(f"{path} can't be written: {error.strerror}") from None
