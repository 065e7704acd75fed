"""A large buffer: start-up, memory and sample latency with a million trajectories, against ten thousand.

    python -m benchmarks.scale [--small 10000] [--large 1000000] [--keep FOLDER]

Rows are put over the wire into a real server, in large puts with responses of 16 tokens, so that the file stays small:
the figures depend on the number of rows and prompts, and hardly on their length. The file cache is warm: a start from a
cold disk also reads the file. `--keep` leaves the databases in a folder, and uses those that are already there.

- *start-up*: from the start of the process until it answers a status request.
- *RSS*: of the server after start-up; the difference per row includes everything that grows with the number of rows,
  such as SQLite's page cache.
- *batch*: 64 prompts x 8 samples over the socket, one after the other, recorded with a synced commit each.
"""

import argparse
import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from benchmarks.harness import print_table
from benchmarks.producers import trajectory
from benchmarks.serving import PATIENCE_SECONDS, Server
from tba.common.wire import messages
from tba.common.wire.client import BufferClient
from tba.common.wire.trajectory import ARRAY_KINDS, pack

TOKENS = 16
PER_PROMPT = 16
# Rows in one put, and pending puts.
GROUP, IN_FLIGHT = 1024, 4
# Of a batch.
PROMPTS, SAMPLES = 64, 8
BATCHES = 100
# Batches that are not measured.
WARM_UP = 5


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=10_000, help="rows to compare with")
    parser.add_argument("--large", type=int, default=1_000_000, help="rows of the large buffer")
    parser.add_argument("--keep", type=Path, help="folder for the databases, kept")
    options = parser.parse_args(arguments or [])
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as scratch:
        folder = options.keep or Path(scratch)
        small, large = (figures(made(folder / f"rows{rows}", rows)) for rows in (options.small, options.large))
    rows = [[name, f"{small[name]:.2f}", f"{large[name]:.2f}", f"{large[name] / small[name]:.2f}"] for name in small]
    grown = (large["RSS of the server, MiB"] - small["RSS of the server, MiB"]) * 2**20
    rows.append(["RSS, bytes per further row", "", f"{grown / (options.large - options.small):.0f}", ""])
    print_table("a large buffer", ["", f"{options.small:,}", f"{options.large:,}", "ratio"], rows)


def made(directory: Path, rows: int) -> Path:
    """Return a run directory with a database of this many rows, created unless it exists."""
    if not directory.exists():
        unfinished = directory.with_name(directory.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        with Server(unfinished, "buffer.durability=process") as server:
            server.prepare(-(-rows // PER_PROMPT))
            fill(server, rows)
        unfinished.rename(directory)
    return directory


def fill(server: Server, rows: int) -> None:
    """Put rows over the wire, a few puts at a time, until all are acknowledged."""
    with contextlib.closing(BufferClient(server.address, role="searcher", name="filler")) as client:
        sent = acknowledged = 0
        for first, message, frames in puts(rows):
            client.post(message, frames)
            sent = first + len(message.rows.prompt_key)
            while sent - acknowledged > (0 if sent == rows else IN_FLIGHT * GROUP):
                for reply in client.poll(1.0):
                    assert isinstance(reply.message, messages.PutAck), reply.message
                    acknowledged += reply.message.stored


def puts(rows: int) -> Iterator[tuple[int, messages.PutTrajectories, list[bytes]]]:
    """Yield puts with this many rows. Every response is random, so that no two are identical."""
    random, sample = np.random.default_rng(0), trajectory(8 * TOKENS, 0)
    for first in range(0, rows, GROUP):
        count = min(GROUP, rows - first)
        columns, frames = pack([sample] * count)
        columns["prompt_key"] = [f"p{number // PER_PROMPT}" for number in range(first, first + count)]
        columns["reward"] = random.random(count).tolist()
        fresh = random.integers(0, 150_000, count * TOKENS, dtype=np.int32).tobytes()
        frames = [
            fresh if kind.name == "response_ids" else frame for kind, frame in zip(ARRAY_KINDS, frames, strict=False)
        ]
        yield first, messages.PutTrajectories(first_sequence=first, rows=messages.Rows(**columns)), frames


def figures(directory: Path) -> dict[str, float]:
    """Start a server with these rows, and measure it."""
    started = time.monotonic()
    with Server(directory) as server:
        server.status()
        start_up = time.monotonic() - started
        resident = psutil.Process(server.process.pid).memory_info().rss
        batches = batch_ms(server)
    return {
        "start-up until an answer, s": start_up,
        "RSS of the server, MiB": resident / 2**20,
        "batch 64 x 8, p50 ms": statistics.median(batches),
        "batch 64 x 8, p99 ms": float(np.percentile(batches, 99)),
    }


def batch_ms(server: Server) -> list[float]:
    """Return the milliseconds of each of the next batches, continuing the steps of an earlier measurement."""
    times = []
    with contextlib.closing(BufferClient(server.address, role="trainer", name="bench")) as trainer:
        hello = messages.Hello(host="bench", pid=1)
        first = trainer.call(hello, messages.Welcome, deadline_seconds=PATIENCE_SECONDS)[0].recorded_steps
        for step in range(first, first + WARM_UP + BATCHES):
            request = messages.SampleBatch(
                step=step, prompts=PROMPTS, samples=SAMPLES, reference="bench", wait_seconds=10.0
            )
            started = time.perf_counter()
            trainer.call(request, messages.Batch, deadline_seconds=PATIENCE_SECONDS)
            times.append((time.perf_counter() - started) * 1000)
    return times[WARM_UP:]


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
