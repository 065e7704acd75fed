"""Ingest of trajectories: a real buffer server over loopback, against a bare sqlite3 loop on the same disk.

Both write the same rows into the same tables with the same indexes, and sync with synchronous=FULL. The bare
loop has its rows ready as Python objects: it is what this disk and SQLite give at best to one Python process.
"""

import multiprocessing
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tba.buffer.store import Store
from tba.common import wire
from tba.common.client import BufferClient
from tba.common.trajectory import Trajectory, pack

TOKENS = 512  # 4 bytes of id and 4 of log-probability each: 4 KB
GROUP = 64  # trajectories in one put
ROWS = 16_384
BATCH = 256  # rows in one transaction of the bare loop
IN_FLIGHT = 4  # puts that a producer has under way
WEIGHTS = wire.WeightsRef(version=0, step=0, path="/none", manifest_sha256="0" * 64)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
        bare = bare_loop(Path(folder))
        print(f"\n{'ingest, 4 KB trajectories, power-durable':44} {'rows/s':>8} {'ratio':>6}")
        print(f"{'bare sqlite3 loop, 256 rows per commit':44} {bare:8.0f} {1:6.2f}")
        for producers in (1, 2, 8):
            rate = server(Path(folder) / f"run{producers}", producers)
            print(f"{f'tba buffer serve, {producers} producers':44} {rate:8.0f} {rate / bare:6.2f}")


def trajectory() -> Trajectory:
    """A trajectory of 4 KB."""
    return Trajectory(
        prompt_key="p0",
        lease=0,
        prompt_ids=np.arange(16, dtype=np.int32),
        response_ids=np.arange(TOKENS, dtype=np.int32),
        logprobs=np.full(TOKENS, -0.5, np.float32),
        version_runs=np.array([[0, TOKENS]], np.int32),
        reward=1.0,
        reward_parts={"correct": 1.0},
        stop_reason="length",
        sampling={"temperature": 1.0, "top_p": 1.0},
        created_at=time.time(),
        generation_seconds=1.0,
    )


def bare_loop(folder: Path) -> float:
    """Rows per second of the store's own statements, with nothing around them."""
    store = Store(folder / "bare.sqlite", durability="power")
    run = store.open_run("bare", seed=0, config={}, software={})
    payload = tuple(memoryview(array.tobytes()) for array in payload_arrays())
    started = time.perf_counter()
    for first in range(0, ROWS, BATCH):
        with store.transaction():
            for sequence in range(first, first + BATCH):
                row = (run.id, 1, 0, 1, sequence, 0, 1.0, '{"correct": 1.0}', "length", 16, TOKENS, sequence)
                store.put((*row, '{"temperature": 1.0}', 0.0, 0.0, 1.0, None, None, "{}"), payload)
    seconds = time.perf_counter() - started
    store.close()
    return ROWS / seconds


def payload_arrays() -> list[np.ndarray]:
    """The arrays of `trajectory`, in the order of the payload's columns."""
    sample = trajectory()
    return [sample.prompt_ids, sample.response_ids, sample.logprobs, sample.version_runs, sample.loss_mask]


def server(directory: Path, producers: int) -> float:
    """Rows per second, acknowledged, of a server process fed by producer processes."""
    directory.mkdir()
    address = f"ipc://{directory}/socket"
    options = [f"run.dir={directory}", f"buffer.address={address}", "train.prompts_per_step=1"]
    command = [sys.executable, "-m", "tba", "buffer", "serve", *(part for o in options for part in ("--set", o))]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        prepare(address)
        started = time.perf_counter()
        with multiprocessing.Pool(producers) as pool:
            pool.starmap(produce, [(address, n, ROWS // producers) for n in range(producers)])
        return ROWS / (time.perf_counter() - started)
    finally:
        process.terminate()
        process.wait(20)


def prepare(address: str) -> None:
    """Register the prompt and the weights."""
    client = BufferClient(address, role="publisher", name="bench")
    client.call(wire.Hello(host="bench", pid=1, software="bench"), wire.Welcome, deadline_seconds=20)
    keys = wire.RegisterPrompts(task="bench", fingerprint="0" * 64, total=1, offset=0, keys=["p0"])
    client.call(keys, wire.Registered, deadline_seconds=20)
    client.call(wire.AnnounceSnapshot(weights=WEIGHTS, bytes=0), wire.Done, deadline_seconds=20)
    client.close()


def produce(address: str, number: int, rows: int) -> None:
    """Put groups, a few at a time, until all are acknowledged."""
    client = BufferClient(address, role="searcher", name=f"producer{number}")
    columns, frames = pack([trajectory()] * GROUP)
    group = wire.Rows.model_validate(columns)
    sent = acknowledged = 0
    while acknowledged < rows:
        while sent < rows and sent - acknowledged < IN_FLIGHT * GROUP:
            client.post(wire.PutTrajectories(first_sequence=sent, rows=group), frames)
            sent += GROUP
        acknowledged += sum(GROUP for reply in client.poll(1.0) if isinstance(reply.message, wire.PutAck))
    client.close()


if __name__ == "__main__":
    main()
