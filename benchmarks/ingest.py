"""Ingest of trajectories: a real buffer server over a local socket, against a bare sqlite3 loop on the same disk.

The bare loop inserts prepared Python tuples with `executemany` into the same tables, columns and indexes, with as many
rows per transaction, the same page and cache size, SQLite's own checkpoints and synchronous=FULL: the best that this
disk and SQLite offer one Python process. The server does the same after it has received the rows from other processes,
decoded and checked them, hashed the responses and entered them into its sampling index. It acknowledges them after the
commit and its sync.

Producers stand for searchers on other machines but share the cores of this one with the server, so they use as little
of them as possible. Their puts are encoded in advance, as in a searcher's spool, and a few single-threaded processes
hold all producers: one process per producer wakes up with cold caches for each acknowledgement and costs twice as much.

The two alternate in which is first, and the files of each are deleted immediately: recently freed pages are faster than
pages that were never used, on a virtual machine many times.
"""

import argparse
import contextlib
import random
import sqlite3
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks import serving
from benchmarks.producers import DISTINCT, GROUP, PROMPTS, Load, trajectory
from benchmarks.table import print_table
from tba.buffer.server.mailbox import GROUP_BYTES, GROUP_ROWS
from tba.buffer.store.store import Store
from tba.buffer.store.tables.trajectories import TRAJECTORY_COLUMNS

# Bare loop and server alternate, so that both see the same conditions.
ROUNDS = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", action="store_true", help="compare encrypted connections with plain ones")
    if parser.parse_args().keys:
        return compare_keys()
    rows = []
    for kib, count in ((4, 98_304), (64, 6_144)):
        for producers in (1, 8, 64):
            rates = [measure(kib << 10, producers, count, bare_first=n % 2 == 0) for n in range(ROUNDS)]
            bare, acknowledged = (statistics.median(column) for column in zip(*rates, strict=True))
            ratio = statistics.median(s / b for b, s in rates)
            rows.append([f"{kib} KB", producers, f"{bare:,.0f}", f"{acknowledged:,.0f}", f"{ratio:.2f}"])
    headings = ["row", "producers", "bare/s", "tba/s", "ratio"]
    return print_table(f"ingest, power-durable, median of {ROUNDS} rounds", headings, rows)


def compare_keys() -> None:
    """Print the rows per second, and per second of the server's CPU time, with keys relative to those without."""
    rows = []
    for kib, count in ((4, 32_768), (64, 4_096)):
        ratios = []
        for n in range(2 * ROUNDS):
            first = served(kib << 10, 8, count, encrypted=n % 2 == 0)
            second = served(kib << 10, 8, count, encrypted=n % 2 == 1)
            with_keys, without = (first, second) if n % 2 == 0 else (second, first)
            ratios.append([a / b for a, b in zip(with_keys, without, strict=True)])
        rows.append([f"{kib} KB", *(f"{statistics.median(column):.2f}" for column in zip(*ratios, strict=True))])
    print_table(f"ingest with keys, median of {2 * ROUNDS} pairs", ["row", "rows/s", "rows/CPU second"], rows)


def measure(row_bytes: int, producers: int, count: int, *, bare_first: bool) -> tuple[float, float]:
    """Return the rows per second of the bare loop and of the server, measured in succession."""
    if bare_first:
        return bare_loop(row_bytes, producers, count), served(row_bytes, producers, count)[0]
    rate = served(row_bytes, producers, count)[0]
    return bare_loop(row_bytes, producers, count), rate


def served(row_bytes: int, producers: int, count: int, *, encrypted: bool = False) -> tuple[float, float]:
    """Return the rows per second that a new server acknowledges, and per second of its CPU time."""
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder, Server(Path(folder, "run"), encrypted) as server:
        before = server.cpu_seconds()
        rate = server.ingest(producers, count, row_bytes)
        return rate, count / (server.cpu_seconds() - before)


# ---------------------------------------------------------------- the bare loop


