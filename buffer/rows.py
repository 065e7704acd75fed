"""From a put to columns of the database: all that needs no knowledge of the run, done beside the commits.

Nothing is decoded and no array is copied: a payload is five views into the frames as they arrived.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any

import numpy as np
import xxhash
from pydantic_core import to_json

from tba.common.errors import WireError
from tba.common.trajectory import ARRAY_KINDS, slices
from tba.common.wire import PutTrajectories, Rows, Sampling

Payload = tuple[memoryview, ...]
_COUNTS = [(f"{kind.name}_count", kind.unit_bytes) for kind in ARRAY_KINDS]
_SEQUENCES = (1 << 63) - 1  # one after the last must be an integer of SQLite, too


@dataclass(frozen=True, slots=True)
class PutColumns:
    """The rows of one put. Row i has sequence number `first_sequence + i` and policy versions `versions[i]`."""

    first_sequence: int
    rows: Rows
    versions: list[list[int]]  # the versions that its tokens came from
    reward_parts: list[str]
    sampling: list[str]
    metadata: list[str]
    dedup_hash: list[int]
    payload: list[Payload]
    payload_bytes: list[int]

    def __len__(self) -> int:
        return len(self.payload)


def put_columns(message: PutTrajectories, frames: Sequence[memoryview]) -> PutColumns:
    """The columns of a checked put. Raises WireError for what the database cannot hold."""
    rows = message.rows
    if message.first_sequence + len(rows.prompt_key) > _SEQUENCES:
        raise WireError(f"the sequence numbers of the put go beyond {_SEQUENCES - 1}")
    sizes = [[count * size for count in getattr(rows, name)] for name, size in _COUNTS]
    views = [slices(column, frame) for column, frame in zip(sizes, frames, strict=True)]
    return PutColumns(
        first_sequence=message.first_sequence,
        rows=rows,
        versions=_versions(rows.version_runs_count, frames[3]),
        reward_parts=[to_json(parts).decode() for parts in rows.reward_parts],
        sampling=[_sampling_json(settings["temperature"], settings["top_p"]) for settings in rows.sampling],
        metadata=list(map(_metadata_json, rows.metadata)),
        dedup_hash=list(map(_hash, views[1])),
        payload=list(zip(*views, strict=True)),
        payload_bytes=list(map(sum, zip(*sizes, strict=True))),
    )


def _versions(counts: Sequence[int], frame: memoryview) -> list[list[int]]:
    versions = np.frombuffer(frame, "<i4")[::2].tolist()
    if len(versions) == len(counts):  # no response spans a hot reload
        return [[version] for version in versions]
    starts = np.cumsum([0, *counts]).tolist()
    return [versions[start:stop] for start, stop in pairwise(starts)]


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
    ids: Sequence[int]
    prompts: Sequence[int]
    versions: Sequence[int]


def database_rows(put: PutColumns, known: RunColumns) -> list[tuple[Any, ...]]:
    """Rows in the order of `tables.trajectories.TRAJECTORY_COLUMNS`."""
    rows = put.rows
    return list(
        zip(
            known.ids,
            repeat(known.run),
            known.prompts,
            rows.lease,
            repeat(known.sender),
            range(put.first_sequence, put.first_sequence + len(put)),
            known.versions,
            rows.reward,
            put.reward_parts,
            rows.stop_reason,
            rows.prompt_ids_count,
            rows.response_ids_count,
            put.dedup_hash,
            put.sampling,
            rows.created_at,
            repeat(known.received_at),
            rows.generation_seconds,
            rows.text,
            rows.error,
            put.metadata,
            put.payload_bytes,
            strict=False,
        )
    )
