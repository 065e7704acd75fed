"""Fair shares of the CPU cores that this process may use, for several engines on one machine."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_NODE = re.compile(r"node(\d+)")
_SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True)
class Core:
    """A logical CPU: its number, its NUMA node, and the first logical CPU of the same physical core."""

    cpu: int
    node: int = 0
    physical: int = 0


def usable_cores(system: Path = _SYSTEM) -> list[Core]:
    """The logical CPUs of this process's affinity, which cgroups (cpusets) and taskset limit."""
    cores = []
    for cpu in sorted(os.sched_getaffinity(0)):
        folder = system / f"cpu/cpu{cpu}"
        node = next((int(match[1]) for path in folder.glob("node*") if (match := _NODE.fullmatch(path.name))), 0)
        try:
            siblings = (folder / "topology/thread_siblings_list").read_text()
            physical = int(re.split(r"[,-]", siblings)[0])
        except (OSError, ValueError):
            physical = cpu
        cores.append(Core(cpu, node, physical))
    return cores


def share_cores(cores: Sequence[Core], engines: int) -> list[list[Core]]:
    """A share of the cores for each engine: disjoint, within one NUMA node where there are as many engines as nodes.

    The threads of one physical core go together where the shares are large enough. Where an engine would be left
    without a core, the engines of that node share all its cores, which the kernel does more fairly than any pinning.
    """
    nodes = _by(cores, lambda core: core.node)
    if engines < len(nodes):
        return _cut(cores, engines)
    counts = _apportion([len(node) for node in nodes], engines)
    return [share for node, count in zip(nodes, counts, strict=True) for share in _cut(node, count)]


def threads_of(share: Sequence[Core], *, shared_by: int = 1) -> int:
    """OpenMP threads for a share: one per physical core, and one if others use the same cores."""
    return 1 if shared_by > 1 else len({core.physical for core in share})


@contextmanager
def starting_on(cores: Sequence[Core] | None) -> Iterator[None]:
    """Processes started by this thread inside run on these cores from their first instruction; None changes nothing."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core.cpu for core in cores})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _cut(cores: Sequence[Core], parts: int) -> list[list[Core]]:
    ordered = sorted(cores, key=lambda core: (core.node, core.physical, core.cpu))
    if parts > len(ordered):
        return [ordered] * parts
    physical = _by(ordered, lambda core: (core.node, core.physical))
    # Whole physical cores where there are enough of them, else single threads.
    units = physical if parts <= len(physical) else [[core] for core in ordered]
    bounds = [len(units) * part // parts for part in range(parts + 1)]
    return [[core for unit in units[a:b] for core in unit] for a, b in pairwise(bounds)]


def _apportion(sizes: Sequence[int], engines: int) -> list[int]:
    """Engines for each node: at least one, the others to the node with the most cores for each."""
    counts = [1] * len(sizes)
    for _ in range(engines - len(sizes)):
        counts[max(range(len(sizes)), key=lambda node: sizes[node] / (counts[node] + 1))] += 1
    return counts


def _by(cores: Sequence[Core], key: Callable[[Core], object]) -> list[list[Core]]:
    groups: dict[object, list[Core]] = {}
    for core in cores:
        groups.setdefault(key(core), []).append(core)
    return list(groups.values())
