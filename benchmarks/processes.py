"""What the processes of a system use: memory of all together, CPU of each, and when those that compute do.

CPU times come from the kernel's scheduler statistics, to the nanosecond: ticks of 10 ms are too coarse for a system that
should cost next to nothing.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import psutil

MEGABYTE = 1 << 20
INTERVAL_S = 0.02
MEMORY_INTERVAL_S = 0.5
TOTALS_EVERY = 50
"""Samples of the computing processes per sample of everything, which looks at every process of the machine."""

COMPUTE = {
    "services.rollout.engine_process": "engine",
    "services.trainer.training_process": "training",
    "services.trainer.replay_process": "training",
}
"""Modules of the processes that compute, and what they are called here."""

_SERVERS = {"nats-server": "nats", "valkey-server": "valkey", "redis-server": "valkey"}


class Member(msgspec.Struct, frozen=True):
    """A process of the node: its role, and the instance if it is a service itself."""

    pid: int
    role: str


class Sample(msgspec.Struct, frozen=True):
    """Seconds used until a time (seconds since 1970), by ``role/pid``."""

    at: float
    used_s: dict[str, float]


def members(root: int | None = None) -> list[Member]:
    """All processes below ``root`` (this process by default); one without a role of its own has its parent's."""
    found: dict[int, Member] = {}
    for process in psutil.Process(root).children(recursive=True):
        try:
            role = _SERVERS.get(process.name()) or _role(process.cmdline())
            parent = found.get(process.ppid())
        except psutil.NoSuchProcess:
            continue
        found[process.pid] = Member(process.pid, role or (parent.role if parent else "other"))
    return list(found.values())


def cpu_seconds(pid: int) -> float:
    """CPU seconds that the threads of a process have used; 0 when it is gone."""
    return sum(_schedule(task)[0] for task in Path(f"/proc/{pid}/task").glob("*"))


def busy_seconds(pid: int) -> float:
    """Seconds for which a process's main thread had something to compute: on a core, or waiting for one."""
    return sum(_schedule(Path(f"/proc/{pid}/task/{pid}")))


def _schedule(task: Path) -> tuple[float, float]:
    """Seconds of a thread on a core, and ready but waiting for one; 0 when it has ended."""
    try:
        on_core, waiting, _ = (task / "schedstat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return 0.0, 0.0
    return int(on_core) / 1e9, int(waiting) / 1e9


def resident_mb(pids: Iterable[int]) -> float:
    """Resident memory of processes together, in MiB; pages that they share count for each."""
    total = 0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / MEGABYTE


class PeakMemory:
    """Peak of the resident memory of all processes below one, as a context manager.

    Args:
        root: their ancestor, this process by default. with_root: count it, too.
    """

    def __init__(self, root: int | None = None, *, with_root: bool = False) -> None:
        self._root, self._with_root = psutil.Process(root), with_root
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
        self.peak_mb = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(MEMORY_INTERVAL_S):
            try:
                pids = [child.pid for child in self._root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            self.peak_mb = max(self.peak_mb, resident_mb([*pids, self._root.pid] if self._with_root else pids))


class Activity:
    """When the node's computing processes compute, and what everything else uses, as a context manager.

    A computing process drives its work from its main thread, so that thread says whether it computes. Time that it waits for
    a core counts as well: else whatever else runs on the machine would look like this system's own idle time.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="activity", daemon=True)
        self._compute: list[Sample] = []
        self._totals: list[Sample] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def active_s(self, role: str, start: float, end: float) -> float:
        """Seconds between two times in which at least one computing process of this role computed; never too many."""
        return active_seconds([s for s in self._compute if start <= s.at <= end], role)

    def cpu_s(self, start: float, end: float) -> dict[str, float]:
        """CPU seconds that each role used between two times, computing processes included."""
        inside = [sample for sample in self._totals if start <= sample.at <= end]
        used: dict[str, float] = {}
        for before, after in itertools.pairwise(inside):
            for key, value in _grown(before, after).items():
                role = key.partition("/")[0]
                used[role] = used.get(role, 0.0) + value
        return used

    def _watch(self) -> None:
        count = 0
        known = members()
        while not self._stop.wait(INTERVAL_S):
            if count % TOTALS_EVERY == 0:
                known = members()
                self._totals.append(_sample(known, cpu_seconds))
            computing = [member for member in known if member.role in COMPUTE.values()]
            self._compute.append(_sample(computing, busy_seconds))
            count += 1


def active_seconds(samples: list[Sample], role: str) -> float:
    """Time in which at least one process of a role ran: per interval the most that one of them ran, which is at most it."""
    total = 0.0
    for before, after in itertools.pairwise(samples):
        grown = [value for key, value in _grown(before, after).items() if key.startswith(f"{role}/")]
        total += min(max(grown, default=0.0), after.at - before.at)
    return total


def _grown(before: Sample, after: Sample) -> Mapping[str, float]:
    """What was used between two samples by those in the later one; a process that is new started from 0."""
    return {key: max(0.0, value - before.used_s.get(key, 0.0)) for key, value in after.used_s.items()}


def _sample(processes: Iterable[Member], seconds_of: Callable[[int], float]) -> Sample:
    return Sample(time.time(), {f"{member.role}/{member.pid}": seconds_of(member.pid) for member in processes})


def _role(command: list[str]) -> str:
    """The role that a Python command line tells, or ""."""
    if "-m" not in command:
        return ""
    module = command[command.index("-m") + 1 :][:1]
    name = module[0] if module else ""
    return COMPUTE.get(name) or (name.removeprefix("services.") if name.startswith("services.") else "")
