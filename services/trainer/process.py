"""What the process that starts a trainer's child must know; imports nothing heavy.

The allocator and the thread pool read their settings once, when a process starts, so only its parent can choose them.
"""

import os

ALLOCATOR_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
}
"""Keeps glibc from giving every large activation back to the kernel and page-faulting it in again at the next use."""

SPIN_COUNT = "1000"
"""Iterations that an idle compute thread spins before it sleeps. The default spins for milliseconds, which takes the core
away from whoever shares it: a loop of 2-thread matrix products on two busy cores took 9.6 and 10.3 s so, 7.4 and 5.0 s with
this."""


def usable_cores() -> int:
    """Cores that this process may run on (its affinity, not the machine's count)."""
    return len(os.sched_getaffinity(0))


def child_environment(*, threads: int) -> dict[str, str]:
    """Environment variables to add for a trainer's child that starts with ``threads`` compute threads.

    More threads than cores is many times slower than one thread, so the count is held to the cores of this process.
    """
    count = str(max(1, min(threads, usable_cores())))
    return {
        **ALLOCATOR_ENVIRONMENT,
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "GOMP_SPINCOUNT": SPIN_COUNT,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }
