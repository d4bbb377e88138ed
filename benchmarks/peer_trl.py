"""The same job in TRL's ``GRPOTrainer`` and here, in turn: tokens of prompts and completions per second, and memory.

Model SmolLM2-135M-Instruct, reasoning-gym's products, 16 prompts x 4 samples, exactly 32 new tokens each, bf16, all cores,
AdamW at 2e-5. A reading is one run's steps after its first, between the step boundaries that each system marks itself, so
everything in between counts: generation, scoring, training, and what this system spends on its services. TRL gets the
micro-batch size, and the allocator settings, with which it is fastest here.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import msgspec

from benchmarks.fixed_length import endless_model, write_prompts
from benchmarks.node_jobs import fresh_home, on_node, run_job
from benchmarks.processes import PeakMemory
from benchmarks.report import Readings, Report, parser, ratios, run_as_command
from libs.common.errors import JigsawError
from libs.common.job import Job, job_from
from services.trainer.process import ALLOCATOR_ENVIRONMENT, usable_cores

ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / ".venv-trl"
LOCK = Path(__file__).with_suffix(".lock")
NEW_TOKENS = 32
MICRO_BATCHES = (64, 32, 16, 8)
WARM_UP = 1


class Size(msgspec.Struct, frozen=True):
    """How much is measured: steps of a run after warm-up, runs of each system, steps per setting while tuning TRL."""

    steps: int
    rounds: int
    tuning_steps: int


SIZES = MappingProxyType({"full": Size(steps=4, rounds=3, tuning_steps=1), "quick": Size(steps=1, rounds=1, tuning_steps=0)})


class TrlSettings(msgspec.Struct, frozen=True):
    """What TRL is tuned by: completions of a forward pass, and glibc's allocator told to keep its memory."""

    micro_batch: int
    allocator: bool

    def __str__(self) -> str:
        return f"micro-batch {self.micro_batch}, allocator {'tuned' if self.allocator else 'as it is'}"


class Run(msgspec.Struct, frozen=True):
    """A run's measured steps: prompt and completion tokens and seconds of all of them together, and the peak memory."""

    tokens: float
    seconds: float
    steps: int
    peak_mb: float

    @property
    def tokens_per_s(self) -> float:
        """Throughput of whole steps."""
        return self.tokens / self.seconds


class TrlStep(msgspec.Struct, frozen=True):
    """A line of :mod:`benchmarks.peer_trl_job`; tokens are counted from the start."""

    step: int
    time: float
    tokens: float
    length_min: float
    length_max: float


class Inputs(msgspec.Struct, frozen=True):
    """What both systems are given: the endless model, the prompts, and a folder to work in."""

    model: Path
    prompts: Path
    folder: Path


def main() -> None:
    """Measure and report."""
    arguments = parser("peer_trl", "The same GRPO job in TRL and here: tokens/s of whole steps, and memory.")
    arguments.add_argument("--micro-batch", type=int, choices=MICRO_BATCHES, help="don't look for TRL's best micro-batch")
    options = arguments.parse_args()
    report = Report("peer_trl", sys.argv[1:])
    size = SIZES["quick" if options.quick else "full"]
    build_environment(report)
    with tempfile.TemporaryDirectory(prefix="jigsaw-peer-") as name:
        folder = Path(name)
        inputs = Inputs(endless_model(folder), write_prompts(folder / "prompts.jsonl"), folder)
        if options.micro_batch or not size.tuning_steps:
            best = TrlSettings(options.micro_batch or MICRO_BATCHES[1], allocator=True)
        else:
            best = tuned(inputs, steps=size.tuning_steps, report=report)
        report.say(f"TRL's settings: {best}")
        theirs: list[Run] = []
        ours: list[Run] = []
        for number in range(1, size.rounds + 1):
            theirs.append(run_trl(inputs, best, steps=size.steps))
            report.say(f"round {number}: TRL {_speed(theirs[-1])}")
            ours.append(run_ours(inputs, steps=size.steps))
            report.say(f"round {number}: JigsawRL {_speed(ours[-1])}")
    _conclude(report, theirs, ours, best)
    report.show("One GRPO job, TRL 1.16.0 and JigsawRL in turn")
    if options.json:
        report.write(options.json)


