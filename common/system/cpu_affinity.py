"""CPU cores for several engines or ranks on one machine: disjoint, contiguous slices of those this process may use."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise


def partition_cores(processes: int) -> list[list[int]]:
    """The logical CPUs of each process, within this process's affinity (cpusets, taskset).

    With more processes than cores each gets all of them: the kernel then shares them more fairly than any pinning.
    """
    cores = sorted(os.sched_getaffinity(0))
    if processes > len(cores):
        return [cores] * processes
    bounds = [len(cores) * part // processes for part in range(processes + 1)]
    return [cores[first:last] for first, last in pairwise(bounds)]


def openmp_threads(parts: Sequence[Sequence[int]]) -> int:
    """OpenMP threads for each of these processes: one for each core of the smallest part, one if they share cores."""
    shared = len(parts) > 1 and parts[0] == parts[1]
    return 1 if shared else min(map(len, parts))


@contextmanager
def starting_on(cores: Sequence[int] | None) -> Iterator[None]:
    """Bind the processes that this thread starts inside to these cores; None changes nothing."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
