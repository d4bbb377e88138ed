"""Time and memory of a step: its shares, and its two heavy parts against the bare engine and a bare loop.

Four parts, each of which can be run alone: ``shares`` of a demo step, ``rollout`` against plain vLLM, ``trainer`` against a
bare training loop, and what an ``idle`` node uses.
"""

import sys
import tempfile
from pathlib import Path
from types import MappingProxyType

import msgspec

from benchmarks import rollout_speed, step_shares, trainer_speed
from benchmarks.fixed_length import endless_model
from benchmarks.report import Report, parser, run_as_command

PARTS = ("shares", "rollout", "trainer", "idle")


class Size(msgspec.Struct, frozen=True):
    """How much is measured.

    Attributes:
        steps: of the demo job after warm-up. rounds, repeats: of the rollout comparison. trainer: steps of each trainer.
        idle_s: seconds of an idle node.
    """

    steps: int
    rounds: int
    repeats: int
    trainer: int
    idle_s: float


SIZES = MappingProxyType(
    {
        "full": Size(steps=8, rounds=3, repeats=5, trainer=6, idle_s=20.0),
        "quick": Size(steps=2, rounds=1, repeats=2, trainer=1, idle_s=5.0),
    }
)


def main() -> None:
    """Measure and report."""
    arguments = parser("step", "Shares of a demo step, and its parts against the bare engine and a bare training loop.")
    arguments.add_argument("--part", action="append", choices=PARTS, help="only this part (may be given several times)")
    options = arguments.parse_args()
    report = Report("step", sys.argv[1:])
    size = SIZES["quick" if options.quick else "full"]
    parts = options.part or PARTS
    with tempfile.TemporaryDirectory(prefix="jigsaw-step-") as name:
        folder = Path(name)
        if "idle" in parts:
            report.say("idle node")
            step_shares.measure_idle(report, folder, seconds=size.idle_s)
        if "shares" in parts:
            report.say(f"demo job, {size.steps} steps")
            step_shares.measure_step(report, folder, steps=size.steps)
        if "rollout" in parts:
            rollout_speed.measure(report, endless_model(folder), folder, rounds=size.rounds, repeats=size.repeats)
        if "trainer" in parts:
            report.say(f"trainer, {size.trainer} steps each")
            trainer_speed.measure(report, folder, repeats=size.trainer)
    report.show("A step of the demo's job (16 prompts x 4, 32 new tokens), SmolLM2-135M-Instruct")
    if options.json:
        report.write(options.json)


if __name__ == "__main__":
    run_as_command(main)
