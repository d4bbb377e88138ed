"""How an instance applies the units of its allocation to itself: the same interface for cores and for a GPU's SMs.

Thread count and affinity change together and in the order that never leaves more threads than cores: a 2-thread engine on
one core is an order of magnitude slower than a 1-thread one.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path


class CpuPartition:
    """Binds this process to cores, with as many compute threads as cores.

    Args:
        cores: the device's units, as core numbers. set_threads: tells the compute library its thread count.
    """

    def __init__(self, cores: Sequence[int], *, set_threads: Callable[[int], None]) -> None:
        self._cores, self._set_threads = tuple(cores), set_threads

    def apply(self, units: Sequence[int]) -> None:
        """Compute on these units (indices into the device's cores) from now on; at least one.

        Raises:
            ValueError: no unit, or one that the device doesn't have.
        """
        if not units or not all(0 <= unit < len(self._cores) for unit in units):
            raise ValueError(f"units {tuple(units)} of a device with {len(self._cores)}")
        wanted = {self._cores[unit] for unit in units}
        growing = len(wanted) > len(os.sched_getaffinity(0))
        if not growing:
            self._set_threads(len(wanted))
        bind(wanted)
        if growing:
            self._set_threads(len(wanted))


def bind(cores: set[int]) -> None:
    """Bind every thread of this process to the cores; threads that start later inherit them."""
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:
            continue  # the thread ended between the listing and now
