"""What every peer does in the comparison, written once: fill, sample, be killed, be opened again.

A worker is a process of its own with its peer's own interpreter, so this module needs numpy and nothing else.

    measure   ingest rate, latency of a batch, growth of memory and of files      -> one JSON line
    write     put rows until somebody ends it      -> {"victim": pid}, then {"confirmed": rows} after each put
    count     open what a killed `write` left      -> one JSON line

Every peer starts from the same arrays in memory and ends with the same two arrays; converting them to what the
peer takes and gives back is timed. The token data is random: constants would flatter a peer that compresses.
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

TOKENS = 512  # 4 bytes of id and 4 of log-probability each: 4 KB
GROUP = 64  # rows in one put
PER_PROMPT = 16  # rows of one prompt
ROWS = 16_384
WARM_UP = 16_384  # rows before the clock and the memory are looked at: more than a page cache of 64 MiB holds
BATCH = 512  # rows in one batch
BATCHES = 30
CAPACITY = 1 << 17  # rows that a buffer in a kill test can hold
MOST_PER_SECOND = 8192  # rows that a kill test writes at most, so that fast peers do not fill the memory
SAVE_SECONDS = 1.0  # between two saves, for peers that survive only what was saved
DISTINCT = 1024  # rows before the token data repeats; a prompt never sees the same twice

_random = np.random.default_rng(0)
IDS = _random.integers(0, 150_000, (DISTINCT, TOKENS), dtype=np.int32)
LOGPROBS = -_random.random((DISTINCT, TOKENS), dtype=np.float32)


class PeerBuffer(ABC):
    """One buffer under test, open in `folder`. Row `n` has prompt n // 16, reward n, and token data n % 1024."""

    packages: tuple[str, ...] = ("numpy",)

    @abstractmethod
    def put(self, first: int) -> int:
        """Put rows `first` to `first + GROUP`. Returns how many rows in all are confirmed by now."""

    def drain(self) -> int:
        """Wait until every row is confirmed. Returns how many there are."""
        return 0

    @abstractmethod
    def sample(self) -> tuple[Any, Any]:
        """A batch: ids and log-probabilities, each [BATCH, TOKENS] in one array."""

    def save(self) -> None:
        """Do what this peer offers to outlive its process, if it is not done by itself."""
        raise NotImplementedError(f"{type(self).__name__} has nothing to save")

    @property
    def pid(self) -> int:
        """The process that holds the rows."""
        return os.getpid()

    def close(self) -> None:  # noqa: B027  (most have nothing to end)
        """End what was started."""


class Opener(ABC):
    """How to open a new buffer in a folder, and what a killed one has left there."""

    @abstractmethod
    def open(self, folder: Path, capacity: int) -> PeerBuffer:
        """A new, empty buffer for that many rows."""

    @abstractmethod
    def survivors(self, folder: Path, confirmed: int) -> dict[str, Any]:
        """`rows`: those below `confirmed` that come back whole. Further entries are remarks."""


def intact(number: int, ids: Any, logprobs: Any) -> bool:
    """Whether a row that came back is what was put under this number."""
    place = int(number) % DISTINCT
    return bool(np.array_equal(ids, IDS[place]) and np.array_equal(logprobs, LOGPROBS[place]))


def count_intact(rows: Iterable[tuple[int, Any, Any]], confirmed: int) -> int:
    """Different confirmed rows among these (number, ids, log-probabilities) that are whole."""
    return len({int(number) for number, *arrays in rows if number < confirmed and intact(number, *arrays)})


def main(opener: Opener) -> None:
    """The command line of a worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("measure", "write", "count"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--confirmed", type=int, default=0)
    options = parser.parse_args()
    if options.mode == "measure":
        _say(_measure(opener, options.folder, save=options.save))
    elif options.mode == "write":
        _write(opener.open(options.folder, CAPACITY), save=options.save)
    else:
        _say(opener.survivors(options.folder, options.confirmed))


def _measure(opener: Opener, folder: Path, *, save: bool) -> dict[str, Any]:
    buffer = opener.open(folder, WARM_UP + ROWS)
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
    """Put rows until all are confirmed, and saved if they are to be. Returns the seconds."""
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
    """Put rows for ever, saying after each put how many are confirmed; the capacity is never reached."""
    _say({"victim": buffer.pid})
    started = saved = time.monotonic()
    for number in range(0, CAPACITY, GROUP):
        time.sleep(max(0.0, number / MOST_PER_SECOND - (time.monotonic() - started)))
        _say({"confirmed": buffer.put(number)})
        if save and time.monotonic() - saved > SAVE_SECONDS:
            buffer.save()
            saved = time.monotonic()


def _batch_ms(buffer: PeerBuffer) -> float:
    """Median milliseconds until a batch is there in two arrays."""
    assert all(tuple(array.shape) == (BATCH, TOKENS) for array in buffer.sample())
    return statistics.median(_seconds(buffer.sample) for _ in range(BATCHES)) * 1000


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _footprint(pid: int, folder: Path) -> dict[str, int]:
    """Bytes resident in the process, those of them that are no file's pages, and bytes on the disk."""
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


def _say(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)
