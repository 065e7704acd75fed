"""CPU cores for several engines or ranks on one machine: disjoint, contiguous slices, or shared by priority."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

# With this nice value a process gets a quarter of a core that it shares with one that has none.
_NICE = 5
# Without privileges the kernel accepts one change in 0.1 s, of all processes.
_RETRY_SECONDS, _TRIES = 0.15, 20


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


def give_way() -> None:
    """Let other processes have the cores first. Threads and processes that this one starts afterwards inherit it.

    Where the kernel divides the cores among sessions, processes that lead one do not, such as reward workers.

    For a searcher on the cores of its trainer: otherwise it generates more than the trainer has time to use.
    """
    os.nice(_NICE)
    # Where the kernel divides the cores among sessions, only the value of the session counts: that of `tba run`'s
    # children is their own, and that of a terminal is the user's.
    autogroup = Path("/proc/self/autogroup")
    for _ in range(_TRIES if autogroup.exists() and os.getsid(0) == os.getpid() else 0):
        try:
            autogroup.write_text(str(_NICE))
        except BlockingIOError:
            time.sleep(_RETRY_SECONDS)
        except OSError:
            return
        else:
            return
