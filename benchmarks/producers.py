"""Producers of trajectories for benchmarks: processes that put groups, encoded in advance, as fast as they can."""

import math
import multiprocessing
import os
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from typing import Any

import msgpack
import numpy as np
import zmq
from msgspec.structs import replace

from benchmarks.serving import Server
from tba.common.wire import messages
from tba.common.wire.channels import encrypt_client
from tba.common.wire.codec import Frames, encode_request
from tba.common.wire.keys import ClientKeys
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

# The time of an acknowledgement, and the seconds since its put.
Acknowledged = tuple[float, float]
Group = tuple[messages.Rows, list[bytes]]


@dataclass(frozen=True, slots=True)
class Work:
    """What all producers do. `rows` is per producer, `rate` in rows per second of all producers, 0 for the maximum."""

    address: str
    keys: ClientKeys | None
    producers: int
    rows: int
    row_bytes: int
    rate: float

    @property
    def window(self) -> int:
        """The most pending puts of a producer."""
        return min(64, max(2, IN_FLIGHT // self.producers))

    @property
    def interval(self) -> float:
        """Seconds from one put of a producer to the next, 0 for the maximum rate."""
        return GROUP * self.producers / self.rate if self.rate else 0.0


class Load:
    """Producer processes that put `rows` rows in all."""

    def __init__(self, server: Server, producers: int, rows: int, row_bytes: int, rate: float = 0.0) -> None:
        count = min(producers, PROCESSES)
        context = multiprocessing.get_context("spawn")
        self._taken = context.SimpleQueue()
        self._barrier = context.Barrier(count + 1)
        work = Work(server.address, server.keys, producers, rows // producers, row_bytes, rate)
        each = (producers // count, work, self._barrier, self._taken)
        self._processes = [context.Process(target=produce, args=(n, *each), daemon=True) for n in range(count)]

    def start(self) -> float:
        """Start, and wait until all are ready. Returns the time of the first put."""
        for process in self._processes:
            process.start()
        self._barrier.wait(PATIENCE_SECONDS)
        return time.perf_counter()

    def wait(self) -> list[list[Acknowledged]]:
        """Wait until every put is acknowledged. Returns the acknowledgements by producer."""
        taken: list[list[Acknowledged]] = []
        for _ in self._processes:
            while self._taken.empty():
                assert not any(process.exitcode for process in self._processes), "a producer failed: see above"
                time.sleep(0.1)
            taken += self._taken.get()
        for process in self._processes:
            process.join()
        return taken

    def rows_per_second(self) -> float:
        """Start, wait, and return the rate of it."""
        started = self.start()
        return self.rate(started, self.wait())

    @staticmethod
    def rate(started: float, taken: list[list[Acknowledged]]) -> float:
        """Return the rows per second acknowledged from the first put to the end of the first producer.

        After that fewer producers put than requested.
        """
        finished = min(acknowledged[-1][0] for acknowledged in taken)
        puts = sum(at <= finished for acknowledged in taken for at, _ in acknowledged)
        return GROUP * puts / (finished - started)

    def stop(self) -> None:
        """End the processes, which must still be running."""
        were_running = all(process.is_alive() for process in self._processes)
        for process in self._processes:
            process.kill()
            process.join()
        assert were_running, "the load ended before the measurement did"


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
    number: int, senders: int, work: Work, barrier: Barrier, taken: "SimpleQueue[list[list[Acknowledged]]]"
) -> None:
    """Be a process of several producers, until the rows of each are acknowledged."""
    groups = [packed(work.row_bytes, number * PROMPTS // PROCESSES + n) for n in range(DISTINCT // GROUP)]
    with zmq.Context() as context:
        names = [f"producer{number}-{n}-{os.getpid()}" for n in range(senders)]
        mine = [Producer(context.socket(zmq.DEALER), name, work, groups) for name in names]
        barrier.wait()
        run(mine)
    taken.put([producer.acknowledged for producer in mine])


def packed(row_bytes: int, number: int) -> Group:
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
    """One sender, with its puts encoded in advance."""

    def __init__(self, socket: "zmq.Socket[bytes]", name: str, work: Work, groups: Sequence[Group]) -> None:
        self.socket = socket
        self._name, self._work = name, work
        self._due = 0.0
        self._sent_at: dict[int, float] = {}
        self.acknowledged: list[Acknowledged] = []
        if work.keys is not None:
            encrypt_client(socket, work.keys)
        socket.setsockopt(zmq.RCVTIMEO, 1000 * PATIENCE_SECONDS)
        socket.connect(work.address)
        socket.send_multipart(self._encoded(0, messages.Hello(host="bench", pid=os.getpid())))
        assert header(socket)["type"] == messages.Welcome.TYPE
        rng = random.Random(name)
        self._puts = deque((id_, self._put(id_, rng, groups)) for id_ in range(1, 1 + work.rows // GROUP))

    @property
    def is_through(self) -> bool:
        """Whether all of its puts are acknowledged."""
        return not (self._puts or self._sent_at)

    def put_due(self) -> float:
        """Send the puts that are due and fit the window. Returns when the next is due; never if the window is full."""
        while self._puts and len(self._sent_at) < self._work.window:
            now = time.perf_counter()
            self._due = self._due or now
            if now < self._due:
                return self._due
            id_, frames = self._puts.popleft()
            self._sent_at[id_] = self._due if self._work.interval else now
            self.socket.send_multipart(frames, copy=False)
            self._due += self._work.interval
        return math.inf

    def take(self) -> None:
        """Receive the acknowledgements that have arrived."""
        while self.socket.get(zmq.EVENTS) & zmq.POLLIN:
            reply = header(self.socket)
            assert reply["type"] == messages.PutAck.TYPE, reply
            now = time.perf_counter()
            self.acknowledged.append((now, now - self._sent_at.pop(reply["id"])))

    def _put(self, id_: int, rng: random.Random, groups: Sequence[Group]) -> Frames:
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
