"""What the benchmarks share: programs of this package, ways measured in turns, medians of their ratios, tables."""

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

Name = TypeVar("Name")
Found = TypeVar("Found")


class Seconds(NamedTuple):
    """Seconds of a call, by wall clock and in CPU time."""

    wall: float
    cpu: float


def timed(call: Callable[[], Found], cpu_clock: Callable[[], float] = time.process_time) -> tuple[Seconds, Found]:
    """Return the seconds of a call and its result. By default CPU time is that of all threads of this process."""
    cpu, wall = cpu_clock(), time.perf_counter()
    result = call()
    return Seconds(time.perf_counter() - wall, cpu_clock() - cpu), result


def in_turns(ways: Mapping[Name, Callable[[], Found]], rounds: int) -> dict[Name, list[Found]]:
    """Call all ways once a round, in the opposite order every second round. Returns the results of each way, by round.

    The speed of a virtual machine drifts by a factor of two within minutes. In turns the drift concerns all ways alike,
    and the ratios of one round do not depend on it.
    """
    found: dict[Name, list[Found]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways) if number % 2 == 0 else list(reversed(list(ways))):
            found[name].append(ways[name]())
    return found


def median_ratio(numbers: Iterable[float], others: Iterable[float]) -> float:
    """Return the median of the ratios of each round."""
    return statistics.median(one / other for one, other in zip(numbers, others, strict=True))


def first_reached(level: float, values: Sequence[float], places: Sequence[float]) -> float:
    """Return the place where values first reach a level, linear between two of them; NaN if they do not."""
    reached = np.asarray(values) >= level
    if not reached.any():
        return np.nan
    last = int(np.argmax(reached))
    around = slice(max(0, last - 1), last + 1)
    return float(np.interp(level, values[around], places[around]))


def p50_and_p99_ms(seconds: Sequence[float]) -> tuple[str, str]:
    """Return the median and the 99th percentile in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return f"{1000 * cuts[49]:.1f}", f"{1000 * cuts[98]:.1f}"


def tba(*arguments: str, settings: Iterable[str] = ()) -> list[str]:
    """Return the command line of a `tba` command, with a `--set` for each setting."""
    return [sys.executable, "-m", "tba", *arguments, *(part for one in settings for part in ("--set", one))]


def print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table below its title and the machine, with the first column left-aligned."""
    table = [[str(cell) for cell in row] for row in (headings, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print(f"\n{title}\n{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    for first, *rest in table:
        cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        print("  ".join([first.ljust(widths[0]), *cells]))
