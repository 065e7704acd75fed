"""Ingest of trajectories: a real buffer server over a local socket, against a bare sqlite3 loop on the same disk.

The bare loop inserts rows that lie ready as Python tuples with `executemany` into the same tables, columns and
indexes, with as many rows in a transaction, the same page and cache size, SQLite's own checkpoints and
synchronous=FULL: the best that this disk and SQLite give to one Python process. The server does the same after it has
received the rows from other processes, decoded and checked them, hashed the responses and entered them into its
sampling index; and it acknowledges them after the commit and its sync.

Producers stand for searchers on other machines but share this one's cores with the server. So they take as little of
them as they can: what they put lies ready as bytes, as in a searcher's spool, and few processes hold all of them,
since a process that wakes up for one acknowledgement finds cold caches and costs twice as much.
"""

import contextlib
import itertools
import multiprocessing
import os
import random
import sqlite3
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np

from benchmarks import serving
from benchmarks.table import print_table
from tba.buffer.mailbox import GROUP_BYTES, GROUP_ROWS
from tba.buffer.store import Store
from tba.common import wire
from tba.common.client import BufferClient
from tba.common.trajectory import Trajectory, pack

GROUP = 16  # trajectories in one put: S samples of a prompt
IN_FLIGHT = 128  # puts under way, of all producers together; at most 32 and at least 2 of each
PROMPTS = 1024
DISTINCT = 1024  # payloads of the bare loop, and of each process of producers
PROCESSES = 2  # at most; more producers than that share processes
ROUNDS = 3  # bare loop and server take turns, so that both see the same weather


def main() -> None:
    rows = []
    for kib, count in ((4, 98_304), (64, 6_144)):
        for producers in (1, 8, 64):
            rates = [measure(kib << 10, producers, count) for _ in range(ROUNDS)]
            bare, served = (statistics.median(column) for column in zip(*rates, strict=True))
            ratio = statistics.median(s / b for b, s in rates)
            rows.append([f"{kib} KB", producers, f"{bare:,.0f}", f"{served:,.0f}", f"{ratio:.2f}"])
    print_table(
        f"ingest, power-durable, median of {ROUNDS} rounds", ["row", "producers", "bare/s", "tba/s", "ratio"], rows
    )


def measure(row_bytes: int, producers: int, count: int) -> tuple[float, float]:
    """Rows per second of the bare loop and, right after it, of the server."""
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
        bare = bare_loop(Path(folder) / "bare.sqlite", row_bytes, count)
        with Server(Path(folder) / "run") as server:
            return bare, server.ingest(producers, count, row_bytes)


# ---------------------------------------------------------------- the bare loop


def bare_loop(path: Path, row_bytes: int, count: int) -> float:
    """Rows per second of nothing but INSERT and COMMIT."""
    store = Store(path, durability="power")  # makes the same tables with the same pragmas
    connection = store.database._connection
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA wal_autocheckpoint = 1000")  # SQLite's own default
    rows, payloads = bare_rows(row_bytes, count)
    batch = min(GROUP_ROWS, GROUP_BYTES // row_bytes)
    started = time.perf_counter()
    for first in range(0, count, batch):
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(insert_into(connection, "trajectory_rows"), rows[first : first + batch])
        connection.executemany(insert_into(connection, "payloads"), payloads[first : first + batch])
        connection.execute("COMMIT")
    seconds = time.perf_counter() - started
    store.close()
    return count / seconds


def insert_into(connection: sqlite3.Connection, table: str) -> str:
    """An INSERT with all columns of a table."""
    columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join(f':{name}' for name in columns)})"


