"""Rollout: tokens/s of the whole path (bus, store, leases, checkpoints, reward) against plain vLLM alone.

Both generate the demo's prompts, 16 x 4, exactly 32 new tokens each, in two (one per core) pinned processes of one thread,
log-probs on, in bf16. The path is timed by the trainer, from before the first record is created until the last score is
there, less the time until the step's new policy is in force, which is weight sync's.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from benchmarks.fixed_length import opening_ids
from benchmarks.node_jobs import demo_job, fresh_home, on_node, policy_waits, run_job
from benchmarks.plain_vllm import Work
from benchmarks.report import Readings, Report, ratios
from libs.common.child import die_with_parent
from libs.common.errors import JigsawError
from services.rollout.vllm_engine import engine_environment

BATCH, GROUP, NEW_TOKENS, KV_MEMORY_MB, MAX_CONTEXT, MAX_RUNNING = 16, 4, 32, 256, 512, 64


class PlainVllm:
    """One plain vLLM process per core, as a context manager; they start at once.

    Args:
        model: directory. folder: for what they are told and what they say.
    """

    def __init__(self, model: Path, folder: Path) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        prompts = opening_ids(model, BATCH)
        self.tokens = BATCH * GROUP * NEW_TOKENS
        self._processes = [
            self._start(core, model, [ids for ids in prompts[index :: len(self._cores)] for _ in range(GROUP)], folder)
            for index, core in enumerate(self._cores)
        ]
        for process in self._processes:
            self._expect(process, "ready 1")

    def round(self) -> float:
        """All prompts once; seconds until the slower process is done."""
        started = time.perf_counter()
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.write("\n")
                process.stdin.flush()
        answers = [self._expect(process, "done") for process in self._processes]
        seconds = time.perf_counter() - started
        if sum(int(answer.split()[1]) for answer in answers) != self.tokens:
            raise JigsawError(f"plain vLLM answered {answers}, not {self.tokens} tokens")
        return seconds

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()

    @staticmethod
    def _start(core: int, model: Path, prompts: Sequence[list[int]], folder: Path) -> "subprocess.Popen[str]":
        work = Work(str(model), list(prompts), NEW_TOKENS, MAX_RUNNING, KV_MEMORY_MB, MAX_CONTEXT)
        file = folder / f"plain-{core}.json"
        file.write_bytes(msgspec.json.encode(work))

        def before_exec() -> None:
            die_with_parent()
            os.sched_setaffinity(0, {core})

        with file.with_suffix(".log").open("w", encoding="utf-8") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "benchmarks.plain_vllm", str(file)],
                env={**os.environ, **engine_environment(1)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                preexec_fn=before_exec,  # noqa: PLW1509  # two plain system calls, nothing that needs a lock
            )

    @staticmethod
    def _expect(process: "subprocess.Popen[str]", word: str) -> str:
        """The next line that begins with ``word``; libraries may print others."""
        for line in process.stdout or ():
            if line.startswith(word):
                return line.strip()
        raise JigsawError(f"plain vLLM ended with code {process.wait()} before it said {word!r}")


def measure(report: Report, model: Path, folder: Path, *, rounds: int, repeats: int) -> None:
    """Plain vLLM and the path in turn, ``rounds`` times, each ``repeats`` times after a warm-up.

    Raises:
        JigsawError: one of them failed.
    """
    tokens = BATCH * GROUP * NEW_TOKENS
    plain: list[float] = []
    path: list[float] = []
    with_sync: list[float] = []
    for number in range(1, rounds + 1):
        plain.append(tokens / _plain_seconds(model, folder, repeats=repeats))
        seconds, sync = _path_seconds(model, folder, repeats=repeats)
        path.append(tokens / (seconds - sync))
        with_sync.append(tokens / seconds)
        report.say(f"rollout round {number}: plain vLLM {plain[-1]:.0f}, JigsawRL {path[-1]:.0f} completion tokens/s")
    report.add("rollout.plain_tokens_per_s", Readings.of(plain), "tokens/s", "vLLM alone, one process a core")
    report.add("rollout.tokens_per_s", Readings.of(path), "tokens/s", "whole path, policy in force")
    report.add("rollout.ratio", ratios(path, plain), "x", "at least 0.9")
    report.add("rollout.ratio_with_policy_load", ratios(with_sync, plain), "x", "the step's policy load counted, too")


def _plain_seconds(model: Path, folder: Path, *, repeats: int) -> float:
    plain = PlainVllm(model, folder)
    try:
        plain.round()
        return statistics.median(plain.round() for _ in range(repeats))
    finally:
        plain.close()


def _path_seconds(model: Path, folder: Path, *, repeats: int) -> tuple[float, float]:
    """Seconds of a rollout phase, and of it until its policy was in force; medians over the steps after the first."""
    job = demo_job(str(model), steps=repeats + 1)
    finished = on_node(fresh_home(folder, "rollout"), partial(run_job, job=job), log_level="debug")
    lengths = {length for row in finished.rows for length in (row.length_min, row.length_max)}
    if lengths != {NEW_TOKENS}:
        raise JigsawError(f"completions have {min(lengths):g} to {max(lengths):g} tokens, not {NEW_TOKENS}")
    waits = policy_waits(finished)
    rows = finished.rows[1:]
    return statistics.median(row.rollout for row in rows), statistics.median(waits[row.step] for row in rows)
