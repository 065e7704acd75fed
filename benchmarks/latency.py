"""Latencies: of an acknowledgement at half load, of a batch during full ingest, and a trainer's wait with prefetch.

The batch is 512 trajectories x 2,048 tokens, a new one each time, requested while 8 producers put at the maximum rate.
It is compared with a separate process that reads the same blobs by primary key from the same file at the same time.
The difference is choosing, recording, syncing, queueing and sending.
"""

import contextlib
import multiprocessing
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness import p50_and_p99_ms, print_table, timed
from benchmarks.ingest import PAYLOAD
from benchmarks.producers import PROMPTS, Load
from benchmarks.serving import PATIENCE_SECONDS, Server
from tba.common.system.process import keep_freed_memory, objects_frozen
from tba.common.wire import messages

# Trajectories of a batch, and of a prompt.
BATCH, SAMPLES = 512, 8
ROW_BYTES = 2048 * 8
BATCHES = 200
FILL = 8_192
# A short step: a trainer of a real model takes longer, and waits for a smaller fraction of its time.
STEP_SECONDS = 1.0
STEPS = 30
WAIT_HEADINGS = ("wait p50 ms", "p99 ms", "fraction of the trainer's time")


class Trainer:
    """A trainer of a server with data for its batches. It reports each batch as trained."""

    def __init__(self, server: Server) -> None:
        server.prepare(PROMPTS)
        Load(server, 8, FILL, ROW_BYTES).rows_per_second()
        self._server, self._step = server, 0
        self._client = server.client("trainer")

    def batch(self) -> tuple[float, list[int]]:
        """Return the seconds of a request, and the ids of the batch."""
        call = partial(self._client.call, self._request(), messages.Batch, deadline_seconds=PATIENCE_SECONDS)
        seconds, (batch, frames) = timed(call)
        assert sum(frame.nbytes for frame in frames) > BATCH * ROW_BYTES
        self._report()
        return seconds.wall, batch.trajectory_ids

    def batches_and_reads(self) -> list[str]:
        """Return latencies of batches, alternating with another process that reads as many blobs by key."""
        batches, reads = [], []
        database = str(self._server.directory / "buffer.sqlite")
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            for _ in range(BATCHES):
                seconds, ids = self.batch()
                batches.append(seconds)
                reads.append(pool.apply(read_by_key, (database, ids)))
        ratio = statistics.median(batches) / statistics.median(reads)
        return [*p50_and_p99_ms(batches), *p50_and_p99_ms(reads), f"{ratio:.2f}"]

    def waits(self, steps: int) -> list[float]:
        """Return for each step how long the trainer waits for its batch, which it requested a step ahead."""
        waits = []
        wanted = self._client.ask_ahead(self._request())
        for _ in range(steps):
            started = time.perf_counter()
            self._client.collect(wanted, messages.Batch, lambda: False)
            waits.append(time.perf_counter() - started)
            wanted = self._client.ask_ahead(self._request(ahead=1))
            # The update: on a GPU it leaves the cores to server and producers, too.
            time.sleep(STEP_SECONDS)
            self._report()
        return waits[1:]

    @contextlib.contextmanager
    def loaded(self) -> Iterator[None]:
        """Let 8 producers put as fast as the server takes it during the block."""
        load = Load(self._server, 8, 262_144, ROW_BYTES)
        load.start()
        yield
        load.stop()

    def close(self) -> None:
        self._client.close()

    def _request(self, ahead: int = 0) -> messages.SampleBatch:
        return messages.SampleBatch(
            step=self._step + ahead, prompts=BATCH // SAMPLES, samples=SAMPLES, reference="none", wait_seconds=10.0
        )

    def _report(self) -> None:
        report = messages.ReportStep(
            step=self._step, metrics={}, reference="none", trajectory_ids=[], reference_logprobs=[]
        )
        self._client.call(report, messages.Done, deadline_seconds=PATIENCE_SECONDS)
        self._step += 1


def main() -> None:
    rows = [put_latency(producers) for producers in (1, 8)]
    print_table("put to acknowledgement at half load, 4 KB rows", ["producers", "rows/s", "p50 ms", "p99 ms"], rows)
    # As a trainer does.
    keep_freed_memory()
    with (
        objects_frozen(),
        tempfile.TemporaryDirectory(prefix="tba-bench-") as folder,
        Server(Path(folder) / "run") as server,
        contextlib.closing(Trainer(server)) as trainer,
    ):
        quiet = trainer.batches_and_reads()
        with trainer.loaded():
            busy = trainer.batches_and_reads()
            waits = trainer.waits(STEPS)
    headings = ["while", "batch p50 ms", "p99 ms", "by key p50 ms", "p99 ms", "ratio of p50"]
    print_table(f"a batch of {BATCH} x 2,048 tokens", headings, [["idle", *quiet], ["ingesting", *busy]])
    print_table(f"steps of {STEP_SECONDS:g} s with prefetch, while ingesting", WAIT_HEADINGS, [wait_row(waits)])


def wait_row(waits: Sequence[float]) -> list[str]:
    """Return percentiles of the waits, and their share of the time of the steps."""
    return [*p50_and_p99_ms(waits), f"{sum(waits) / (sum(waits) + len(waits) * STEP_SECONDS):.2%}"]


def put_latency(producers: int) -> list[str]:
    """Return acknowledgement latencies of producers at half of their maximum rate."""
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder, Server(Path(folder) / "run") as server:
        server.prepare(PROMPTS)
        rate = Load(server, producers, 16_384, 4096).rows_per_second() / 2
        load = Load(server, producers, 8_192, 4096, rate)
        load.start()
        latencies = [seconds for acknowledged in load.wait() for _, seconds in acknowledged]
    return [str(producers), f"{rate:,.0f}", *p50_and_p99_ms(latencies)]


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
