"""``jigsaw samples``: what the model wrote, straight from the job's folder, so that no node need be up."""

from pathlib import Path
from typing import Annotated

import typer

from libs.cli import options, render
from libs.common.errors import JigsawError
from libs.common.samples import SampleLine, read_samples, sampled_steps


def samples(
    job: options.JobRef,
    *,
    step: Annotated[int | None, typer.Option(min=0, help="Of this step; the last one by default.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Highest reward first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest reward first.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 5,
    json: options.Json = False,
    home: options.Home = None,
) -> None:
    """Show prompts, completions, rewards and reasons of one step.

    Example: jigsaw samples demo-products --step 3 --worst --limit 10
    """
    if best and worst:
        raise JigsawError("--best and --worst exclude each other")
    folder = _job_folder(job, options.home_of(home))
    steps = sampled_steps(folder)
    if not steps:
        raise JigsawError(f"{folder.name} has no samples yet")
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise JigsawError(f"{folder.name} has samples of steps {steps[0]} to {steps[-1]}, not of {chosen}")
    lines = ordered(read_samples(folder, chosen), best=best, worst=worst)[:limit]
    if json:
        render.print_json({"job": folder.name, "samples": lines})
    else:
        render.print_samples(lines)


def ordered(lines: list[SampleLine], *, best: bool, worst: bool) -> list[SampleLine]:
    """By reward, failed ones last either way; or as they are."""
    if not (best or worst):
        return lines
    sign = -1.0 if best else 1.0
    return sorted(lines, key=lambda line: (line.reward is None, sign * (line.reward or 0.0)))


def _job_folder(reference: str, home: Path) -> Path:
    folders = sorted((path for path in (home / "jobs").glob("*") if path.is_dir()), key=lambda path: path.stat().st_mtime)
    return home / "jobs" / options.latest_uid(reference, [folder.name for folder in folders])
