"""From a message's columns to a row of the database, before anything is written."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from tba.common.errors import Refused


@dataclass(frozen=True, slots=True)
class NewRow:
    """A trajectory as the store takes it, and what the sampling index needs of it."""

    columns: tuple[Any, ...]
    payload: tuple[memoryview, ...]
    prompt: int
    version: int
    reward: float
    dedup_hash: int
    failed: bool


def make_row(
    fields: dict[str, Any],
    payload: tuple[memoryview, ...],
    *,
    run: int,
    prompt: int,
    sender: int,
    sequence: int,
    version: int,
    received_at: float,
) -> NewRow:
    """One trajectory of a put; `payload` is its array frames, sliced. Raises Refused for what JSON cannot hold."""
    prompt_ids, response_ids = payload[0], payload[1]
    dedup_hash = _hash(response_ids)
    columns = (
        run,
        prompt,
        fields["lease"],
        sender,
        sequence,
        version,
        fields["reward"],
        json.dumps(fields["reward_parts"]),
        fields["stop_reason"],
        prompt_ids.nbytes // 4,
        response_ids.nbytes // 4,
        dedup_hash,
        json.dumps(fields["sampling"]),
        fields["created_at"],
        received_at,
        fields["generation_seconds"],
        fields["text"],
        fields["error"],
        _metadata_json(fields["metadata"]),
    )
    return NewRow(columns, payload, prompt, version, fields["reward"], dedup_hash, fields["error"] is not None)


def _hash(response: memoryview) -> int:
    """64 bits of the response tokens, as the signed integer that SQLite stores."""
    return int.from_bytes(hashlib.blake2b(response, digest_size=8).digest(), "little", signed=True)


def _metadata_json(metadata: dict[str, Any]) -> str:
    try:
        return json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Refused("malformed", f"metadata that JSON cannot hold: {error}") from error
