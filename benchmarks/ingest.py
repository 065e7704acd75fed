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
import math
import multiprocessing
import os
import random
import sqlite3
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zmq
from msgspec.structs import replace

from benchmarks import serving
from benchmarks.table import print_table
from tba.buffer.server.mailbox import GROUP_BYTES, GROUP_ROWS
from tba.buffer.store.store import Store
from tba.buffer.store.tables.trajectories import TRAJECTORY_COLUMNS
from tba.common.wire import messages
from tba.common.wire.codec import Frames, encode_request
from tba.common.wire.trajectory import Trajectory, pack

# Trajectories in one put: S samples of a prompt.
GROUP = 16
# Pending puts of all producers together; each has at most 64, a searcher's window, and at least 2.
IN_FLIGHT = 128
PROMPTS = 1024
# Payloads of the bare loop, and of each producer process.
DISTINCT = 1024
# The most producer processes; further producers share them.
PROCESSES = 2
PATIENCE_SECONDS = 60
# Bare loop and server alternate, so that both see the same conditions.
ROUNDS = 4


def main() -> None:
    rows = []
    for kib, count in ((4, 98_304), (64, 6_144)):
        for producers in (1, 8, 64):
            rates = [measure(kib << 10, producers, count, bare_first=n % 2 == 0) for n in range(ROUNDS)]
            bare, acknowledged = (statistics.median(column) for column in zip(*rates, strict=True))
            ratio = statistics.median(s / b for b, s in rates)
            rows.append([f"{kib} KB", producers, f"{bare:,.0f}", f"{acknowledged:,.0f}", f"{ratio:.2f}"])
    print_table(
        f"ingest, power-durable, median of {ROUNDS} rounds", ["row", "producers", "bare/s", "tba/s", "ratio"], rows
    )


def measure(row_bytes: int, producers: int, count: int, *, bare_first: bool) -> tuple[float, float]:
    """Return the rows per second of the bare loop and of the server, measured in succession."""
    if bare_first:
        return bare_loop(row_bytes, producers, count), served(row_bytes, producers, count)
    rate = served(row_bytes, producers, count)
    return bare_loop(row_bytes, producers, count), rate


