"""Everything that the commands show: tables and live progress on a terminal, plain lines elsewhere, JSON on demand."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from libs.cli.summary import LAST_STEPS, JobSummary
from libs.common.history import FIRST_STEPS
from libs.common.samples import SampleLine

_STATUS_STYLES = {"succeeded": "green", "failed": "red", "cancelled": "yellow", "running": "cyan", "queued": "dim"}
_BARS = "▁▂▃▄▅▆▇█"


def say(line: str) -> None:
    """One line of news for the user."""
    _console().print(Text(line), soft_wrap=True)


def warn(line: str) -> None:
    """One line that isn't a result: to stderr."""
    Console(stderr=True).print(Text(line), soft_wrap=True)


def print_json(value: Any) -> None:
    """The value as JSON, for programs."""
    print(msgspec.json.format(msgspec.json.encode(value)).decode())


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """A table, or one line where there is nothing to list."""
    if not rows:
        say(empty)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    _console().print(table)


def job_table(jobs: Sequence[JobSummary]) -> Table:
    """One row a job: where it is and how it goes."""
    table = Table("job", "status", "phase", "step", "reward", "tokens/s", box=None, pad_edge=False, header_style="bold")
    for job in jobs:
        phase = f"{job.phase} {job.settled}/{job.expected}" if job.phase == "rollout" and job.expected else job.phase
        table.add_row(
            job.uid,
            Text(job.status, style=_STATUS_STYLES.get(job.status, "")),
            phase,
            f"{job.steps}/{job.steps_total}",
            number(job.reward),
            number(job.tokens_per_s, digits=0),
        )
    return table


def print_jobs(jobs: Sequence[JobSummary]) -> None:
    """The job table, or a line that says how to begin."""
    if jobs:
        _console().print(job_table(jobs))
    else:
        say("no jobs yet: jigsaw submit JOB.toml")


def final_table(jobs: Sequence[JobSummary]) -> None:
    """What came out of each job, with where its model and its log lie."""
    console = _console()
    table = Table(title="Results", header_style="bold")
    for column in ("", *(job.name for job in jobs)):
        table.add_column(column, overflow="fold")
    rows: list[tuple[str, list[str]]] = [
        ("status", [job.status for job in jobs]),
        (f"reward, mean of first {FIRST_STEPS} steps", [number(job.reward_first) for job in jobs]),
        (f"reward, mean of last {LAST_STEPS} steps", [number(job.reward_last) for job in jobs]),
        ("held-out reward", [_evaluations(job) for job in jobs]),
        ("steps", [f"{job.steps}/{job.steps_total}" for job in jobs]),
        ("trajectories trained", [str(job.trajectories_trained) for job in jobs]),
        ("tokens/s, prompt + completion", [number(job.tokens_per_s, digits=0) for job in jobs]),
        ("engine–trainer mismatch, KL nats/token", [number(job.mismatch_kl, digits=6) for job in jobs]),
    ]
    for name, cells in rows:
        table.add_row(name, *cells)
    console.print(table)
    for job in jobs:
        say(f"{job.name}: model {job.model_dir or '-'}")
        say(f"{job.name}: log {job.tensorboard_dir or '-'} (tensorboard --logdir)")
        if job.reason:
            say(f"{job.name}: {job.reason}")


def job_details(job: JobSummary, rewards: Sequence[float], facts: Mapping[str, str]) -> None:
    """Everything about one job."""
    console = _console()
    console.print(job_table([job]))
    for name, value in facts.items():
        if value:
            say(f"{name}: {value}")
    if rewards:
        say(
            f"rewards: {sparkline(rewards)}  mean of first {FIRST_STEPS}: {number(job.reward_first)}, "
            f"of last {LAST_STEPS}: {number(job.reward_last)}"
        )
    if job.evaluations:
        say(f"held-out: {', '.join(f'step {step}: {number(reward)}' for step, reward in job.evaluations)}")
    for line in job.warnings:
        say(f"warning: {line}")
    if job.reason:
        say(f"reason: {job.reason}")


def print_samples(lines: Sequence[SampleLine]) -> None:
    """Prompts and completions with their rewards and reasons."""
    console = _console()
    for line in lines:
        reward = "failed" if line.reward is None else f"reward {line.reward:g}"
        title = f"step {line.step} · group {line.group} · sample {line.sample} · {line.purpose} · {reward}"
        body = Group(
            Text(line.prompt, style="dim"),
            Text(line.completion),
            Text(f"{line.reason} · {line.tokens} tokens · ended by {line.stop_reason or 'failure'}", style="italic"),
        )
        console.print(Panel(body, title=title, title_align="left"))


def sparkline(values: Sequence[float], *, width: int = 60) -> str:
    """The last values as a row of bars between their least and greatest."""
    shown = values[-width:]
    low, high = min(shown), max(shown)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in shown)


def number(value: float | None, *, digits: int = 3) -> str:
    """A number as a cell."""
    return "-" if value is None else f"{value:.{digits}f}"


class Progress:
    """Shows jobs as they go: a live table on a terminal, one line for each thing that happened elsewhere.

    Args:
        live: the terminal's display, if there is one. quiet: show nothing, because the result is for a program.
    """

    def __init__(self, live: Live | None, *, quiet: bool = False) -> None:
        self._live, self._quiet = live, quiet
        self._told: dict[str, tuple[str, int]] = {}
        self._warned: set[tuple[str, str]] = set()

    def show(self, jobs: Sequence[JobSummary]) -> None:
        """The jobs as they are now."""
        if self._quiet:
            return
        for job in jobs:
            for line in job.warnings:
                if (job.uid, line) not in self._warned:
                    self._warned.add((job.uid, line))
                    self._say(f"{_clock()} {job.name} warning: {line}")
        if self._live is not None:
            self._live.update(job_table(jobs))
            return
        for job in jobs:
            now = (job.status, job.steps)
            if self._told.get(job.uid) != now:
                self._told[job.uid] = now
                self._say(_news(job))

    def _say(self, line: str) -> None:
        """A line that stays, above the live table if there is one."""
        console = self._live.console if self._live else _console()
        console.print(Text(line), soft_wrap=True)


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Progress]:
    """Progress display for as long as the block lasts."""
    console = _console()
    if quiet or not console.is_terminal:
        yield Progress(None, quiet=quiet)
        return
    with Live(console=console, refresh_per_second=4) as live:
        yield Progress(live)


def _news(job: JobSummary) -> str:
    parts = [_clock(), job.name, job.status]
    if job.steps:
        parts.append(f"step {job.steps}/{job.steps_total} reward {number(job.reward)}")
        parts.append(f"{number(job.tokens_per_s, digits=0)} tokens/s")
    if job.reason:
        parts.append(f"({job.reason})")
    return " ".join(parts)


def _evaluations(job: JobSummary) -> str:
    if not job.evaluations:
        return "-"
    (first, before), (last, after) = job.evaluations[0], job.evaluations[-1]
    return f"{number(before)} (step {first}) → {number(after)} (step {last})"


def _clock() -> str:
    return time.strftime("%H:%M:%S")


def _console() -> Console:
    return Console(highlight=False)
