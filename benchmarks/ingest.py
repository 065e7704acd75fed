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

import contextlib
import random
import sqlite3
import statistics
import tempfile
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.harness import in_turns, median_ratio, print_table
from benchmarks.producers import DISTINCT, GROUP, PROMPTS, Load, trajectory
from benchmarks.serving import Server
from tba.buffer.server.mailbox import GROUP_BYTES, GROUP_ROWS
from tba.buffer.store.store import Store

ROUNDS = 4
PAYLOAD = ("prompt_ids", "response_ids", "logprobs", "version_runs", "loss_mask", "segments")


def main() -> None:
    rows = []
    for kib, count in ((4, 98_304), (64, 6_144)):
        for producers in (1, 8, 64):
            work = (kib << 10, producers, count)
            rates = in_turns({"bare": partial(bare_loop, *work), "tba": partial(served_rate, *work)}, ROUNDS)
            medians = [f"{statistics.median(of_one):,.0f}" for of_one in rates.values()]
            rows.append([f"{kib} KB", producers, *medians, f"{median_ratio(rates['tba'], rates['bare']):.2f}"])
    headings = ["row", "producers", "bare/s", "tba/s", "ratio"]
    print_table(f"ingest, power-durable, median of {ROUNDS} rounds", headings, rows)


def served_rate(row_bytes: int, producers: int, count: int) -> float:
    """Return the rows per second that a new server acknowledges."""
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder, Server(Path(folder, "run")) as server:
        server.prepare(PROMPTS)
        return Load(server, producers, count, row_bytes).rows_per_second()


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
    sample, rng = stored_row(row_bytes), random.Random(0)
    rows = []
    for n in range(count):
        own = {"id": n + 1, "prompt": 1 + n // GROUP % PROMPTS, "sender": 1 + n // GROUP % producers}
        own |= {"sequence": n // GROUP // producers * GROUP + n % GROUP, "dedup_hash": rng.getrandbits(62)}
        rows.append(tuple((sample | own | {"reward": rng.random()}).values()))
    payloads = [[getattr(trajectory(row_bytes, n), kind).tobytes() for kind in PAYLOAD] for n in range(DISTINCT)]
    return rows, [(n + 1, *payloads[n % DISTINCT]) for n in range(count)]


@cache
def stored_row(row_bytes: int) -> dict[str, Any]:
    """Return a row that a server has stored, by column."""
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
        with Server(Path(folder, "run")) as server:
            server.prepare(PROMPTS)
            Load(server, 1, GROUP, row_bytes).rows_per_second()
        with contextlib.closing(sqlite3.connect(Path(folder, "run", "buffer.sqlite"))) as connection:
            connection.row_factory = sqlite3.Row
            return dict(connection.execute("SELECT * FROM trajectory_rows LIMIT 1").fetchone())


if __name__ == "__main__":
    main()
