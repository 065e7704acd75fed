"""`tba buffer serve` in one process, one producer in another, over a local socket; durability=power.

Every row is confirmed after a commit with synchronous=FULL. A batch is 32 prompts x 16 trajectories, chosen by the
server's sampling rules and recorded, with a commit of its own, before it is handed out.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import serving
from benchmarks.peer_worker import (
    BATCH,
    CAPACITY,
    DISTINCT,
    GROUP,
    IDS,
    LOGPROBS,
    PER_PROMPT,
    TOKENS,
    Opener,
    PeerBuffer,
    intact,
    main,
)
from tba.common import wire
from tba.common.client import BufferClient
from tba.common.trajectory import Trajectory, pack, unpack_arrays

IN_FLIGHT = 4  # puts that the producer has under way
_PATIENCE_SECONDS = 60.0


class TbaBuffer(PeerBuffer):
    """A producer and a trainer's connection, and the server that they talk to."""

    packages = ("tba", "pyzmq", "msgpack", "numpy")

    def __init__(self, folder: Path) -> None:
        self._server, address = serving.start(folder)
        serving.status(address)
        serving.prepare(address, CAPACITY // PER_PROMPT)
        self._producer = BufferClient(address, role="searcher", name="producer")
        self._trainer = BufferClient(address, role="trainer", name="trainer")
        self._put = self._acknowledged = 0
        self._step = 0

    @property
    def pid(self) -> int:
        return self._server.pid

    def put(self, first: int) -> int:
        columns, frames = pack([_trajectory(number) for number in range(first, first + GROUP)])
        rows = wire.Rows.model_validate(columns)
        self._producer.post(wire.PutTrajectories(first_sequence=first, rows=rows), frames)
        self._put = first + GROUP
        return self._collect(IN_FLIGHT * GROUP)

    def drain(self) -> int:
        return self._collect(0)

    def _collect(self, allowed: int) -> int:
        """Wait until at most `allowed` rows are without an acknowledgement."""
        while self._put - self._acknowledged > allowed:
            for reply in self._producer.poll(1.0):
                assert isinstance(reply.message, wire.PutAck), reply.message
                self._acknowledged += GROUP
        return self._acknowledged

    def sample(self) -> tuple[Any, Any]:
        batch, arrays = self.batch()
        assert len(batch.reward) == BATCH
        return np.stack(arrays["response_ids"]), np.stack(arrays["logprobs"])

    def batch(self) -> tuple[wire.Batch, dict[str, list[Any]]]:
        """The batch of the next step, with its arrays."""
        request = wire.SampleBatch(
            step=self._step, prompts=BATCH // PER_PROMPT, samples=PER_PROMPT, reference="bench", wait_seconds=10.0
        )
        batch, frames = self._trainer.call(request, wire.Batch, deadline_seconds=_PATIENCE_SECONDS)
        self._step += 1
        return batch, unpack_arrays(batch.model_dump(), frames)

    def close(self) -> None:
        self._producer.close()
        self._trainer.close()
        self._server.terminate()
        self._server.wait(_PATIENCE_SECONDS)


class TbaOpener(Opener):
    """A new server over the folder."""

    def open(self, folder: Path, capacity: int) -> PeerBuffer:  # noqa: ARG002
        return TbaBuffer(folder)

    def survivors(self, folder: Path, confirmed: int) -> dict[str, Any]:
        """What the new server counts; the rows went in one after the other. One batch of them is looked at."""
        buffer = TbaBuffer(folder)
        try:
            rows = min(serving.status(buffer._trainer.address).trajectories, confirmed)
            batch, arrays = buffer.batch()
            seen = zip(batch.reward, arrays["response_ids"], arrays["logprobs"], strict=True)
            assert all(intact(int(number), *row) for number, *row in seen), "a row came back damaged"
            return {"rows": rows}
        finally:
            buffer.close()


def _trajectory(number: int) -> Trajectory:
    place = number % DISTINCT
    return Trajectory(
        prompt_key=f"p{number // PER_PROMPT}",
        lease=0,
        prompt_ids=np.zeros(1, np.int32),
        response_ids=IDS[place],
        logprobs=LOGPROBS[place],
        version_runs=np.array([[0, TOKENS]], np.int32),
        reward=float(number),
        reward_parts={},
        stop_reason="length",
        sampling={"temperature": 1.0, "top_p": 1.0},
        created_at=time.time(),
        generation_seconds=0.0,
    )


if __name__ == "__main__":
    main(TbaOpener())
