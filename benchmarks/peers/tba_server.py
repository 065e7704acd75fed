"""`tba buffer serve` in one process, one producer in another, over a local socket, with durability "power".

Every row is confirmed after its commit has been synced. A batch is 32 prompts x 16 trajectories, drawn by the server's
sampling rules and recorded, with a commit of its own, before it is handed out.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import asdict

from benchmarks import serving
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
from tba.common.wire import messages
from tba.common.wire.client import BufferClient
from tba.common.wire.trajectory import Trajectory, pack, unpack_arrays

# Puts of the producer that may be unacknowledged.
IN_FLIGHT = 4
_PATIENCE_SECONDS = 60.0


class TbaBuffer(PeerBuffer):
    """The connections of a producer and of a trainer, and the server that they use."""

    packages = ("tba", "pyzmq", "msgpack", "numpy")

    def __init__(self, folder: Path, _: int) -> None:
        self._server, self.address = serving.start(folder)
        serving.status(self.address)
        serving.prepare(self.address, CAPACITY // PER_PROMPT)
        self._producer = BufferClient(self.address, role="searcher", name="producer")
        self._trainer = BufferClient(self.address, role="trainer", name="trainer")
        self._put = self._acknowledged = 0
        self._step = 0

    @property
    def pid(self) -> int:
        return self._server.pid

    def put(self, first: int) -> int:
        columns, frames = pack([_trajectory(number) for number in range(first, first + GROUP)])
        rows = messages.Rows(**columns)
        self._producer.post(messages.PutTrajectories(first_sequence=first, rows=rows), frames)
        self._put = first + GROUP
        return self._collect(IN_FLIGHT * GROUP)

    def drain(self) -> int:
        return self._collect(0)

    def _collect(self, allowed: int) -> int:
        """Wait until at most `allowed` rows are unacknowledged."""
        while self._put - self._acknowledged > allowed:
            for reply in self._producer.poll(1.0):
                assert isinstance(reply.message, messages.PutAck), reply.message
                self._acknowledged += GROUP
        return self._acknowledged

    def sample(self) -> tuple[Any, Any]:
        batch, arrays = self.batch()
        assert len(batch.reward) == BATCH
        return np.stack(arrays["response_ids"]), np.stack(arrays["logprobs"])

    def batch(self) -> tuple[messages.Batch, dict[str, list[Any]]]:
        """Return the batch of the next step, with its arrays."""
        request = messages.SampleBatch(
            step=self._step, prompts=BATCH // PER_PROMPT, samples=PER_PROMPT, reference="bench", wait_seconds=10.0
        )
        batch, frames = self._trainer.call(request, messages.Batch, deadline_seconds=_PATIENCE_SECONDS)
        self._step += 1
        return batch, unpack_arrays(asdict(batch), frames)

    def close(self) -> None:
        self._producer.close()
        self._trainer.close()
        self._server.terminate()
        self._server.wait(_PATIENCE_SECONDS)


def survivors(folder: Path, confirmed: int) -> dict[str, Any]:
    """Return what a new server counts (rows were inserted in order), after checking one batch of its rows."""
    buffer = TbaBuffer(folder, CAPACITY)
    try:
        rows = min(serving.status(buffer.address).trajectories, confirmed)
        batch, arrays = buffer.batch()
        drawn = zip(batch.reward, arrays["response_ids"], arrays["logprobs"], strict=True)
        assert all(intact(int(number), *row) for number, *row in drawn), "a row is damaged"
        return {"rows": rows}
    finally:
        buffer.close()


def _trajectory(number: int) -> Trajectory:
    data = number % DISTINCT
    return Trajectory(
        prompt_key=f"p{number // PER_PROMPT}",
        lease=0,
        prompt_ids=np.zeros(1, np.int32),
        response_ids=IDS[data],
        logprobs=LOGPROBS[data],
        version_runs=np.array([[0, TOKENS]], np.int32),
        reward=float(number),
        reward_parts={},
        stop_reason="length",
        sampling={"temperature": 1.0, "top_p": 1.0},
        created_at=time.time(),
        generation_seconds=0.0,
    )


if __name__ == "__main__":
    main(TbaBuffer, survivors)