def served(row_bytes: int, producers: int, count: int) -> float:
    """Return the rows per second that a new server acknowledges."""
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder, Server(Path(folder) / "run") as server:
        return server.ingest(producers, count, row_bytes)


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
        """Return the rows per second acknowledged between the first put and the end of the first producer.

        After that fewer producers put than requested.
        """
        load = Load(self.address, producers, count // producers, row_bytes)
        started = load.start()
        taken = load.wait()
        finished = min(acknowledged[-1][0] for acknowledged in taken)
        puts = sum(at <= finished for acknowledged in taken for at, _ in acknowledged)
        return GROUP * puts / (finished - started)

    def latencies(self, producers: int, count: int, row_bytes: int, *, rate: float) -> list[float]:
        """Return the seconds from each put to its acknowledgement, at this rate of rows per second in all."""
        load = Load(self.address, producers, count // producers, row_bytes, rate)
        load.start()
        return [seconds for acknowledged in load.wait() for _, seconds in acknowledged]


# The time of an acknowledgement, and the seconds since its put.
Acknowledged = tuple[float, float]


class Load:
    """Producer processes; `rows` per producer, `rate` rows per second in all or 0 for the maximum."""

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
        self._barrier.wait(PATIENCE_SECONDS)
        return time.perf_counter()

    def wait(self) -> list[list[Acknowledged]]:
        """Wait until every put is acknowledged. Returns the acknowledgements by producer."""
        taken: list[list[Acknowledged]] = []
        for _ in self.processes:
            while self._taken.empty():
                assert not any(process.exitcode for process in self.processes), "a producer failed: see above"
                time.sleep(0.1)
            taken += self._taken.get()
        for process in self.processes:
            process.join()
        return taken

    def stop(self) -> bool:
        """End the processes. Returns whether all of them were still running."""
        were_running = all(process.is_alive() for process in self.processes)
        for process in self.processes:
            process.kill()
            process.join()
        return were_running


def trajectory(row_bytes: int, number: int) -> Trajectory:
    """Return a trajectory whose response has `row_bytes` of ids and log-probabilities."""
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
    """Run several senders that put groups, a few at a time, until `rows` of each are acknowledged.

    `producers` is the number in all processes; `rate` is rows per second of this process, 0 for the maximum.
    """
    groups = [packed(row_bytes, number * PROMPTS // PROCESSES + n) for n in range(DISTINCT // GROUP)]
    window = min(64, max(2, IN_FLIGHT // producers))
    interval = GROUP * clients / rate if rate else 0.0
    with zmq.Context() as context:
        names = [f"producer{number}-{n}-{os.getpid()}" for n in range(clients)]
        mine = [Producer(context.socket(zmq.DEALER), address, name, groups, rows, window, interval) for name in names]
        barrier.wait()
        run(mine)
    taken.put([producer.acknowledged for producer in mine])


def packed(row_bytes: int, number: int) -> tuple[messages.Rows, list[bytes]]:
    """Return the columns and frames of one group."""
    columns, frames = pack([trajectory(row_bytes, number * GROUP + n) for n in range(GROUP)])
    return messages.Rows(**columns), frames


def run(producers: "Sequence[Producer]") -> None:
    """Send every put, and wait until all are acknowledged."""
    by_socket = {producer.socket: producer for producer in producers}
    poller = zmq.Poller()
    for socket in by_socket:
        poller.register(socket, zmq.POLLIN)
    while by_socket:
        due = min(producer.put_due() for producer in by_socket.values())
        pause = min(1.0, max(0.0, due - time.perf_counter()))
        for socket, _ in poller.poll(round(1000 * pause)):
            producer = by_socket[socket]
            producer.take()
            if producer.is_through:
                poller.unregister(socket)
                del by_socket[socket]
                socket.close()


class Producer:
    """One sender, with its puts encoded in advance. Up to `window` of them are pending.

    `interval` is the seconds from one put to the next, 0 for the maximum rate.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        address: str,
        name: str,
        groups: Sequence[tuple[messages.Rows, list[bytes]]],
        rows: int,
        window: int,
        interval: float,
    ) -> None:
        self.socket = socket
        self._name = name
        self._window = window
        self._interval = interval
        self._due = 0.0
        self._sent_at: dict[int, float] = {}
        self.acknowledged: list[Acknowledged] = []
        socket.setsockopt(zmq.RCVTIMEO, 1000 * PATIENCE_SECONDS)
        socket.connect(address)
        socket.send_multipart(self._encoded(0, messages.Hello(host="bench", pid=os.getpid(), software="bench")))
        assert header(socket)["type"] == messages.Welcome.TYPE
        rng = random.Random(name)
        self._puts = deque((id_, self._put(id_, rng, groups)) for id_ in range(1, 1 + rows // GROUP))

    @property
    def is_through(self) -> bool:
        """Whether all of its puts are acknowledged."""
        return not (self._puts or self._sent_at)

    def put_due(self) -> float:
        """Send the puts that are due and fit the window. Returns when the next is due; never if the window is full."""
        while self._puts and len(self._sent_at) < self._window:
            now = time.perf_counter()
            self._due = self._due or now
            if now < self._due:
                return self._due
            id_, frames = self._puts.popleft()
            self._sent_at[id_] = self._due if self._interval else now
            self.socket.send_multipart(frames, copy=False)
            self._due += self._interval
        return math.inf

    def take(self) -> None:
        """Receive the acknowledgements that have arrived."""
        while self.socket.get(zmq.EVENTS) & zmq.POLLIN:
            reply = header(self.socket)
            assert reply["type"] == messages.PutAck.TYPE, reply
            now = time.perf_counter()
            self.acknowledged.append((now, now - self._sent_at.pop(reply["id"])))

    def _put(self, id_: int, rng: random.Random, groups: Sequence[tuple[messages.Rows, list[bytes]]]) -> Frames:
        """Return one group as responses to a random prompt, so that few of them are repeated for it."""
        columns, frames = rng.choice(groups)
        rows = replace(columns, prompt_key=[f"p{rng.randrange(PROMPTS)}"] * GROUP)
        return self._encoded(id_, messages.PutTrajectories(first_sequence=GROUP * (id_ - 1), rows=rows), frames)

    def _encoded(self, id_: int, message: messages.Message, frames: Sequence[bytes] = ()) -> Frames:
        return encode_request(message, id=id_, role="searcher", sender=self._name, run="", frames=frames)


def header(socket: "zmq.Socket[bytes]") -> dict[str, Any]:
    """Return the header of the next reply, unchecked: a check would use the cores that the server shares."""
    fields: dict[str, Any] = msgpack.unpackb(socket.recv_multipart()[0])
    return fields


if __name__ == "__main__":
    main()
