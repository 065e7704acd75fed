"""The part of the comparison that all peers share: fill a buffer, sample from it, and count what a kill left.

A worker is a separate process, run by the interpreter of its peer, so this module needs nothing but numpy.

    measure   ingest rate, latency of a batch, growth of memory and of files      -> one JSON line
    write     put rows until the process is killed      -> {"victim": pid}, then {"confirmed": rows} after each put
    count     open what a killed `write` left           -> one JSON line

Every peer starts from the same arrays in memory and ends with the same two arrays; the conversion to and from its own
types is timed. The token data is random: constants would flatter a peer that compresses.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

# 4 bytes of id and 4 of log-probability each: rows of 4 KB.
TOKENS = 512
# Rows in one put, of one prompt, in one batch.
GROUP, PER_PROMPT, BATCH = 64, 16, 512
BATCHES = 30
ROWS = 16_384
# Rows that are put before anything is measured: more than a page cache of 64 MiB holds.
WARM_UP = 16_384
# In a kill test: rows that fit into the buffer, and the largest rate, so that fast peers do not fill the memory.
CAPACITY = 1 << 17
MAX_PER_SECOND = 8192
# Interval of saves, for peers that keep only what was saved.
SAVE_SECONDS = 1.0
# Rows after which the token data repeats. A prompt never gets the same row twice.
DISTINCT = 1024

_random = np.random.default_rng(0)
IDS = _random.integers(0, 150_000, (DISTINCT, TOKENS), dtype=np.int32)
LOGPROBS = -_random.random((DISTINCT, TOKENS), dtype=np.float32)


class PeerBuffer(ABC):
    """A buffer under test. Row `n` has prompt n // PER_PROMPT, reward n, and token data n % DISTINCT."""

    packages: tuple[str, ...] = ("numpy",)

    @abstractmethod
    def put(self, first: int) -> int:
        """Put rows `first` to `first + GROUP`. Returns the total number of confirmed rows."""

    def drain(self) -> int:
        """Wait until every row is confirmed. Returns the number of rows."""
        return 0

    @abstractmethod
    def sample(self) -> tuple[Any, Any]:
        """Return a batch: ids and log-probabilities, each one array [BATCH, TOKENS]."""

    def save(self) -> None:
        """Write what is needed to outlive the process, for a peer that does not do so by itself."""
        raise NotImplementedError(f"{type(self).__name__} has nothing to save")

    @property
    def pid(self) -> int:
        """The process that holds the rows."""
        return os.getpid()

    def close(self) -> None:  # noqa: B027
        """End the processes that it started. Most peers have none."""


# Opens a buffer in a folder, with room for this many rows.
Open = Callable[[Path, int], PeerBuffer]
# Opens what a killed buffer left in its folder. Returns `rows`, the number of intact rows below the confirmed ones.
Survivors = Callable[[Path, int], dict[str, Any]]


def intact(number: int, ids: Any, logprobs: Any) -> bool:
    """Return whether a row equals what was put under this number."""
    data = int(number) % DISTINCT
    return bool(np.array_equal(ids, IDS[data]) and np.array_equal(logprobs, LOGPROBS[data]))


def count_intact(rows: Iterable[tuple[int, Any, Any]], confirmed: int) -> int:
    """Count the distinct intact rows below `confirmed` among these (number, ids, log-probabilities)."""
    return len({int(number) for number, *arrays in rows if number < confirmed and intact(number, *arrays)})


def main(open_buffer: Open, survivors: Survivors) -> None:
    """Run the command line of a worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("measure", "write", "count"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--confirmed", type=int, default=0)
    options = parser.parse_args()
    if options.mode == "measure":
        _print(_measure(open_buffer(options.folder, WARM_UP + ROWS), options.folder, save=options.save))
    elif options.mode == "write":
        _write(open_buffer(options.folder, CAPACITY), save=options.save)
    else:
        _print(survivors(options.folder, options.confirmed))


def _measure(buffer: PeerBuffer, folder: Path, *, save: bool) -> dict[str, Any]:
    try:
        _fill(buffer, 0, WARM_UP, save=save)
        buffer.sample()
        before = _footprint(buffer.pid, folder)
        seconds = _fill(buffer, WARM_UP, WARM_UP + ROWS, save=save)
        after = _footprint(buffer.pid, folder)
        return {
            "rows_per_second": ROWS / seconds,
            "batch_ms": _batch_ms(buffer),
            **{f"{name}_bytes": (after[name] - before[name]) / ROWS for name in before},
            "save_seconds": _seconds(buffer.save) if save else 0.0,
            "versions": _versions(buffer),
        }
    finally:
        buffer.close()


def _fill(buffer: PeerBuffer, first: int, last: int, *, save: bool) -> float:
    """Put rows until all are confirmed and, with `save`, saved. Returns the seconds."""
    started = saved = time.monotonic()
    for number in range(first, last, GROUP):
        buffer.put(number)
        if save and time.monotonic() - saved > SAVE_SECONDS:
            buffer.save()
            saved = time.monotonic()
    buffer.drain()
    if save:
        buffer.save()
    return time.monotonic() - started


def _write(buffer: PeerBuffer, *, save: bool) -> None:
    """Put rows and print the number of confirmed ones after each put. The kill comes before the capacity is reached."""
    _print({"victim": buffer.pid})
    started = saved = time.monotonic()
    for number in range(0, CAPACITY, GROUP):
        time.sleep(max(0.0, number / MAX_PER_SECOND - (time.monotonic() - started)))
        _print({"confirmed": buffer.put(number)})
        if save and time.monotonic() - saved > SAVE_SECONDS:
            buffer.save()
            saved = time.monotonic()


def _batch_ms(buffer: PeerBuffer) -> float:
    """Return the median milliseconds of a batch, as two arrays."""
    assert all(tuple(array.shape) == (BATCH, TOKENS) for array in buffer.sample())
    return statistics.median(_seconds(buffer.sample) for _ in range(BATCHES)) * 1000


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _footprint(pid: int, folder: Path) -> dict[str, int]:
    """Return bytes: resident in the process, the anonymous part of them, and on disk."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    files = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    return {
        "resident": int(status["VmRSS"].split()[0]) * 1024,
        "anonymous": int(status["RssAnon"].split()[0]) * 1024,
        "file": files,
    }


def _versions(buffer: PeerBuffer) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in buffer.packages:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _print(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)
