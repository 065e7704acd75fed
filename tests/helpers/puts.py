"""Small trajectories, puts of them, and clients that are ready to send puts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tba.common.wire import fields, messages
from tba.common.wire.client import BufferClient
from tba.common.wire.keys import ClientKeys
from tba.common.wire.trajectory import LOG_RATIO_DTYPE, RowNumbers, Trajectory, pack
from tba.tests.helpers.checks import PATIENCE_SECONDS


def make_trajectory(prompt_key: str = "p0", lease: int = 1, version: int = 0, **changes: Any) -> Trajectory:
    """Return a small valid trajectory; `tokens` sets the response."""
    tokens = np.asarray(changes.pop("tokens", [5, 6, 7]), np.int32)
    fields = {
        "prompt_key": prompt_key,
        "lease": lease,
        "prompt_ids": np.array([1, 2], np.int32),
        "response_ids": tokens,
        "logprobs": np.full(len(tokens), -0.5, np.float32),
        "version_runs": np.array([[version, len(tokens)]], np.int32),
        "reward": 1.0,
        "reward_parts": {"correct": 1.0},
        "stop_reason": "eos",
        "sampling": {"temperature": 1.0, "top_p": 1.0},
        "created_at": 1000.0,
        "generation_seconds": 0.1,
        "error_kind": "reward" if changes.get("error") is not None else None,
    }
    return Trajectory(**{**fields, **changes})


def make_episode(prompt_key: str = "p0", lease: int = 1, version: int = 0, **changes: Any) -> Trajectory:
    """Return an episode of four turns in three sequences: a new context begins after the second and third turn."""
    mask = np.array([1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 0, 1], np.uint8)
    turns = [
        {"start": start, "tokens": tokens, "seconds": 0.5, "reward": reward, "parts": {}, "messages": [["user", "on"]]}
        for start, tokens, reward in ((0, 2, 0.25), (3, 1, -0.5), (7, 2, 0.0), (11, 1, 1.0))
    ]
    fields = {
        "tokens": [5, 6, 9, 7, 1, 2, 9, 8, 3, 1, 6, 4],
        "logprobs": np.where(mask, -0.5, 0.0).astype(np.float32),
        "loss_mask": mask,
        "segments": np.array([4, 9], np.int32),
        "turns": turns,
        "stop_reason": "completed",
        "reward": 0.75,
    }
    return make_trajectory(prompt_key, lease, version, **{**fields, **changes})


def numbers_of(rows: int, **changes: Any) -> RowNumbers:
    """Return different numbers of the rows of a batch. The first row has none, and was skipped."""
    columns = {
        "logprob": [None, *(-1.5 - n for n in range(1, rows))],
        "log_ratio": [None, *(n / 8 for n in range(1, rows))],
        "advantage": [None, *(n / 4 - 1 for n in range(1, rows))],
        "weight": [None, *(1 / n for n in range(1, rows))],
        "mismatch": [None, *(0.01 * n for n in range(1, rows))],
        "skipped": [n == 0 for n in range(rows)],
    }
    return RowNumbers(**{**columns, **changes})


def log_ratios(*rows: Sequence[float] | None) -> list[bytes | None]:
    """Return the log-ratios of the tokens of rows as a report has them."""
    return [None if row is None else np.array(row, LOG_RATIO_DTYPE).tobytes() for row in rows]


def read_log_ratios(blobs: Sequence[bytes | None] | None) -> list[list[float] | None]:
    """Return the log-ratios of the tokens of rows from the bytes of a report."""
    return [None if blob is None else np.frombuffer(blob, LOG_RATIO_DTYPE).tolist() for blob in blobs or []]


def put_message(
    rows: Sequence[Trajectory], first: int = 0, *, closes: bool = True
) -> tuple[messages.PutTrajectories, list[bytes]]:
    """Return a put and its frames; `first` is the sequence number of the first row."""
    columns, frames = pack(rows)
    return messages.PutTrajectories(first_sequence=first, rows=messages.Rows(**columns), closes=closes), frames


@contextmanager
def connected(
    address: str, role: fields.Role = "monitor", name: str = "test", keys: ClientKeys | None = None
) -> Iterator[BufferClient]:
    """Open a client, and close it at the end of the block."""
    client = BufferClient(address, role=role, name=name, keys=keys)
    try:
        yield client
    finally:
        client.close()


def status_of(address: str) -> messages.Status:
    """Return the status of a buffer, once it answers."""
    with connected(address) as client:
        return client.call(messages.GetStatus(), messages.Status, deadline_seconds=PATIENCE_SECONDS)[0]


def reference(version: int, step: int) -> messages.WeightsRef:
    """Return the reference of a snapshot."""
    return messages.WeightsRef(version=version, step=step, path=f"/v{version}", manifest_sha256="0" * 64)


def prepare(client: BufferClient, prompts: int = 1, versions: int = 1) -> None:
    """Register prompts p0, p1, ... and announce versions 0, 1, ..., so that puts are accepted."""
    keys = [f"p{n}" for n in range(prompts)]
    register = messages.RegisterPrompts(task="t", fingerprint="0" * 64, total=prompts, offset=0, keys=keys)
    client.call(messages.Hello(host="h", pid=1), messages.Welcome, deadline_seconds=PATIENCE_SECONDS)
    client.call(register, messages.Registered, deadline_seconds=PATIENCE_SECONDS)
    with connected(client.address, "publisher", keys=client.keys) as publisher:
        for version in range(versions):
            announced = messages.AnnounceSnapshot(weights=reference(version, version), bytes=1)
            publisher.call(announced, messages.Done, deadline_seconds=PATIENCE_SECONDS)
