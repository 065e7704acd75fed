"""How long one waits: for the acknowledgement of a put at half load, and for a batch while the server ingests.

The batch is 512 trajectories x 2,048 tokens, another one each time, asked for while 8 producers put as fast as they
can. It is compared with one process of its own that reads the same blobs by primary key from the same file at the
same time: what is on top is choosing, recording, syncing, queueing and sending.
"""

import multiprocessing
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.ingest import PAYLOAD, Load, Server
from benchmarks.table import print_table
from tba.common import wire
from tba.common.client import BufferClient
from tba.common.process import keep_freed_memory, objects_frozen

BATCH = 512  # trajectories
SAMPLES = 8  # of a prompt
ROW_BYTES = 2048 * 8
BATCHES = 200
FILL = 8_192


def main() -> None:
    rows = [put_latency(producers) for producers in (1, 8)]
    print_table("put to acknowledgement at half load, 4 KB rows", ["producers", "rows/s", "p50 ms", "p99 ms"], rows)
    keep_freed_memory()  # as a trainer does
    with (
        objects_frozen(),
        tempfile.TemporaryDirectory(prefix="tba-bench-") as folder,
        Server(Path(folder) / "run") as server,
    ):
        server.ingest(8, FILL, ROW_BYTES)
        client = BufferClient(server.address, role="trainer", name="bench")
        client.call(wire.Hello(host="bench", pid=1, software="bench"), wire.Welcome, deadline_seconds=20)
        quiet = batches_and_reads(client, server.directory / "buffer.sqlite", first_step=0)
        load = Load(server.address, 8, 262_144, ROW_BYTES)
        load.start()
        busy = batches_and_reads(client, server.directory / "buffer.sqlite", first_step=BATCHES)
        assert load.stop(), "the load ended before the measurement did"
        client.close()
    headings = ["while", "batch p50 ms", "p99 ms", "by key p50 ms", "p99 ms", "ratio of p50"]
    print_table(f"a batch of {BATCH} x 2,048 tokens", headings, [["idle", *quiet], ["ingesting", *busy]])


def put_latency(producers: int) -> list[str]:
    """Acknowledgement latencies with producers that put at half of the rate that they reached before."""
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder, Server(Path(folder) / "run") as server:
        rate = server.ingest(producers, 16_384, 4096)
        latencies = sorted(server.latencies(producers, 8_192, 4096, rate=rate / 2))
    p50, p99 = percentiles(latencies)
    return [str(producers), f"{rate / 2:,.0f}", p50, p99]


def percentiles(seconds: Sequence[float]) -> tuple[str, str]:
    """p50 and p99 in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return f"{1000 * cuts[49]:.1f}", f"{1000 * cuts[98]:.1f}"


def batches_and_reads(client: BufferClient, database: Path, first_step: int) -> list[str]:
    """Latencies of batches, and of another process that reads as many blobs by their keys, one after the other."""
    batches, reads = [], []
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for step in range(first_step, first_step + BATCHES):
            message = wire.SampleBatch(
                step=step, prompts=BATCH // SAMPLES, samples=SAMPLES, reference="none", wait_seconds=10.0
            )
            started = time.perf_counter()
            batch, frames = client.call(message, wire.Batch, deadline_seconds=30)
            batches.append(time.perf_counter() - started)
            assert sum(frame.nbytes for frame in frames) > BATCH * ROW_BYTES
            reads.append(pool.apply(read_by_key, (str(database), batch.trajectory_ids)))
            report = wire.ReportStep(step=step, metrics={}, reference="none", trajectory_ids=[], reference_logprobs=[])
            client.call(report, wire.Done, deadline_seconds=30)
    ratio = statistics.median(batches) / statistics.median(reads)
    return [*percentiles(batches), *percentiles(reads), f"{ratio:.2f}"]


def read_by_key(path: str, ids: Sequence[int]) -> float:
    """Seconds to read the payloads of these trajectories, on a connection that is open and warm."""
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
