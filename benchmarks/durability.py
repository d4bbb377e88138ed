"""What it costs to lose nothing: checkpoints, deaths of workers, planned moves, and the store.

Four parts, each of which can be run alone: the ``cost`` of checkpointing, what a ``kill`` loses and takes, what a planned
``move`` takes, and the ``store`` alone. Kills and moves are measured twice: with the model, and with an engine that plays
given speeds, which shows what the system adds where the model's own times vary more than that.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import anyio
import msgspec

from benchmarks import checkpoint_cost, handover, kills, store_speed
from benchmarks.fixed_length import PROMPTS, endless_model
from benchmarks.node_jobs import fresh_home
from benchmarks.report import Report, parser, run_as_command
from libs.common.job import Job
from libs.common.lengths import ListedLengths
from libs.common.replay import ReplayedRollout
from libs.common.sections import ModelSection, RewardSection, RolloutSection, TrainSection
from libs.node.servers import start_valkey

PARTS = ("cost", "kill", "move", "store")
CONTEXT, KV_MEMORY_MB = 512, 256
LENGTH = 256
SPEEDS = ReplayedRollout(
    lengths=ListedLengths((1000,)), prefill_tokens_per_s=1000.0, decode_ms=25.0, decode_ms_per_sequence=2.0
)
"""About those of the model on one core of a machine with bf16 arithmetic."""


class Size(msgspec.Struct, frozen=True):
    """How much is measured.

    Attributes:
        steps, rounds: of the jobs with and without checkpoints. kills: with each engine. moves: likewise.
        round_trips: of the store.
    """

    steps: int
    rounds: int
    kills: int
    moves: int
    round_trips: int


SIZES = MappingProxyType(
    {
        "full": Size(steps=2, rounds=3, kills=5, moves=15, round_trips=200),
        "quick": Size(steps=2, rounds=1, kills=1, moves=2, round_trips=20),
    }
)


def job_of(model: Path, name: str, rollout: RolloutSection, *, steps: int = 1) -> Job:
    """A job whose training takes no time. The model computes in float32: bf16 is emulated on a CPU without it."""
    return Job(
        name=name,
        model=ModelSection(path=str(model), dtype="float32", max_context=CONTEXT),
        data=PROMPTS,
        rollout=rollout,
        reward=RewardSection(function="last_number"),
        train=TrainSection(steps=steps, checkpoint_every=steps, engine="replay"),
    )


def _on(engine: Literal["vllm", "replay"], *, batch: int) -> RolloutSection:
    """The defaults, with responses of ``LENGTH`` tokens, two for each of ``batch`` prompts."""
    return RolloutSection(
        batch=batch,
        group=2,
        max_new_tokens=LENGTH,
        kv_memory_mb=KV_MEMORY_MB,
        engine=engine,
        engine_args=SPEEDS if engine == "replay" else ReplayedRollout(),
    )


def main() -> None:
    """Measure and report."""
    arguments = parser("durability", "What checkpoints cost, what deaths and moves take, and how fast the store is.")
    arguments.add_argument("--part", action="append", choices=PARTS, help="only this part (may be given several times)")
    options = arguments.parse_args()
    report = Report("durability", sys.argv[1:])
    size = SIZES["quick" if options.quick else "full"]
    parts = options.part or PARTS
    with tempfile.TemporaryDirectory(prefix="jigsaw-durability-") as temporary:
        folder = Path(temporary)
        if "store" in parts:
            report.say("store")
            with start_valkey(fresh_home(folder, "store")) as server:
                server.wait_until_answers()
                anyio.run(partial(store_speed.measure, report, server.url, rounds=size.round_trips))
        model = endless_model(folder)
        for engine in ("vllm", "replay"):
            if "move" in parts:
                rollout = msgspec.structs.replace(_on(engine, batch=2), checkpoint_tokens=1, max_new_tokens=handover.LENGTH)
                job = job_of(model, "move", rollout)
                home, name = fresh_home(folder, "move"), f"move.{engine}"
                anyio.run(partial(handover.measure, report, name, job=job, model=model, home=home, moves=size.moves))
            if "kill" in parts:
                job, home, name = job_of(model, "kill", _on(engine, batch=4)), fresh_home(folder, "kill"), f"kill.{engine}"
                anyio.run(partial(kills.measure, report, name, job=job, model=model, home=home, kills=size.kills))
        if "cost" in parts:
            job = job_of(model, "cost", _on("vllm", batch=8), steps=size.steps)
            checkpoint_cost.measure(report, folder, job=job, rounds=size.rounds)
    report.show("Durability: checkpoints, deaths, moves and the store; SmolLM2-135M-Instruct in float32")
    if options.json:
        report.write(options.json)


if __name__ == "__main__":
    run_as_command(main)
