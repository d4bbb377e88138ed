"""Training: tokens/s of the learner against a bare loop over the same micro-batches.

Both run in one process set up like a training process, in turn; tokens are those of all sequences, each with its prompt,
without padding.
"""

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from benchmarks.fixed_length import MODEL, opening_ids
from benchmarks.report import Readings, Report, ratios
from libs.common.errors import JigsawError
from libs.common.models import resolve_model
from services.trainer.process import child_environment, usable_cores

PROMPTS, GROUP, NEW_TOKENS = 16, 4, 32


class Work(msgspec.Struct, frozen=True):
    """What :mod:`benchmarks.trainer_loop` trains on: prompt ids, one group of samples each."""

    model: str
    prompts: list[list[int]]
    group: int
    new_tokens: int
    repeats: int
    seed: int = 0


class Round(msgspec.Struct, frozen=True):
    """Seconds of one step of each.

    Attributes:
        tokens: of all sequences, each with its prompt, without padding: what the bare loop computes.
        computed: what the learner computes of them; a group's prompt once.
    """

    learner_s: float
    bare_s: float
    tokens: int
    computed: int


def measure(report: Report, folder: Path, *, repeats: int) -> None:
    """Run both and report.

    Raises:
        JigsawError: the process failed.
    """
    rounds = _rounds(folder, repeats=repeats)
    learner, bare = [one.tokens / one.learner_s for one in rounds], [one.tokens / one.bare_s for one in rounds]
    report.add("trainer.bare_tokens_per_s", Readings.of(bare), "tokens/s", "stock model, autocast, fused AdamW")
    report.add("trainer.tokens_per_s", Readings.of(learner), "tokens/s", "the same sequences, micro-batches and threads")
    report.add("trainer.ratio", ratios(learner, bare), "x", "at least 0.9; the learner computes a group's prompt once")
    computed = [one.computed / one.learner_s for one in rounds]
    report.add("trainer.ratio_of_computed", ratios(computed, bare), "x", "as above, repeated prompts not counted for it")


def _rounds(folder: Path, *, repeats: int) -> list[Round]:
    model = resolve_model(MODEL)
    work = Work(str(model), opening_ids(model, PROMPTS), GROUP, NEW_TOKENS, repeats)
    file = folder / "trainer.json"
    file.write_bytes(msgspec.json.encode(work))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.trainer_loop", str(file)],
        env={**os.environ, **child_environment(threads=usable_cores())},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise JigsawError(f"the trainer comparison failed: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    return [msgspec.json.decode(line, type=Round) for line in done.stdout.splitlines() if line.startswith("{")]
