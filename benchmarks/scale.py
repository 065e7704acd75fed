"""A large buffer: start-up, memory and sample latency with a million trajectories, against ten thousand.

    python -m benchmarks.scale [--small 10000] [--large 1000000] [--keep FOLDER]

Rows are put over the wire into a real server, in large puts with short responses, so that the file stays small: the
figures depend on the number of rows and prompts, and hardly on their length. The file cache is warm: a start from a
cold disk also reads the file. `--keep` leaves the databases in a folder, and uses those that are already there.

- *start-up*: from the start of the process until it answers a status request; the same without rows shows how much of
  it is Python and its imports.
- *RSS*: of the server after start-up; the difference per row includes everything that grows with the number of rows,
  such as SQLite's page cache.
- *index*: bytes that Python allocates, by tracemalloc, to rebuild the service's memory from the file, per row.
- *batch*: 64 prompts x 8 samples over the socket, one after the other, recorded with a synced commit each.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import serving
from benchmarks.table import machine
from tba.buffer.service.service import BufferService
from tba.buffer.store.store import Store
from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.wire import messages
from tba.common.wire.client import BufferClient
from tba.common.wire.trajectory import ARRAY_KINDS, Trajectory, pack

TOKENS = 16
PER_PROMPT = 16
# Rows in one put.
GROUP = 1024
# Pending puts.
IN_FLIGHT = 4
# Of a batch.
PROMPTS, SAMPLES = 64, 8
BATCHES = 100
# Batches that are not measured.
WARM_UP = 5
_PATIENCE_SECONDS = 120.0


def main() -> None:
    options = _options()
    print(machine())
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as scratch:
        folder = options.keep or Path(scratch)
        sizes = (0, options.small, options.large)
        empty, small, large = (figures(made(folder / f"rows{rows}", rows), rows) for rows in sizes)
    print_table(empty, small, large)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="the buffer with many rows against the buffer with few")
    parser.add_argument("--small", type=int, default=10_000, help="rows to compare with")
    parser.add_argument("--large", type=int, default=1_000_000, help="rows of the large buffer")
    parser.add_argument("--keep", type=Path, help="folder for the databases, kept")
    return parser.parse_args()


# ---------------------------------------------------------------- making the database


def made(directory: Path, rows: int) -> Path:
    """Return a run directory with a database of this many rows, created unless it exists."""
    if not directory.exists():
        unfinished = directory.with_name(directory.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        started = time.monotonic()
        with serving.serving(unfinished, "buffer.durability=process") as (_, address):
            serving.prepare(address, max(1, -(-rows // PER_PROMPT)))
            fill(address, rows)
        seconds = time.monotonic() - started
        print(f"{rows:,} rows made in {seconds:.0f} s, {rows / seconds:,.0f} rows/s", file=sys.stderr, flush=True)
        unfinished.rename(directory)
    return directory


def fill(address: str, rows: int) -> None:
    """Put rows over the wire, a few puts at a time, until all are acknowledged."""
    client = BufferClient(address, role="searcher", name="filler")
    sent = acknowledged = 0
    for first, message, frames in puts(rows):
        client.post(message, frames)
        sent = first + len(message.rows.prompt_key)
        while sent - acknowledged > (0 if sent == rows else IN_FLIGHT * GROUP):
            for reply in client.poll(1.0):
                assert isinstance(reply.message, messages.PutAck), reply.message
                acknowledged += reply.message.stored
    client.close()


def puts(rows: int) -> Iterator[tuple[int, messages.PutTrajectories, list[bytes]]]:
    """Return puts with this many rows. Every response is random, so that no two are identical."""
    random = np.random.default_rng(0)
    for first in range(0, rows, GROUP):
        count = min(GROUP, rows - first)
        columns, frames = pack([_trajectory()] * count)
        columns["prompt_key"] = [f"p{number // PER_PROMPT}" for number in range(first, first + count)]
        columns["reward"] = random.random(count).tolist()
        fresh = random.integers(0, 150_000, count * TOKENS, dtype=np.int32).tobytes()
        frames = [
            fresh if kind.name == "response_ids" else frame for kind, frame in zip(ARRAY_KINDS, frames, strict=True)
        ]
        yield first, messages.PutTrajectories(first_sequence=first, rows=messages.Rows(**columns)), frames


def _trajectory() -> Trajectory:
    return Trajectory(
        prompt_key="p0",
        lease=0,
        prompt_ids=np.arange(8, dtype=np.int32),
        response_ids=np.zeros(TOKENS, np.int32),
        logprobs=np.full(TOKENS, -0.5, np.float32),
        version_runs=np.array([[0, TOKENS]], np.int32),
        reward=0.0,
        reward_parts={},
        stop_reason="eos",
        sampling={"temperature": 1.0, "top_p": 1.0},
        created_at=time.time(),
        generation_seconds=0.0,
    )


# ---------------------------------------------------------------- measuring


def figures(directory: Path, rows: int) -> dict[str, Any]:
    """Measure one server with these rows: start-up, memory and batches, and the memory that Python reports."""
    started = time.monotonic()
    with serving.serving(directory) as (process, address):
        start_up = serving.seconds_until_answer(address, started)
        resident = resident_bytes(process.pid)
        file = sum(path.stat().st_size for path in directory.glob("buffer.sqlite*"))
        batches = batch_ms(address) if rows >= PROMPTS * SAMPLES else []
    return {
        "rows": rows,
        "start_up_seconds": start_up,
        "resident": resident,
        "file": file,
        "index": index_bytes(directory) if rows else 0,
        "p50_ms": statistics.median(batches) if batches else None,
        "p99_ms": float(np.percentile(batches, 99)) if batches else None,
    }


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024


def batch_ms(address: str) -> list[float]:
    """Return the milliseconds of each of the next batches, continuing the steps of an earlier measurement."""
    trainer = BufferClient(address, role="trainer", name="bench")
    hello = messages.Hello(host="bench", pid=1)
    first = trainer.call(hello, messages.Welcome, deadline_seconds=_PATIENCE_SECONDS)[0].recorded_steps
    times = []
    for step in range(first, first + WARM_UP + BATCHES):
        request = messages.SampleBatch(
            step=step, prompts=PROMPTS, samples=SAMPLES, reference="bench", wait_seconds=10.0
        )
        started = time.perf_counter()
        trainer.call(request, messages.Batch, deadline_seconds=_PATIENCE_SECONDS)
        times.append((time.perf_counter() - started) * 1000)
    trainer.close()
    return times[WARM_UP:]


def index_bytes(directory: Path) -> int:
    """Return the bytes that stay allocated after the service has built its memory (index, prompts) from the file."""
    config = Config.model_validate({"run": {"dir": directory}, "train": {"prompts_per_step": 1}})
    store = Store(config.database, durability="process")
    try:
        run = store.open_run(config.run.name, seed=config.run.seed, config={}, software={})
        tracemalloc.start()
        service = BufferService(store, run, config, SystemClock())
        allocated, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert service.status().sampleable, "the index is empty"
        return allocated
    finally:
        store.close()


# ---------------------------------------------------------------- the table


def print_table(empty: dict[str, Any], small: dict[str, Any], large: dict[str, Any]) -> None:
    """Print the small and the large buffer, their ratios, and the growth per row."""
    print(f"\n{'':34} {small['rows']:>12,} {large['rows']:>12,} {'ratio':>8}")
    for label, name, unit in (
        ("start-up until an answer, s", "start_up_seconds", 1),
        ("RSS of the server, MiB", "resident", 2**20),
        ("database file, MiB", "file", 2**20),
        ("batch 64 x 8, p50 ms", "p50_ms", 1),
        ("batch 64 x 8, p99 ms", "p99_ms", 1),
    ):
        before, after = small[name], large[name]
        print(f"{label:34} {before / unit:12.2f} {after / unit:12.2f} {after / before:8.2f}")
    grown = large["rows"] - small["rows"]
    print(f"\nRSS, bytes per further trajectory         {(large['resident'] - small['resident']) / grown:8.0f}")
    print(f"index by tracemalloc, bytes per trajectory {large['index'] / large['rows']:7.0f}")
    print(f"start-up without rows, s                  {empty['start_up_seconds']:8.2f}")
    reading = (large["start_up_seconds"] - empty["start_up_seconds"]) / large["rows"]
    print(f"start-up, microseconds per trajectory     {reading * 1e6:8.1f}")


if __name__ == "__main__":
    main()
