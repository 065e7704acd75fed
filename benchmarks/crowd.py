"""Many searchers at one buffer: ingest and status while all of them wait for leases, and the registration of prompts.

    python -m benchmarks.crowd [--searchers 500] [--leases 40] [--rows 65536] [--rounds 4]

Searchers that are faster than the trainer wait, each with a parked lease request. They hold all prompts that
`max_staleness = 1` leaves room for. A single process stands for all of them: it has a connection for each, asks for
leases again as soon as a request is answered, and sends a heartbeat every second, as searchers do. Meanwhile producers
put rows as fast as the server takes them. Rounds with and without the crowd alternate, each on a new server.

Registration: all searchers register the same task at once. The slowest status request meanwhile shows for how long the
server answers nothing else.
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import zmq

from benchmarks import serving
from benchmarks.producers import GROUP, PROMPTS, Load
from benchmarks.table import print_table
from tba.common.config import TaskSection
from tba.common.rendering import PromptRenderer, Tokenizer
from tba.common.wire import messages
from tba.common.wire.client import BufferClient
from tba.common.wire.codec import Frames, encode_request
from tba.common.wire.status_messages import GetStatus, Status
from tba.searcher.loop import _HEARTBEAT_SECONDS, _LEASE_WAIT_SECONDS
from tba.searcher.prompts import register_prompts
from tba.searcher.tasks.task import Prompt, Task

ROW_BYTES = 4096
PRODUCERS = 8
STATUS_REQUESTS = 20
REGISTERING = ((8, 200_000), (16, 500_000))
_PATIENCE_SECONDS = 120.0
_FORK = multiprocessing.get_context("fork")


def main() -> None:
    parser = argparse.ArgumentParser(description="many searchers at one buffer")
    parser.add_argument("--searchers", type=int, default=500)
    parser.add_argument("--leases", type=int, default=40, help="prompts that each searcher holds")
    parser.add_argument("--rows", type=int, default=65_536, help="rows in one round")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    pairs, statuses = [], []
    for number in range(options.rounds):
        rates: dict[int, float] = {}
        # Each is first in half of the rounds.
        for crowd in (0, options.searchers) if number % 2 else (options.searchers, 0):
            rates[crowd], status_ms = measure(crowd, options)
            statuses += status_ms if crowd else []
        pairs.append((rates[0], rates[options.searchers]))
    alone, crowded = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(crowded / alone for alone, crowded in pairs)
    print_table(
        f"ingest of {ROW_BYTES >> 10} KB rows; {options.searchers} x {options.leases} leases are held and all wait",
        ["producers", "alone, rows/s", "crowded, rows/s", "ratio", "status p50 ms", "slowest"],
        [[PRODUCERS, *(f"{rate:,.0f}" for rate in (alone, crowded)), f"{ratio:.2f}", *summary(statuses)]],
    )
    rows = [[searchers, f"{prompts:,}", *registration(searchers, prompts)] for searchers, prompts in REGISTERING]
    print_table("registration", ["searchers", "prompts", "seconds in all", "slowest status ms"], rows)


def summary(milliseconds: list[float]) -> list[str]:
    """Return the median and the maximum."""
    return [f"{statistics.median(milliseconds):.1f}", f"{max(milliseconds):.1f}"]


# ---------------------------------------------------------------- waiting


def measure(crowd: int, options: argparse.Namespace) -> tuple[float, list[float]]:
    """Return the rows per second of a new server, and milliseconds of status requests while nothing is put."""
    target = options.searchers * options.leases
    settings = ("buffer.max_staleness=1", "train.publish_every=1", f"train.prompts_per_step={target // 2}")
    with (
        tempfile.TemporaryDirectory(prefix="tba-bench-") as folder,
        serving.serving(Path(folder) / "run", *settings) as (_, address),
    ):
        serving.prepare(address, max(PROMPTS, 2 * target))
        with waiting(address, crowd, options.leases):
            status_ms = [request_status(address) for _ in range(STATUS_REQUESTS)]
            load = Load(address, PRODUCERS, options.rows // PRODUCERS, ROW_BYTES)
            started = load.start()
            taken = load.wait()
    finished = min(acknowledged[-1][0] for acknowledged in taken)
    puts = sum(at <= finished for acknowledged in taken for at, _ in acknowledged)
    return GROUP * puts / (finished - started), status_ms


def request_status(address: str) -> float:
    """Return the milliseconds of one status request on an open connection."""
    client = BufferClient(address, role="monitor", name="bench")
    try:
        client.call(GetStatus(), Status, deadline_seconds=_PATIENCE_SECONDS)
        started = time.perf_counter()
        client.call(GetStatus(), Status, deadline_seconds=_PATIENCE_SECONDS)
        return 1000 * (time.perf_counter() - started)
    finally:
        client.close()


@contextlib.contextmanager
def waiting(address: str, searchers: int, leases: int) -> Iterator[None]:
    """Run searchers that hold this many leases each and wait for more, in a process of their own."""
    ready, stop = _FORK.Event(), _FORK.Event()
    process = _FORK.Process(target=wait_for_leases, args=(address, searchers, leases, ready, stop), daemon=True)
    process.start()
    try:
        assert ready.wait(_PATIENCE_SECONDS), "the searchers did not get their leases"
        yield
        assert process.is_alive(), "the searchers failed: see above"
    finally:
        stop.set()
        process.join()


def wait_for_leases(address: str, searchers: int, leases: int, ready: Event, stop: Event) -> None:
    """Be these searchers until `stop`."""
    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, 2 * searchers + 16)
        crowd = [WaitingSearcher(context.socket(zmq.DEALER), address, n, leases) for n in range(searchers)]
        by_socket = {searcher.socket: searcher for searcher in crowd}
        # All say hello before the first one asks: each then gets its part of the leases.
        for searcher in crowd:
            searcher.expect(searcher.send(messages.Hello(host="bench", pid=1)))
        for searcher in crowd:
            searcher.take(searcher.expect(searcher.ask()))
        poller = zmq.Poller()
        for socket in by_socket:
            poller.register(socket, zmq.POLLIN)
        ready.set()
        while not stop.is_set():
            for socket, _ in poller.poll(50):
                by_socket[socket].take(msgpack.unpackb(socket.recv_multipart()[0]))
            now = time.monotonic()
            for searcher in crowd:
                searcher.beat(now)
        for searcher in crowd:
            searcher.socket.close(0)


class WaitingSearcher:
    """A searcher whose engine is full: it only waits for leases."""

    def __init__(self, socket: "zmq.Socket[bytes]", address: str, number: int, leases: int) -> None:
        self.socket = socket
        self._name = f"waiting{number}.{os.getpid()}"
        self._leases = leases
        self._held: list[int] = []
        self._ids = 0
        self._beat_at = time.monotonic() + random.Random(number).random()
        heartbeat = messages.Heartbeat(
            activity="waiting", reason="prompts", weights_version=0, metrics={f"metric{n}": 0.5 * n for n in range(20)}
        )
        self._heartbeat = self._encoded(heartbeat, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(1000 * _PATIENCE_SECONDS))
        socket.connect(address)

    def send(self, message: messages.Message) -> int:
        """Send a request, and return its id."""
        self._ids += 1
        self.socket.send_multipart(self._encoded(message, self._ids))
        return self._ids

    def ask(self) -> int:
        """Ask for as many leases as are held."""
        wait = _LEASE_WAIT_SECONDS
        return self.send(
            messages.LeasePrompts(want=self._leases, held=self._held, weights_version=0, wait_seconds=wait)
        )

    def expect(self, id_: int) -> dict[str, Any]:
        """Receive the reply to a request."""
        reply: dict[str, Any] = msgpack.unpackb(self.socket.recv_multipart()[0])
        assert reply["id"] == id_ and reply["type"] != messages.Failure.TYPE, reply  # noqa: PT018
        return reply

    def take(self, reply: dict[str, Any]) -> None:
        """Note the leases of a reply, and ask again. Replies to heartbeats need nothing."""
        if reply["type"] == messages.Leases.TYPE:
            self._held += [visit["lease"] for visit in reply["body"]["visits"]]
            self.ask()
        else:
            assert reply["type"] == messages.Done.TYPE, reply

    def beat(self, now: float) -> None:
        """Send a heartbeat if it is time."""
        if now >= self._beat_at:
            self._beat_at += _HEARTBEAT_SECONDS
            self.socket.send_multipart(self._heartbeat)

    def _encoded(self, message: messages.Message, id_: int) -> Frames:
        return encode_request(message, id=id_, role="searcher", sender=self._name, run="")


# ---------------------------------------------------------------- registration


def registration(searchers: int, prompts: int) -> list[str]:
    """Return the seconds until all searchers have registered a task, and the slowest status in milliseconds."""
    task = cast(Task, SimpleNamespace(name="bench", prompts=lambda: prompts_of_task))
    prompts_of_task = [Prompt(f"{n:016x}", "What is 17 + 25?", "42") for n in range(prompts)]
    with (
        tempfile.TemporaryDirectory(prefix="tba-bench-") as folder,
        serving.serving(Path(folder) / "run") as (_, address),
    ):
        serving.status(address)
        processes = [_FORK.Process(target=register, args=(address, task, n), daemon=True) for n in range(searchers)]
        started = time.perf_counter()
        for process in processes:
            process.start()
        slowest, done = [0.0], threading.Event()
        watcher = threading.Thread(target=watch, args=(address, slowest, done))
        watcher.start()
        for process in processes:
            process.join()
            assert process.exitcode == 0, "a searcher failed: see above"
        seconds = time.perf_counter() - started
        done.set()
        watcher.join()
        assert serving.status(address).prompts == prompts
    return [f"{seconds:.1f}", f"{slowest[0]:.0f}"]


def register(address: str, task: Task, number: int) -> None:
    """Be one searcher that starts."""
    client = BufferClient(address, role="searcher", name=f"starting{number}")
    client.call(messages.Hello(host="bench", pid=1), messages.Welcome, deadline_seconds=60)
    # Texts are rendered without a tokenizer.
    register_prompts(client, task, PromptRenderer(cast(Tokenizer, None), TaskSection()), lambda: False)
    client.close()


def watch(address: str, slowest: list[float], done: threading.Event) -> None:
    """Keep the milliseconds of the slowest status request until `done`."""
    while not done.wait(0.02):
        slowest[0] = max(slowest[0], request_status(address))


if __name__ == "__main__":
    main()
