"""Latencies: of an acknowledgement at half load, of a batch during full ingest, and a trainer's wait with prefetch.

The batch is 512 trajectories x 2,048 tokens, a new one each time, requested while 8 producers put at the maximum rate.
It is compared with a separate process that reads the same blobs by primary key from the same file at the same time.
The difference is choosing, recording, syncing, queueing and sending.
"""

import argparse
import contextlib
import multiprocessing
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.ingest import PAYLOAD, Server
from benchmarks.producers import Load
from benchmarks.table import print_table
from tba.common.system.process import keep_freed_memory, objects_frozen
from tba.common.wire import messages
from tba.common.wire.client import BufferClient

# Trajectories.
BATCH = 512
# Trajectories per prompt.
SAMPLES = 8
ROW_BYTES = 2048 * 8
BATCHES = 200
FILL = 8_192
# A short step: a trainer of a real model takes longer, and waits for a smaller fraction of its time.
STEP_SECONDS = 1.0
STEPS = 30
# With and without keys.
PAIRS = 4
PAIR_STEPS = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", action="store_true", help="compare encrypted connections with plain ones")
    if parser.parse_args().keys:
        return compare_keys()
    rows = [put_latency(producers) for producers in (1, 8)]
    print_table("put to acknowledgement at half load, 4 KB rows", ["producers", "rows/s", "p50 ms", "p99 ms"], rows)
    # As a trainer does.
    keep_freed_memory()
    with (
        objects_frozen(),
        tempfile.TemporaryDirectory(prefix="tba-bench-") as folder,
        Server(Path(folder) / "run") as server,
    ):
        server.ingest(8, FILL, ROW_BYTES)
        client = BufferClient(server.address, role="trainer", name="bench")
        client.call(messages.Hello(host="bench", pid=1), messages.Welcome, deadline_seconds=20)
        quiet = batches_and_reads(client, server.directory / "buffer.sqlite", first_step=0)
        load = Load(server.address, 8, 262_144, ROW_BYTES)
        load.start()
        busy = batches_and_reads(client, server.directory / "buffer.sqlite", first_step=BATCHES)
        waits = step_waits(client, first_step=2 * BATCHES)
        assert load.stop(), "the load ended before the measurement did"
        client.close()
    headings = ["while", "batch p50 ms", "p99 ms", "by key p50 ms", "p99 ms", "ratio of p50"]
    print_table(f"a batch of {BATCH} x 2,048 tokens", headings, [["idle", *quiet], ["ingesting", *busy]])
    fraction = sum(waits) / (sum(waits) + STEPS * STEP_SECONDS)
    return print_table(
        f"steps of {STEP_SECONDS:g} s with prefetch, while ingesting",
        ["wait p50 ms", "p99 ms", "fraction of the trainer's time"],
        [[*percentiles(waits), f"{fraction:.2%}"]],
    )


def compare_keys() -> None:
    """Print the latency and CPU time of a batch, and the wait of a trainer with prefetch, with keys and without.

    Two servers with equal data take turns.
    """
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder, contextlib.ExitStack() as open_:
        servers = [open_.enter_context(Server(Path(folder, f"{keys}"), encrypted=keys)) for keys in (True, False)]
        clients = []
        for server in servers:
            server.ingest(8, FILL, ROW_BYTES)
            client = BufferClient(server.address, role="trainer", name="bench", keys=server.keys)
            clients.append(open_.enter_context(contextlib.closing(client)))
        ratios = [[f"{ratio:.2f}" for ratio in compare_batches(servers, clients)]]
        rows = compare_waits(servers, clients)
    headings = ["ratio of p50", "median ratio of a pair", "ratio of CPU time"]
    print_table(f"{BATCHES} batches of {BATCH} x 2,048 tokens with keys", headings, ratios)
    headings = ["", "wait p50 ms", "p99 ms", "fraction of the trainer's time"]
    print_table(f"steps of {STEP_SECONDS:g} s with prefetch, while ingesting, in {PAIRS} pairs", headings, rows)


def compare_batches(servers: Sequence[Server], clients: Sequence[BufferClient]) -> list[float]:
    """Return the ratio of p50, the median ratio of a pair, and the ratio of the CPU time of server and client."""
    seconds, cpu_seconds = ([[], []], [[], []])  # type: tuple[list[list[float]], list[list[float]]]
    for step in range(BATCHES):
        for n in (0, 1) if step % 2 else (1, 0):
            before, started = servers[n].cpu_seconds() + time.process_time(), time.perf_counter()
            clients[n].call(batch_request(step), messages.Batch, deadline_seconds=60)
            seconds[n].append(time.perf_counter() - started)
            cpu_seconds[n].append(servers[n].cpu_seconds() + time.process_time() - before)
            clients[n].call(report_of(step), messages.Done, deadline_seconds=60)
    return [
        statistics.median(seconds[0]) / statistics.median(seconds[1]),
        statistics.median(a / b for a, b in zip(*seconds, strict=True)),
        sum(cpu_seconds[0]) / sum(cpu_seconds[1]),
    ]