def bare_loop(row_bytes: int, producers: int, count: int) -> float:
    """Return the rows per second of INSERT and COMMIT alone."""
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
        # Creates the same tables with the same pragmas.
        store = Store(Path(folder) / "bare.sqlite", durability="power")
        connection = store.database._connection
        connection.execute("PRAGMA synchronous = FULL")
        # The default of SQLite.
        connection.execute("PRAGMA wal_autocheckpoint = 1000")
        add_row, add_payload = insert_into(connection, "trajectory_rows"), insert_into(connection, "payloads")
        rows, payloads = bare_rows(row_bytes, producers, count)
        batch = min(GROUP_ROWS, GROUP_BYTES // row_bytes)
        started = time.perf_counter()
        for first in range(0, count, batch):
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(add_row, rows[first : first + batch])
            connection.executemany(add_payload, payloads[first : first + batch])
            connection.execute("COMMIT")
        seconds = time.perf_counter() - started
        store.close()
    return count / seconds


def insert_into(connection: sqlite3.Connection, table: str) -> str:
    """Return an INSERT with all columns of a table, in their order."""
    columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"


def bare_rows(row_bytes: int, producers: int, count: int) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Return rows of `trajectory_rows` and of `payloads` with the values that the server would store."""
    sample = trajectory(row_bytes, 0)
    tokens = len(sample.response_ids)
    rng = random.Random(0)
    rows: list[dict[str, Any]] = [
        # In the order of the table.
        {
            "id": n + 1,
            "run": 1,
            "prompt": 1 + n // GROUP % PROMPTS,
            "visit": None,
            "sender": 1 + n // GROUP % producers,
            "sequence": n // GROUP // producers * GROUP + n % GROUP,
            "policy_version": 0,
            "reward": rng.random(),
            "reward_parts": '{"correct": 1.0}',
            "stop_reason": "length",
            "prompt_tokens": len(sample.prompt_ids),
            "response_tokens": tokens,
            "dedup_hash": rng.getrandbits(62),
            "sampling": '{"temperature":1.0,"top_p":1.0}',
            "created_at": time.time(),
            "received_at": time.time(),
            "generation_seconds": 1.0,
            "text": None,
            "error": None,
            "metadata": "{}",
            "payload_bytes": row_bytes,
            "compacted_at": None,
        }
        for n in range(count)
    ]
    payloads = [[getattr(trajectory(row_bytes, n), kind).tobytes() for kind in PAYLOAD] for n in range(DISTINCT)]
    assert set(rows[0]) - {"compacted_at"} == set(TRAJECTORY_COLUMNS)
    return [tuple(row.values()) for row in rows], [(n + 1, *payloads[n % DISTINCT]) for n in range(count)]


PAYLOAD = ("prompt_ids", "response_ids", "logprobs", "version_runs", "loss_mask")


# ---------------------------------------------------------------- the server and its producers


class Server:
    """A buffer server process with prompts and weights registered. `keys` are those of its clients."""

    def __init__(self, directory: Path, encrypted: bool = False) -> None:
        directory.mkdir()
        self.directory = directory
        self.keys = serving.make_keys(directory / "keys") if encrypted else None
        self._resources = contextlib.ExitStack()

    def __enter__(self) -> "Server":
        options = [f"security.keys={self.directory / 'keys'}"] if self.keys else []
        self.process, self.address = self._resources.enter_context(serving.serving(self.directory, *options))
        serving.prepare(self.address, PROMPTS, self.keys)
        return self

    def cpu_seconds(self) -> float:
        """Return the CPU time that the server has used."""
        return sum(psutil.Process(self.process.pid).cpu_times()[:2])

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def ingest(self, producers: int, count: int, row_bytes: int) -> float:
        """Return the rows per second acknowledged between the first put and the end of the first producer.

        After that fewer producers put than requested.
        """
        load = Load(self.address, producers, count // producers, row_bytes, keys=self.keys)
        started = load.start()
        taken = load.wait()
        finished = min(acknowledged[-1][0] for acknowledged in taken)
        puts = sum(at <= finished for acknowledged in taken for at, _ in acknowledged)
        return GROUP * puts / (finished - started)

    def latencies(self, producers: int, count: int, row_bytes: int, *, rate: float) -> list[float]:
        """Return the seconds from each put to its acknowledgement, at this rate of rows per second in all."""
        load = Load(self.address, producers, count // producers, row_bytes, rate, self.keys)
        load.start()
        return [seconds for acknowledged in load.wait() for _, seconds in acknowledged]


if __name__ == "__main__":
    main()
