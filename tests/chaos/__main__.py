"""``make chaos``: campaign after campaign, each from a seed of its own, until so many faults have struck.

What is done is written down after each campaign, and isn't done again when the command is given again. A campaign that fails
is written down too, with its cluster's files kept; the others go on.
"""

import asyncio
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import msgspec
import structlog
import typer

from libs.common.errors import leaves
from tests.chaos.campaign import Report, Workload, planned, run_campaign
from tests.chaos.jobs import replayed_jobs
from tests.tiny_model import build_tiny_model

PER_CAMPAIGN = 84


class Done(msgspec.Struct, frozen=True):
    """A campaign that has been run; ``failure`` is "" if all invariants held."""

    seed: int
    report: Report
    failure: str = ""


def main(
    faults: Annotated[int, typer.Option(min=1, help="How many faults are to strike in all.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of the first campaign; the next ones count up.")] = 1000,
    folder: Annotated[Path, typer.Option(help="Where results and the files of failed campaigns go.")] = Path("runs/chaos"),
) -> None:
    """Attack clusters until so many faults have struck; exit 1 if an invariant was ever broken."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger("critical")
    )  # the services have logs of their own
    results = folder / "campaigns.jsonl"
    done = _read(results)
    while (struck := sum(len(one.report.struck) for one in done)) < faults:
        number = seed + len(done)
        print(f"{struck} of {faults} faults have struck; campaign {number} …", flush=True)
        one = _run(folder, number, min(PER_CAMPAIGN, faults - struck))
        done.append(one)
        with results.open("ab") as file:
            file.write(msgspec.json.encode(one) + b"\n")
        print(f"{one.report.jobs} jobs, {one.report.seconds:.0f} s{one.failure and ', FAILED: ' + one.failure}", flush=True)
        if not one.report.struck:
            sys.exit("no fault struck at all: the next campaign wouldn't do better")
    _tell(done)
    sys.exit(any(one.failure for one in done))


def _run(folder: Path, seed: int, count: int) -> Done:
    home = folder / f"campaign-{seed}"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    workload, report = Workload(replayed_jobs(home, build_tiny_model(folder / "model"))), Report()
    try:
        asyncio.run(run_campaign(home, workload, planned(seed, count), seed=seed, report=report))
    except Exception as error:  # whatever it is, the next campaign begins from nothing
        return Done(seed, report, "; ".join(f"{type(leaf).__name__}: {leaf}" for leaf in leaves(error)))
    shutil.rmtree(home)
    return Done(seed, report)


def _read(results: Path) -> list[Done]:
    lines = results.read_bytes().splitlines() if results.exists() else []
    return [msgspec.json.decode(line, type=Done) for line in lines]


def _tell(done: list[Done]) -> None:
    """How often each kind struck, at which moments, and which campaigns failed."""
    struck = [one for campaign in done for one in campaign.report.struck]
    for kind, count in sorted(Counter(one.kind for one in struck).items()):
        moments = Counter(one.moment for one in struck if one.kind == kind)
        print(f"{count:5} × {kind}: " + ", ".join(f"{moment} {times}" for moment, times in sorted(moments.items())))
    print(f"{len(struck)} faults, {sum(one.report.jobs for one in done)} jobs")
    print(f"failed: {[one.seed for one in done if one.failure] or 'none'}")


if __name__ == "__main__":
    typer.run(main)