def bare_rows(row_bytes: int, count: int) -> tuple[list[dict], list[dict]]:
    """Rows with the values that the server would store."""
    sample = trajectory(row_bytes, 0)
    tokens = len(sample.response_ids)
    rng = random.Random(0)
    rows = [
        {
            "id": n + 1,
            "run": 1,
            "prompt": 1 + n // GROUP % PROMPTS,
            "visit": 0,
            "sender": 1 + n % 8,
            "sequence": n // 8,
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
    payloads = [{kind: getattr(trajectory(row_bytes, n), kind).tobytes() for kind in PAYLOAD} for n in range(DISTINCT)]
    return rows, [{"trajectory": n + 1, **payloads[n % DISTINCT]} for n in range(count)]


PAYLOAD = ("prompt_ids", "response_ids", "logprobs", "version_runs", "loss_mask")


# ---------------------------------------------------------------- the server and its producers


class Server:
    """A buffer server process with prompts and weights registered."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self._resources = contextlib.ExitStack()

    def __enter__(self) -> "Server":
        _, self.address = self._resources.enter_context(serving.serving(self.directory))
        serving.prepare(self.address, PROMPTS)
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def ingest(self, producers: int, count: int, row_bytes: int) -> float:
        """Rows per second that are acknowledged, from the first put until the first producer is through.

        After that fewer producers put than were asked for.
        """
        load = Load(self.address, producers, count // producers, row_bytes)
        started = load.start()
        taken = load.wait()
        finished = min(acknowledged[-1][0] for acknowledged in taken)
        puts = sum(at <= finished for acknowledged in taken for at, _ in acknowledged)
        return GROUP * puts / (finished - started)

    def latencies(self, producers: int, count: int, row_bytes: int, *, rate: float) -> list[float]:
        """Seconds from each put to its acknowledgement, at so many rows per second in all."""
        load = Load(self.address, producers, count // producers, row_bytes, rate)
        load.start()
        return [seconds for acknowledged in load.wait() for _, seconds in acknowledged]


Acknowledged = tuple[float, float]  # when a put was, and how many seconds it had waited


class Load:
    """Producer processes; `rows` of each producer, `rate` rows per second in all or 0 for as fast as it goes."""

    def __init__(self, address: str, producers: int, rows: int, row_bytes: int, rate: float = 0.0) -> None:
        count = min(producers, PROCESSES)
        context = multiprocessing.get_context("spawn")
        self._taken = context.SimpleQueue()
        self._barrier = context.Barrier(count + 1)
        each = (producers // count, producers, rows, row_bytes, rate / count, self._barrier, self._taken)
        self.processes = [context.Process(target=produce, args=(address, n, *each), daemon=True) for n in range(count)]

    def start(self) -> float:
        """Start, and wait until all are ready. Returns the time of the first put."""
        for process in self.processes:
            process.start()
        self._barrier.wait()
        return time.perf_counter()

    def wait(self) -> list[list[Acknowledged]]:
        """Wait until all is acknowledged. Returns what each producer has seen of that."""
        taken = [producer for _ in self.processes for producer in self._taken.get()]
        for process in self.processes:
            process.join()
        return taken

    def stop(self) -> bool:
        """End the processes. Returns whether they were all at work still."""
        at_work = all(process.is_alive() for process in self.processes)
        for process in self.processes:
            process.kill()
            process.join()
        return at_work


def trajectory(row_bytes: int, number: int) -> Trajectory:
    """A trajectory whose response has `row_bytes` of ids and log-probabilities."""
    tokens = row_bytes // 8
    return Trajectory(
        prompt_key=f"p{number // GROUP % PROMPTS}",
        lease=0,
        prompt_ids=np.arange(16, dtype=np.int32),
        response_ids=np.random.default_rng(number).integers(0, 50_000, tokens, dtype=np.int32),
        logprobs=np.full(tokens, -0.5, np.float32),
        version_runs=np.array([[0, tokens]], np.int32),
        reward=random.Random(number).random(),
        reward_parts={"correct": 1.0},
        stop_reason="length",
        sampling={"temperature": 1.0, "top_p": 1.0},
        created_at=time.time(),
        generation_seconds=1.0,
    )


def produce(
    address: str,
    number: int,
    clients: int,
    producers: int,
    rows: int,
    row_bytes: int,
    rate: float,
    barrier: Barrier,
    taken: "SimpleQueue[list[list[Acknowledged]]]",
) -> None:
    """Several clients, a thread each, that put groups, a few at a time, until `rows` of each are acknowledged.

    There are `producers` in all processes. `rate` is rows per second of this process, 0 for as fast as it goes.
    """
    groups = [packed(row_bytes, number * PROMPTS // PROCESSES + n) for n in range(DISTINCT // GROUP)]
    window = min(32, max(2, IN_FLIGHT // producers))
    mine = [Producer(address, f"producer{number}-{n}", groups, rows, window) for n in range(clients)]
    threads = [threading.Thread(target=producer.run, args=(rate / clients,)) for producer in mine]
    barrier.wait()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken.put([producer.acknowledged for producer in mine])


def packed(row_bytes: int, number: int) -> tuple[wire.Rows, list[bytes]]:
    """One group, ready to be put."""
    columns, frames = pack([trajectory(row_bytes, number * GROUP + n) for n in range(GROUP)])
    return wire.Rows.model_validate(columns), frames


class Producer:
    """One sender. What it will put is encoded when it is made; `window` puts are under way at once."""

    def __init__(
        self, address: str, name: str, groups: Sequence[tuple[wire.Rows, list[bytes]]], rows: int, window: int
    ) -> None:
        self._client = BufferClient(address, role="searcher", name=f"{name}-{os.getpid()}")
        hello = wire.Hello(host="bench", pid=os.getpid(), software="bench")
        self._client.call(hello, wire.Welcome, deadline_seconds=20)
        self._puts = deque(
            self._client.encode(wire.PutTrajectories(first_sequence=first, rows=columns), frames)
            for first, (columns, frames) in zip(range(0, rows, GROUP), itertools.cycle(groups), strict=False)
        )
        self._window = window
        self._sent_at: dict[int, float] = {}
        self.acknowledged: list[Acknowledged] = []

    def run(self, rate: float) -> None:
        """Put everything, at `rate` rows per second unless that is 0, and wait until all is acknowledged."""
        due = time.perf_counter()
        while self._puts or self._sent_at:
            now = time.perf_counter()
            if self._puts and len(self._sent_at) < self._window and now >= due:
                self._put()
                due += GROUP / rate if rate else 0.0
            else:
                self._take(min(1.0, due - now) if rate and self._puts and due > now else 1.0)
        self._client.close()

    def _put(self) -> None:
        id_, encoded = self._puts.popleft()
        self._sent_at[id_] = time.perf_counter()
        self._client.post_encoded(id_, encoded)

    def _take(self, timeout_seconds: float) -> None:
        for reply in self._client.poll(timeout_seconds):
            assert isinstance(reply.message, wire.PutAck), reply.message
            now = time.perf_counter()
            self.acknowledged.append((now, now - self._sent_at.pop(reply.header.id)))


if __name__ == "__main__":
    main()
