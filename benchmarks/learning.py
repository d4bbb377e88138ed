"""Does it learn: the demo's ``products`` job for 30 steps, once per seed, with held-out questions evaluated on the way.

Training draws from 80 of the 100 distinct questions; the other 20 are only evaluated, greedily. The gain is the mean reward
of the last five steps against the first three.
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from benchmarks.node_jobs import DEMO, Finished, fresh_home, on_node, run_job
from benchmarks.report import Readings, Report, parser, run_as_command
from libs.common.job import Job, load_job
from libs.node.supervisor import Node

FIRST_STEPS = 3
LAST_STEPS = 5


def main() -> None:
    """Train and report."""
    arguments = parser("learning", "Reward of the demo's products job at its start and end, for several seeds.")
    arguments.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED", help="of data order and sampling"
    )
    arguments.add_argument("--steps", type=int, default=30, help="optimiser steps (default 30)")
    options = arguments.parse_args()
    report = Report("learning", sys.argv[1:])
    steps, seeds = (8, options.seeds[:1]) if options.quick else (options.steps, options.seeds)
    with tempfile.TemporaryDirectory(prefix="jigsaw-learning-") as name:
        jobs = [seeded(seed, steps=steps) for seed in seeds]
        finished = on_node(fresh_home(Path(name), "node"), partial(_run, report, jobs))
    gains = []
    for seed, done in zip(seeds, finished, strict=True):
        gains.append(_describe(report, seed, done))
    report.add("gain", Readings.of(gains), "reward", "last 5 steps minus first 3, over the seeds")
    report.show(f"products, {steps} steps of 16 prompts x 4, SmolLM2-135M-Instruct, learning rate 2e-5")
    if options.json:
        report.write(options.json)


def seeded(seed: int, *, steps: int) -> Job:
    """The demo's job with another seed."""
    job = load_job(DEMO)
    train = msgspec.structs.replace(job.train, seed=seed, steps=steps, checkpoint_every=steps)
    return msgspec.structs.replace(job, name=f"products-seed-{seed}", train=train)


async def _run(report: Report, jobs: Sequence[Job], node: Node) -> list[Finished]:
    finished = []
    for job in jobs:
        report.say(job.name)
        finished.append(await run_job(node, job))
        curve = " ".join(f"{reward:.2f}" for reward in finished[-1].rewards)
        report.say(f"{job.name}: {curve}; held out {finished[-1].evaluations}")
    return finished


def _describe(report: Report, seed: int, done: Finished) -> float:
    """Note a run's figures; returns its gain."""
    first, last = statistics.mean(done.rewards[:FIRST_STEPS]), statistics.mean(done.rewards[-LAST_STEPS:])
    held_out = [reward for _, reward in done.evaluations]
    report.add(f"seed_{seed}.first", first, "reward", "mean of the first 3 steps")
    report.add(f"seed_{seed}.last", last, "reward", "mean of the last 5 steps")
    report.add(f"seed_{seed}.gain", last - first, "reward", "at least 0.5 is asked for")
    report.add(f"seed_{seed}.held_out_first", held_out[0], "reward", "20 unseen questions, before training")
    report.add(f"seed_{seed}.held_out_last", held_out[-1], "reward", "the same after training")
    return last - first


if __name__ == "__main__":
    run_as_command(main)