def compare_waits(servers: Sequence[Server], clients: Sequence[BufferClient]) -> list[list[str]]:
    """Return the waits of the trainer, with keys and without, under full ingest. The two servers take turns."""
    waits: tuple[list[float], list[float]] = ([], [])
    for pair in range(PAIRS):
        for n in (0, 1) if pair % 2 else (1, 0):
            load = Load(servers[n].address, 8, 262_144, ROW_BYTES, keys=servers[n].keys)
            load.start()
            waits[n].extend(step_waits(clients[n], first_step=BATCHES + pair * PAIR_STEPS, steps=PAIR_STEPS))
            assert load.stop(), "the load ended before the measurement did"
    return [
        [name, *percentiles(of), f"{sum(of) / (sum(of) + len(of) * STEP_SECONDS):.2%}"]
        for name, of in zip(("with keys", "without"), waits, strict=True)
    ]


def put_latency(producers: int) -> list[str]:
    """Return acknowledgement latencies of producers at half of their maximum rate."""
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder, Server(Path(folder) / "run") as server:
        rate = server.ingest(producers, 16_384, 4096)
        latencies = sorted(server.latencies(producers, 8_192, 4096, rate=rate / 2))
    p50, p99 = percentiles(latencies)
    return [str(producers), f"{rate / 2:,.0f}", p50, p99]


def percentiles(seconds: Sequence[float]) -> tuple[str, str]:
    """Return p50 and p99 in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return f"{1000 * cuts[49]:.1f}", f"{1000 * cuts[98]:.1f}"


def batches_and_reads(client: BufferClient, database: Path, first_step: int) -> list[str]:
    """Return latencies of batches, alternating with another process that reads as many blobs by key."""
    batches, reads = [], []
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for step in range(first_step, first_step + BATCHES):
            started = time.perf_counter()
            batch, frames = client.call(batch_request(step), messages.Batch, deadline_seconds=30)
            batches.append(time.perf_counter() - started)
            assert sum(frame.nbytes for frame in frames) > BATCH * ROW_BYTES
            reads.append(pool.apply(read_by_key, (str(database), batch.trajectory_ids)))
            client.call(report_of(step), messages.Done, deadline_seconds=30)
    ratio = statistics.median(batches) / statistics.median(reads)
    return [*percentiles(batches), *percentiles(reads), f"{ratio:.2f}"]


def step_waits(client: BufferClient, first_step: int, steps: int = STEPS) -> list[float]:
    """Return for each step how long the trainer waits for its batch, which it requested a step ahead."""
    waits = []
    wanted = client.ask_ahead(batch_request(first_step))
    for step in range(first_step, first_step + steps):
        started = time.perf_counter()
        client.collect(wanted, messages.Batch, lambda: False)
        waits.append(time.perf_counter() - started)
        wanted = client.ask_ahead(batch_request(step + 1))
        # The update: on a GPU it leaves the cores to server and producers, too.
        time.sleep(STEP_SECONDS)
        client.call(report_of(step), messages.Done, deadline_seconds=30)
    return waits[1:]


def batch_request(step: int) -> messages.SampleBatch:
    """The request for the batch of a step."""
    return messages.SampleBatch(
        step=step, prompts=BATCH // SAMPLES, samples=SAMPLES, reference="none", wait_seconds=10.0
    )


def report_of(step: int) -> messages.ReportStep:
    """The report that a step is done."""
    return messages.ReportStep(step=step, metrics={}, reference="none", trajectory_ids=[], reference_logprobs=[])


def read_by_key(path: str, ids: Sequence[int]) -> float:
    """Return the seconds to read the payloads of these trajectories, on an open and warm connection."""
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    query = f"SELECT {', '.join(PAYLOAD)} FROM payloads WHERE trajectory = ?"
    connection.execute(query, (ids[0],)).fetchone()
    started = time.perf_counter()
    blobs = [connection.execute(query, (id_,)).fetchone() for id_ in ids]
    frames = [b"".join(column) for column in zip(*blobs, strict=True)]
    seconds = time.perf_counter() - started
    connection.close()
    assert frames
    return seconds


if __name__ == "__main__":
    main()