def build_environment(report: Report) -> None:
    """Make TRL's own environment from its lock file, unless it is there already.

    Raises:
        JigsawError: it can't be made.
    """
    digest, mark = hashlib.sha256(LOCK.read_bytes()).hexdigest(), ENVIRONMENT / "lock.sha256"
    if mark.is_file() and mark.read_text(encoding="utf-8") == digest:
        return
    report.say(f"making {ENVIRONMENT.name} from {LOCK.name}: a minute or two")
    python = str(ENVIRONMENT / "bin" / "python")
    for command in (
        [sys.executable, "-m", "venv", str(ENVIRONMENT)],
        [python, "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", str(LOCK)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise JigsawError(f"{' '.join(command)} failed: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    mark.write_text(digest, encoding="utf-8")


def tuned(inputs: Inputs, *, steps: int, report: Report) -> TrlSettings:
    """The settings with which TRL is fastest here: the micro-batch first, then the allocator."""

    def speed(candidate: TrlSettings) -> float:
        run = run_trl(inputs, candidate, steps=steps)
        report.say(f"tuning TRL: {candidate}: {_speed(run)}")
        return run.tokens_per_s

    candidates = [TrlSettings(size, allocator=True) for size in MICRO_BATCHES]
    speeds = {candidate: speed(candidate) for candidate in candidates}
    best = max(speeds, key=lambda candidate: speeds[candidate])
    plain = TrlSettings(best.micro_batch, allocator=False)
    return plain if speed(plain) > speeds[best] else best


def run_trl(inputs: Inputs, settings: TrlSettings, *, steps: int) -> Run:
    """One run of TRL.

    Raises:
        JigsawError: it failed, or its completions don't have the agreed length.
    """
    threads = str(usable_cores())
    variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    variables |= {"TOKENIZERS_PARALLELISM": "false", **(ALLOCATOR_ENVIRONMENT if settings.allocator else {})}
    flags = {"model": inputs.model, "prompts": inputs.prompts, "steps": WARM_UP + steps, "new-tokens": NEW_TOKENS}
    flags |= {"micro-batch": settings.micro_batch}
    command = [str(ENVIRONMENT / "bin" / "python"), str(Path(__file__).with_name("peer_trl_job.py"))]
    command += [f"--{name}={value}" for name, value in flags.items()]
    log = inputs.folder / "trl.log"
    with (
        log.open("w", encoding="utf-8") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **variables}
        ) as process,
        PeakMemory(process.pid, with_root=True) as memory,
    ):
        lines = list(_steps(process))
    if process.returncode or len(lines) < WARM_UP + steps:
        said = log.read_text(encoding="utf-8").strip().splitlines()
        raise JigsawError(f"TRL ended with code {process.returncode}: {said[-1] if said else 'it said nothing'}")
    _check_lengths("TRL", [length for line in lines for length in (line.length_min, line.length_max)])
    first, last = lines[WARM_UP - 1], lines[-1]
    return Run(last.tokens - first.tokens, last.time - first.time, last.step - first.step, memory.peak_mb)


def run_ours(inputs: Inputs, *, steps: int) -> Run:
    """One run on an embedded node; the final checkpoint comes after the last step and isn't measured, nor has TRL one.

    Raises:
        JigsawError: it failed, or its completions don't have the agreed length.
    """
    job = our_job(inputs, steps=WARM_UP + steps)
    with PeakMemory(with_root=True) as memory:
        finished = on_node(fresh_home(inputs.folder, "node"), partial(run_job, job=job))
    measured = finished.intervals(after=WARM_UP)
    _check_lengths("JigsawRL", [length for row in finished.rows for length in (row.length_min, row.length_max)])
    tokens, seconds = sum(row.tokens for row, _ in measured), sum(seconds for _, seconds in measured)
    return Run(tokens, seconds, len(measured), memory.peak_mb)


def our_job(inputs: Inputs, *, steps: int) -> Job:
    """The job, as it is submitted here: the demo's settings."""
    content = {
        "name": "peer",
        "model": {"path": str(inputs.model), "max_context": 512},
        "data": {"path": str(inputs.prompts)},
        "rollout": {"batch": 16, "group": 4, "max_new_tokens": NEW_TOKENS, "kv_memory_mb": 256},
        "train": {"steps": steps, "learning_rate": 2e-5, "checkpoint_every": steps},
    }
    return job_from(content, file="peer_trl")


def _steps(process: "subprocess.Popen[str]") -> Iterator[TrlStep]:
    """The lines that tell of steps; libraries may print others."""
    for line in process.stdout or ():
        if line.startswith("{"):
            yield msgspec.json.decode(line, type=TrlStep)


def _check_lengths(system: str, lengths: Sequence[float]) -> None:
    if set(lengths) != {NEW_TOKENS}:
        raise JigsawError(f"{system}'s completions have {min(lengths):g} to {max(lengths):g} tokens, not {NEW_TOKENS}")


def _conclude(report: Report, theirs: Sequence[Run], ours: Sequence[Run], best: TrlSettings) -> None:
    for name, runs, note in (("trl", theirs, str(best)), ("jigsaw", ours, "one job on an embedded node")):
        report.add(f"{name}.tokens_per_s", Readings.of([run.tokens_per_s for run in runs]), "tokens/s", note)
        report.add(f"{name}.step_s", Readings.of([run.seconds / run.steps for run in runs]), "s")
        report.add(f"{name}.step_tokens", Readings.of([run.tokens / run.steps for run in runs]), "tokens")
        report.add(f"{name}.peak_memory_mb", Readings.of([run.peak_mb for run in runs]), "MiB", "all processes together")
    speed = ratios([run.tokens_per_s for run in ours], [run.tokens_per_s for run in theirs])
    report.add("ratio.tokens_per_s", speed, "x", "JigsawRL / TRL, round by round; at least 2")
    report.add("ratio.peak_memory", ratios([run.peak_mb for run in ours], [run.peak_mb for run in theirs]), "x")


def _speed(run: Run) -> str:
    return f"{run.tokens_per_s:.0f} tokens/s, {run.seconds / run.steps:.1f} s a step, peak {run.peak_mb / 1024:.1f} GiB"


if __name__ == "__main__":
    run_as_command(main)
