"""A thousand searchers at one buffer server: what it takes in and how fast it answers while they work, and wait.

    python -m benchmarks.fleet [--searchers 1000] [--rate 4000] [--seconds 30] [--pairs 4]

Each searcher has the client, the delivery and the spool of a real one, and an engine that only takes time: a group of
16 responses is finished at its pace. They lease, put and send heartbeats as the searcher's loop does, from a few
processes. *Working*: all of them together finish `--rate` rows of 4 KB per second, and a trainer asks for batch after
batch. *Waiting*: they hold all leases that `max_staleness` leaves room for and have a request for more parked, while 8
producers put as fast as the server takes it. Rounds with and without them take turns, each on a new server. All
processes share the cores of this machine, where a real server has none of its searchers: waiting ones have the lowest
priority (nice 19), so that the server does not wait for what imitates them. If they had too little time for that, they
would be silent for longer than half the time between two heartbeats, on average: see the column.
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
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

import psutil
import zmq

from benchmarks.harness import in_turns, median_ratio, p50_and_p99_ms, print_table
from benchmarks.producers import GROUP, Load, trajectory
from benchmarks.serving import PATIENCE_SECONDS, WEIGHTS, Server
from tba.common.system.process import allow_many_files
from tba.common.wire import messages
from tba.common.wire.client import BufferClient, make_hello
from tba.common.wire.messages import GetStatus, Status
from tba.common.wire.trajectory import Trajectory
from tba.searcher.delivery.delivery import Delivery
from tba.searcher.loop import LEASE_WAIT_HEARTBEATS

ROW_BYTES = 4096
# Two loads of an engine with 256 responses in flight, in groups; one is all that a waiting searcher may lease.
LOADS = 2 * 256 // GROUP
PROCESSES = 4
# So many rows that the rounds have enough statuses for a p99.
PRODUCERS, ROWS = 8, 262_144
BATCH_PROMPTS, BATCH_SAMPLES = 64, 8
# As many metrics as a searcher with vLLM sends.
METRICS = {f"metric_of_searcher_{n}": 1234.5 + n for n in range(28)}
# During ingest as often as a person who watches asks: more would be a load of its own.
_STATUS_SECONDS, _WATCH_SECONDS = 0.1, 0.5
_STATUSES = 100
_SPAWN = multiprocessing.get_context("spawn")


def main() -> None:
    parser = argparse.ArgumentParser(description="a fleet of searchers at one buffer")
    parser.add_argument("--searchers", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=4000.0, help="rows per second of all working searchers")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long they work")
    parser.add_argument("--pairs", type=int, default=4, help="rounds of ingest with and without waiting searchers")
    options = parser.parse_args()
    if options.seconds:
        headings = ["rows/s", "CPU", "lease p50 ms", "p99", "status p50 ms", "p99", "batch p50 ms", "p99", "MiB", "fds"]
        row = ["working", *working(options.searchers, options.rate, options.seconds)]
        title = f"{options.searchers} searchers that finish {options.rate:,.0f} rows/s of 4 KB"
        print_table(title, ["", *headings], [row])
    if not options.pairs:
        return
    found = in_turns(
        {waiting: partial(ingest, waiting, options.searchers) for waiting in (0, options.searchers)}, options.pairs
    )
    rows = []
    for waiting, rounds in found.items():
        *columns, before, seconds = zip(*rounds, strict=True)
        medians = (f"{statistics.median(column):,.5g}" for column in columns)
        statuses = (cell for values in (before, seconds) for cell in p50_and_p99_ms([*chain(*values)]))
        rows.append([f"{waiting} waiting", *medians, *statuses])
    headings = [
        "",
        "rows/s",
        "rows/CPU s",
        "MiB",
        "fds",
        "silence s",
        "status before p50 ms",
        "p99",
        "status p50 ms",
        "p99",
    ]
    print_table(f"ingest of {PRODUCERS} producers, median of {options.pairs} rounds", headings, rows)
    per_second, per_cpu_second = (
        median_ratio(*([one[n] for one in rounds] for rounds in reversed(found.values()))) for n in (0, 1)
    )
    print(f"median ratio of a pair: rows/s {per_second:.2f}, rows/CPU s {per_cpu_second:.2f}")


def working(searchers: int, rate: float, seconds: float) -> list[str]:
    """Return what a server does in some seconds for searchers at work."""
    statuses, batches = [], []
    with (
        fleet(searchers, rate, searchers) as (server, taken),
        contextlib.closing(server.client("trainer")) as trainer,
        contextlib.closing(server.client("monitor")) as monitor,
    ):
        ask(trainer, 0)
        began, before, cpu = time.perf_counter(), server.status().trajectories, server.cpu_seconds()
        for step in count(1):
            batches.append(ask(trainer, step))
            for _ in range(8):
                statuses.append(request_status(monitor))
                time.sleep(_STATUS_SECONDS)
            if time.perf_counter() > began + seconds:
                break
        took = time.perf_counter() - began
        rows, cpu = server.status().trajectories - before, server.cpu_seconds() - cpu
        used, leases = usage(server), taken()
    percentiles = [cell for values in (leases, statuses, batches) for cell in p50_and_p99_ms(values)]
    return [f"{rows / took:,.0f}", f"{cpu / took:.0%}", *percentiles, *(f"{number:,.0f}" for number in used)]


def ingest(waiting: int, most: int) -> tuple[float, float, float, float, float, list[float], list[float]]:
    """Return what a new server takes in while this many searchers, of `most`, wait for leases.

    Rows per second, and per second of its CPU time; at the end its MiB and descriptors, and for how many seconds the
    mean searcher has been silent; the seconds of statuses before the first put, and while it takes in rows.
    """
    with fleet(waiting, 0.0, most) as (server, _), contextlib.closing(server.client("monitor")) as monitor:
        before, seconds, done = [], [], threading.Event()
        for _ in range(_STATUSES):
            before.append(request_status(monitor))
            time.sleep(_STATUS_SECONDS)

        def watch() -> None:
            while not done.wait(_WATCH_SECONDS):
                seconds.append(request_status(monitor))

        watcher = threading.Thread(target=watch)
        load = Load(server, PRODUCERS, ROWS, ROW_BYTES)
        started, cpu = load.start(), server.cpu_seconds()
        watcher.start()
        taken = load.wait()
        rate, cpu = load.rate(started, taken), server.cpu_seconds() - cpu
        done.set()
        watcher.join()
        named = (client for client in server.status().clients if client.sender.startswith("searcher"))
        silence = statistics.fmean([client.silent_seconds for client in named] or [0.0])
        return rate, ROWS / cpu, *usage(server), silence, before, seconds


def usage(server: Server) -> tuple[float, float]:
    """Return the resident memory of a server in MiB, and its open descriptors."""
    process = psutil.Process(server.process.pid)
    return process.memory_info().rss / (1 << 20), process.num_fds()


def request_status(monitor: BufferClient) -> float:
    """Return the seconds until a status has arrived."""
    started = time.perf_counter()
    monitor.call(GetStatus(), Status, deadline_seconds=PATIENCE_SECONDS)
    return time.perf_counter() - started


def ask(trainer: BufferClient, step: int) -> float:
    """Return the seconds until the batch of a step has arrived. Reports it as trained."""
    request = messages.SampleBatch(
        step=step, prompts=BATCH_PROMPTS, samples=BATCH_SAMPLES, reference="none", wait_seconds=60.0
    )
    started = time.perf_counter()
    trainer.call(request, messages.Batch, deadline_seconds=PATIENCE_SECONDS)
    seconds = time.perf_counter() - started
    report = messages.ReportStep(step=step, metrics={}, reference="none", trajectory_ids=[], reference_logprobs=[])
    trainer.call(report, messages.Done, deadline_seconds=PATIENCE_SECONDS)
    return seconds


# ---------------------------------------------------------------- the fleet


@dataclass(frozen=True, slots=True)
class Work:
    """What each searcher does. `interval`: seconds from one finished group to the next, 0 if none is ever finished."""

    address: str
    spools: Path
    interval: float


@contextlib.contextmanager
def fleet(searchers: int, rate: float, most: int) -> Iterator[tuple[Server, "partial[list[float]]"]]:
    """Run a new server with searchers that have their leases, and a function that ends them.

    It returns the seconds from requests for leases to their replies. `most` is the largest fleet that is compared: the
    run has prompts for it.
    """
    share = most * LOADS // 2
    settings = (
        []
        if rate
        else ["buffer.max_staleness=1", f"train.prompts_per_step={max(1, share // 2)}", "train.samples_per_prompt=8"]
    )
    with (
        tempfile.TemporaryDirectory(prefix="tba-bench-") as folder,
        Server(Path(folder) / "run", *settings) as server,
    ):
        server.prepare(max(2048, 2 * share))
        work = Work(server.address, Path(folder) / "spools", GROUP * searchers / rate if rate else 0.0)
        stop, taken = _SPAWN.Event(), _SPAWN.SimpleQueue()
        parts = [range(n, searchers, PROCESSES) for n in range(min(PROCESSES, searchers))]
        barrier = _SPAWN.Barrier(len(parts) + 1)
        processes = [
            _SPAWN.Process(target=search, args=(part, work, barrier, stop, taken), daemon=True) for part in parts
        ]
        for process in processes:
            process.start()

        def end() -> list[float]:
            assert all(process.is_alive() for process in processes), "searchers failed: see above"
            stop.set()
            seconds = [one for _ in processes for one in taken.get()]
            for process in processes:
                process.join()
            return seconds

        # All say hello before the first asks: each then gets its part of the leases.
        barrier.wait(PATIENCE_SECONDS)
        barrier.wait(PATIENCE_SECONDS)
        yield server, partial(end)
        if not stop.is_set():
            end()


def search(numbers: range, work: Work, barrier: Barrier, stop: Event, taken: "SimpleQueue[list[float]]") -> None:
    """Be some of the searchers until `stop`."""
    allow_many_files()
    responses = [[trajectory(ROW_BYTES, GROUP * n + i) for i in range(GROUP)] for n in range(64)]
    searchers = [Searcher(number, work, responses) for number in numbers]
    by_socket = {searcher.socket: searcher for searcher in searchers}
    poller = zmq.Poller()
    for socket in by_socket:
        poller.register(socket, zmq.POLLIN)
    barrier.wait()
    is_ready = False
    while not stop.is_set():
        readable = [by_socket[socket] for socket, _ in poller.poll(20)]
        now = time.monotonic()
        for searcher in {*readable, *(one for one in searchers if now >= one.due_at)}:
            searcher.turn(now)
        if not is_ready and all(searcher.leased for searcher in searchers):
            is_ready = True
            barrier.wait()
            if not work.interval:
                os.nice(19)
    taken.put([seconds for searcher in searchers for seconds in searcher.lease_seconds])
    for searcher in searchers:
        searcher.close()


class Searcher:
    """The client and the delivery of a searcher, as its loop uses them, with an engine that only takes time."""

    def __init__(self, number: int, work: Work, responses: Sequence[Sequence[Trajectory]]) -> None:
        self._client = BufferClient(work.address, role="searcher", name=f"searcher{number}")
        self._client.call(make_hello(), messages.Welcome, deadline_seconds=PATIENCE_SECONDS)
        self._delivery = Delivery(self._client, run_name="bench", root=work.spools / str(number), limit_mib=1024.0)
        self._delivery.open()
        self.socket = self._client._channel._socket
        self._random = random.Random(number)
        self._responses, self._interval = responses, work.interval
        now = time.monotonic()
        self._beat_at = now + self._random.random()
        self._finish_at = now + work.interval * self._random.random() if work.interval else float("inf")
        self._visits: deque[messages.Visit] = deque()
        self._asked: tuple[int, float] | None = None
        self.lease_seconds: list[float] = []
        self.leased = False
        self.due_at = now

    def turn(self, now: float) -> None:
        """Take what has arrived, and do what is due."""
        for reply in self._client.poll(0.0):
            if isinstance(reply.message, messages.Leases):
                assert self._asked is not None
                # The first requests, of all searchers at once, are those of a start.
                if reply.message.visits and self.leased:
                    self.lease_seconds.append(time.monotonic() - self._asked[1])
                self._asked, self.leased = None, self.leased or bool(reply.message.visits)
                self._visits.extend(reply.message.visits)
            elif isinstance(reply.message, messages.PutAck):
                self._delivery.acknowledge(reply)
            else:
                assert isinstance(reply.message, messages.Done), reply
        while self._visits and now >= self._finish_at:
            visit = self._visits.popleft()
            group = self._random.choice(self._responses)
            rows = [replace(one, prompt_key=visit.prompt_key, lease=visit.lease) for one in group]
            self._delivery.submit(rows, visit.lease)
            self._finish_at += self._interval
        self._delivery.step()
        self._ask(now)
        if now >= self._beat_at:
            assert self._client.state is not None
            self._beat_at = now + self._client.state.heartbeat_seconds
            activity = "generating" if self._interval else "waiting"
            self._client.post(
                messages.Heartbeat(activity=activity, reason="prompts", weights_version=0, metrics=METRICS)
            )
        self.due_at = min(self._beat_at, self._finish_at)

    def _ask(self, now: float) -> None:
        want = LOADS - len(self._visits)
        # Sooner than a searcher's loop, which waits until an eighth is used.
        if self._asked is not None or not want:
            return
        held = sorted({visit.lease for visit in self._visits} | set(self._delivery.leases))
        assert self._client.state is not None
        wait_seconds = LEASE_WAIT_HEARTBEATS * self._client.state.heartbeat_seconds
        request = messages.LeasePrompts(
            want=want, held=held, weights_version=WEIGHTS.version, wait_seconds=wait_seconds
        )
        self._asked = self._client.post(request), now

    def close(self) -> None:
        """Leave without a goodbye: the server ends with the round."""
        self._delivery.close()
        self._client.close()


if __name__ == "__main__":
    main()
