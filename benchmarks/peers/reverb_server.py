"""dm-reverb: its server in one process, one client with a TrajectoryWriter in another, over the loopback interface.

The server keeps its tables in memory, compressed. A checkpoint is made when a client requests one; it writes the whole
table and blocks inserts meanwhile. A new server loads the newest checkpoint. Batches come from TrajectoryDataset, which
its documentation recommends over `Client.sample`; it prefetches, so the figure is the time between batches and not a
round trip.
"""

import contextlib
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import reverb
import tensorflow as tf

from benchmarks.peers.worker import (
    BATCH,
    CAPACITY,
    DISTINCT,
    GROUP,
    IDS,
    LOGPROBS,
    PER_PROMPT,
    TOKENS,
    PeerBuffer,
    intact,
    main,
)

TABLE = "trajectories"
# Rows that a put leaves unconfirmed; reverb warns about many more.
PENDING = 128
_PATIENCE_SECONDS = 60


class ReverbBuffer(PeerBuffer):
    """A client, and a server that it starts; the server loads the newest checkpoint of the folder, if there is one."""

    packages = ("dm-reverb", "tensorflow-cpu", "tensorflow", "numpy")

    def __init__(self, folder: Path, _: int) -> None:
        port = _free_port()
        self._server = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.reverb_server", "serve", folder, str(port)]
        )
        self.address = f"localhost:{port}"
        self._client = reverb.Client(self.address)
        self._client.server_info(timeout=_PATIENCE_SECONDS)
        # The size of a put, so that several rows share a chunk: faster and smaller than one chunk per row.
        self._writer = self._client.trajectory_writer(num_keep_alive_refs=GROUP)
        self._batches: Any = None
        self._put = 0

    @property
    def pid(self) -> int:
        return self._server.pid

    def put(self, first: int) -> int:
        for number in range(first, first + GROUP):
            self._writer.append(_row(number))
            columns = self._writer.history
            self._writer.create_item(TABLE, 1.0, {name: column[-1] for name, column in columns.items()})
        self._put = first + GROUP
        self._writer.flush(block_until_num_items=PENDING)
        return max(0, self._put - PENDING)

    def drain(self) -> int:
        self._writer.flush()
        return self._put

    def sample(self) -> tuple[Any, Any]:
        if self._batches is None:
            self._batches = dataset(self.address).batch(BATCH).as_numpy_iterator()
        data = next(self._batches).data
        return data["ids"], data["logprobs"]

    def save(self) -> None:
        self._client.checkpoint()

    def rows(self) -> int:
        """Return the number of rows in the table."""
        return int(self._client.server_info()[TABLE].current_size)

    def close(self) -> None:
        self._server.kill()
        self._server.wait()


def survivors(folder: Path, confirmed: int) -> dict[str, Any]:
    """Return the size of the table, into which rows were inserted in order, after checking one batch of its rows."""
    buffer = ReverbBuffer(folder, CAPACITY)
    try:
        rows = min(buffer.rows(), confirmed)
        if rows:
            samples = dataset(buffer.address).take(BATCH).as_numpy_iterator()
            drawn = [(int(s.data["reward"]), s.data["ids"], s.data["logprobs"]) for s in samples]
            assert all(intact(*row) for row in drawn), "a row is damaged"
        return {"rows": rows}
    finally:
        buffer.close()


def dataset(address: str) -> reverb.TrajectoryDataset:
    """Return the rows of a server, drawn uniformly."""
    row = _row(0)
    return reverb.TrajectoryDataset(
        server_address=address,
        table=TABLE,
        dtypes={name: tf.as_dtype(value.dtype) for name, value in row.items()},
        shapes={name: tf.TensorShape(value.shape) for name, value in row.items()},
        max_in_flight_samples_per_worker=2 * BATCH,
    )


def serve(folder: str, port: str) -> None:
    """Run the server process."""
    table = reverb.Table(
        name=TABLE,
        sampler=reverb.selectors.Uniform(),
        remover=reverb.selectors.Fifo(),
        max_size=CAPACITY,
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    checkpointer = reverb.platform.checkpointers_lib.DefaultCheckpointer(folder)
    server = reverb.Server([table], port=int(port), checkpointer=checkpointer)
    with contextlib.suppress(KeyboardInterrupt):
        server.wait()


def _row(number: int) -> dict[str, np.ndarray]:
    data = number % DISTINCT
    return {
        "ids": IDS[data].reshape(TOKENS),
        "logprobs": LOGPROBS[data].reshape(TOKENS),
        "prompt": np.array(number // PER_PROMPT, np.int32),
        "reward": np.array(number, np.float32),
        "version": np.array(0, np.int64),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    else:
        main(ReverbBuffer, survivors)
