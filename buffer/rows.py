"""From a put to columns of the database: all that needs no knowledge of the run, done beside the commits.

Nothing is decoded and no array is copied: a payload is five views into the frames as they arrived. Nothing else of the
message is kept: thousands of small objects are freed at once here, where they were made, and not by the writer.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import xxhash
from pydantic_core import to_json

from tba.common.codec import Request
from tba.common.errors import WireError
from tba.common.trajectory import ARRAY_KINDS, RESPONSE_IDS, VERSION_RUNS, slices
from tba.common.wire import Message, PutTrajectories, Sampling

_COUNTS = [(f"{kind.name}_count", kind.unit_bytes) for kind in ARRAY_KINDS]
_SEQUENCES = (1 << 63) - 1  # one after the last must be an integer of SQLite, too


@dataclass(frozen=True, slots=True)
class PutColumns:
    """The rows of one put, a column of equally many values for each field but the first.

    `payload` has such a column for each kind of array, `reference_logprob` is None if no row has one.
    """

    first_sequence: int  # of row 0; the others follow
    prompt_key: list[str]
    visit: list[int]
    versions: list[tuple[int, ...]]  # that its tokens came from
    reward: list[float]
    reward_parts: list[str]
    stop_reason: Sequence[str]
    prompt_tokens: list[int]
    response_tokens: list[int]
    dedup_hash: list[int]
    sampling: list[str]
    created_at: list[float]
    generation_seconds: list[float]
    text: list[str | None]
    error: list[str | None]
    metadata: list[str]
    is_foreign: list[bool]  # its metadata say which version of another run made it
    payload_bytes: list[int]
    payload: list[list[memoryview]]
    reference_logprob: list[float | None] | None

    def __len__(self) -> int:
        return len(self.prompt_key)


def service_message(request: Request) -> Message | PutColumns:
    """What the service is given: of a put its columns, else the message as it is. Raises WireError as `put_columns`."""
    if isinstance(request.message, PutTrajectories):
        return put_columns(request.message, request.frames)
    return request.message


def put_columns(message: PutTrajectories, frames: Sequence[memoryview]) -> PutColumns:
    """The columns of a checked put. Raises WireError for what the database cannot hold."""
    rows = message.rows
    if message.first_sequence + len(rows.prompt_key) > _SEQUENCES:
        raise WireError(f"the sequence numbers of the put go beyond {_SEQUENCES - 1}")
    sizes = [[count * size for count in getattr(rows, name)] for name, size in _COUNTS]
    payload = [slices(column, frame) for column, frame in zip(sizes, frames, strict=True)]
    return PutColumns(
        first_sequence=message.first_sequence,
        prompt_key=rows.prompt_key,
        visit=rows.lease,
        versions=_versions(rows.version_runs_count, frames[VERSION_RUNS]),
        reward=rows.reward,
        reward_parts=[to_json(parts).decode() for parts in rows.reward_parts],
        stop_reason=rows.stop_reason,
        prompt_tokens=rows.prompt_ids_count,
        response_tokens=rows.response_ids_count,
        dedup_hash=list(map(_hash, payload[RESPONSE_IDS])),
        sampling=[_sampling_json(settings["temperature"], settings["top_p"]) for settings in rows.sampling],
        created_at=rows.created_at,
        generation_seconds=rows.generation_seconds,
        text=rows.text,
        error=rows.error,
        metadata=list(map(_metadata_json, rows.metadata)),
        is_foreign=["imported_version" in metadata for metadata in rows.metadata],
        payload_bytes=list(map(sum, zip(*sizes, strict=True))),
        payload=payload,
        reference_logprob=rows.reference_logprob,
    )


def _versions(counts: Sequence[int], frame: memoryview) -> list[tuple[int, ...]]:
    versions = np.frombuffer(frame, "<i4")[::2].tolist()
    if len(versions) == len(counts):  # no response spans a hot reload
        return list(zip(versions, strict=True))
    return [tuple(versions[start:stop]) for start, stop in pairwise(accumulate(counts, initial=0))]


def _hash(response: memoryview) -> int:
    """64 bits of the response tokens, as the signed integer that SQLite stores."""
    return int.from_bytes(xxhash.xxh3_64_digest(response), "little", signed=True)


@functools.lru_cache
def _sampling_json(temperature: float, top_p: float) -> str:
    return to_json(Sampling(temperature=temperature, top_p=top_p)).decode()


def _metadata_json(metadata: dict[str, Any]) -> str:
    if not metadata:
        return "{}"
    try:
        return json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(f"metadata that JSON cannot hold: {error}") from error


@dataclass(frozen=True, slots=True)
class RunColumns:
    """What a put gets from the run that it belongs to; one value per row where it is a list."""

    run: int
    sender: int
    received_at: float
    prompts: Sequence[int]
    versions: Sequence[int]


def database_columns(put: PutColumns, known: RunColumns) -> dict[str, Sequence[Any]]:
    """All of `tables.trajectories.TRAJECTORY_COLUMNS` but the id."""
    count = len(put)
    return {
        "run": [known.run] * count,
        "prompt": known.prompts,
        "visit": put.visit,
        "sender": [known.sender] * count,
        "sequence": range(put.first_sequence, put.first_sequence + count),
        "policy_version": known.versions,
        "reward": put.reward,
        "reward_parts": put.reward_parts,
        "stop_reason": put.stop_reason,
        "prompt_tokens": put.prompt_tokens,
        "response_tokens": put.response_tokens,
        "dedup_hash": put.dedup_hash,
        "sampling": put.sampling,
        "created_at": put.created_at,
        "received_at": [known.received_at] * count,
        "generation_seconds": put.generation_seconds,
        "text": put.text,
        "error": put.error,
        "metadata": put.metadata,
        "payload_bytes": put.payload_bytes,
    }
