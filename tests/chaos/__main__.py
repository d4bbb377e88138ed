"""``make chaos``: campaign after campaign, each from a seed of its own, until so many faults have struck.

What is done is written down after each campaign, and the next one begins with a seed that hasn't been used, also when the
command is given again. A campaign that fails is written down too, with its cluster's files kept; the others go on. Every
``MODEL_EVERY``-th seed attacks jobs on a tiny model with vLLM, the others attack replays.
"""

import asyncio
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import structlog
import typer

from libs.common.errors import leaves
from tests.chaos.campaign import Report, Workload, run_campaign
from tests.chaos.invariants import check_same_weights
from tests.chaos.jobs import model_jobs, replayed_jobs
from tests.chaos.plan import planned
from tests.tiny_model import build_tiny_model

PER_CAMPAIGN = 84
MODEL_EVERY = 8
ON_MODEL = 24
"""Faults of a campaign on a model, whose engines take seconds to come back."""


class Done(msgspec.Struct, frozen=True):
    """A campaign that has been run; ``failure`` is "" if all invariants held."""

    seed: int
    report: Report
    failure: str = ""


def main(
    faults: Annotated[int, typer.Option(min=1, help="How many faults are to strike in all, at least.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Of the first campaign; used ones are passed over.")] = 1000,
    only: Annotated[int | None, typer.Option(min=0, help="Repeat the campaign of this seed, and nothing else.")] = None,
    folder: Annotated[Path, typer.Option(help="Where results and the files of failed campaigns go.")] = Path("runs/chaos"),
) -> None:
    """Attack clusters until so many faults have struck; exit 1 if an invariant was ever broken."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger("critical")
    )  # the services have logs of their own
    if only is not None:
        _tell([one := _run(folder / f"again-{only}", only)])
        sys.exit(bool(one.failure))
    results = folder / "campaigns.jsonl"
    done = _read(results)
    while (struck := sum(len(one.report.struck) for one in done)) < faults:
        number = next_seed(done, wanted=seed)
        print(f"{struck} of {faults} faults have struck; campaign {number} …", flush=True)
        one = _run(folder / f"campaign-{number}", number)
        done.append(one)
        with results.open("ab") as file:
            file.write(msgspec.json.encode(one) + b"\n")
        if not one.report.struck:
            sys.exit("no fault struck at all: the next campaign wouldn't do better")
    _tell(done)
    sys.exit(any(one.failure for one in done))


def next_seed(done: Sequence[Done], *, wanted: int) -> int:
    """The seed of the next campaign: the wanted one, or the first beyond all that have been used."""
    return max([wanted, *(one.seed + 1 for one in done)])


def _run(home: Path, seed: int) -> Done:
    """Run a campaign with its files in ``home``, which stay if it fails, and tell how it went."""
    report = Report()
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    try:
        _attack(home, build_tiny_model(home.parent / "model"), seed=seed, report=report)
    except Exception as error:  # whatever it is, the next campaign begins from nothing
        done = Done(seed, report, "; ".join(f"{type(leaf).__name__}: {leaf}" for leaf in leaves(error)))
    else:
        shutil.rmtree(home)
        done = Done(seed, report)
    jobs = f"{report.jobs} jobs, {report.cancelled} more cancelled"
    print(f"{len(report.struck)} faults, {jobs}, {report.seconds:.0f} s", flush=True)
    if done.failure:
        print(f"FAILED: {done.failure}\nAgain: python -m tests.chaos --only {seed}; its files: {home}", flush=True)
    return done


def _attack(home: Path, model: Path, *, seed: int, report: Report) -> None:
    if seed % MODEL_EVERY:
        workload = Workload(replayed_jobs(home, model))
        asyncio.run(run_campaign(home, workload, planned(seed, PER_CAMPAIGN), seed=seed, report=report))
    else:
        workload = Workload(model_jobs(home, model), at_once=1, rollouts=1)
        asyncio.run(run_campaign(home, workload, planned(seed, ON_MODEL), seed=seed, report=report))
        check_same_weights(home)


def _read(results: Path) -> list[Done]:
    lines = results.read_bytes().splitlines() if results.exists() else []
    return [msgspec.json.decode(line, type=Done) for line in lines]


def _tell(done: list[Done]) -> None:
    """How often each kind struck, at which moments, and which campaigns failed."""
    struck = [one for campaign in done for one in campaign.report.struck]
    for kind, count in sorted(Counter(one.kind for one in struck).items()):
        moments = Counter(one.moment for one in struck if one.kind == kind)
        print(f"{count:5} × {kind}: " + ", ".join(f"{moment} {times}" for moment, times in sorted(moments.items())))
    told = [campaign.report.testimony for campaign in done]
    seen, running, grown = (sum(getattr(one, name) for one in told) for name in ("seen", "running", "grown"))
    print(f"of {seen} trajectories {running} were seen while they ran, growing {grown} times")
    print(f"{len(struck)} faults, {sum(one.report.jobs for one in done)} jobs")
    print(f"failed: {[one.seed for one in done if one.failure] or 'none'}")


if __name__ == "__main__":
    typer.run(main)
