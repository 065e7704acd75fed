"""Convert a put to database columns as far as that needs no state of the run. Runs in the network thread.

No array is decoded or copied: a payload is views into the received frames. The rest of the message is dropped
here, so that the thread that made its thousands of small objects also frees them, instead of the writer.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import numpy as np
import xxhash

from tba.common.errors import Oversize, WireError
from tba.common.wire.codec import Request
from tba.common.wire.fields import NO_POLICY
from tba.common.wire.messages import Message, PutTrajectories, Sampling
from tba.common.wire.trajectory import (
    ARRAY_KINDS,
    PROMPT_IDS,
    RESPONSE_IDS,
    ROW_FIELDS,
    VERSION_RUNS,
    array_counts,
    slices,
)

_UNIT_BYTES = [kind.unit_bytes for kind in ARRAY_KINDS]
# The number after the last sequence number must fit an SQLite integer, too.
_SEQUENCES = (1 << 63) - 1
# The metadata of a row on the wire, and of all rows of a put as JSON, which may be several times as long.
MAX_METADATA_BYTES = 128 << 10
_MAX_JSON_CHARACTERS = 1 << 20
# Far below what Python's JSON reads and writes, which depends on the depth of the calls before it.
_MAX_DEPTH = 100
_EMPTY_MAP = msgspec.Raw(b"\x80")
_decode_metadata = msgspec.msgpack.Decoder(dict[str, Any]).decode


@dataclass(frozen=True, slots=True)
class PutColumns:
    """The rows of one put: one list per field, all of the same length.

    Row i has sequence number `first_sequence + i`. `versions` are the policy versions of a row's tokens. `columns` are
    those of the table that need no state of the run: ROW_FIELDS, with maps and lists as JSON text, `prompt_tokens`,
    `response_tokens`, `dedup_hash` and `payload_bytes`; and `guided_and_phase` of the sampling. `counts_from` is None
    for rows of the run's policies; for others, by their metadata, the version that their staleness counts from,
    NO_POLICY for step 0. `payload` has one column per array kind. `closes`: the visits are answered with these rows.
    """

    first_sequence: int
    prompt_key: list[str]
    visit: list[int]
    versions: list[tuple[int, ...]]
    columns: dict[str, Sequence[Any]]
    counts_from: list[int | None]
    payload: list[list[memoryview]]
    closes: bool

    def __len__(self) -> int:
        return len(self.prompt_key)


def to_columns(request: Request) -> Message | PutColumns:
    """Return the columns of a put, any other message unchanged. Raises WireError for what no database can hold."""
    message, frames = request.message, request.frames
    if not isinstance(message, PutTrajectories):
        return message
    rows = message.rows
    if message.first_sequence + len(rows.prompt_key) > _SEQUENCES:
        raise WireError(f"the sequence numbers of the put go beyond {_SEQUENCES - 1}")
    all_counts = array_counts(msgspec.structs.asdict(rows))
    each = zip(_UNIT_BYTES, all_counts, frames, strict=True)
    sizes = [[count * unit for count in own] if frame.nbytes else own for unit, own, frame in each]
    payload = [slices(column, frame) for column, frame in zip(sizes, frames, strict=True)]
    columns: dict[str, Sequence[Any]] = {name: getattr(rows, name) for name in ROW_FIELDS}
    columns["reward_parts"] = list(map(_json, rows.reward_parts))
    columns["sampling"], columns["guided_and_phase"] = zip(*map(_settings, rows.sampling), strict=True)
    columns["metadata"], counts_from = _metadata(rows.metadata)
    columns["turns"] = ["[]"] * len(rows.prompt_key) if rows.turns is None else list(map(_json, rows.turns))
    columns["error_kind"] = rows.error_kind or [None] * len(rows.prompt_key)
    columns["prompt_tokens"], columns["response_tokens"] = rows.prompt_ids_count, rows.response_ids_count
    columns["dedup_hash"] = _hashes(payload[PROMPT_IDS], payload[RESPONSE_IDS])
    columns["payload_bytes"] = list(map(sum, zip(*sizes, strict=True)))
    return PutColumns(
        first_sequence=message.first_sequence,
        prompt_key=rows.prompt_key,
        visit=rows.lease,
        versions=_versions(rows.version_runs_count, frames[VERSION_RUNS]),
        columns=columns,
        counts_from=counts_from,
        payload=payload,
        closes=message.closes,
    )


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _versions(counts: Sequence[int], frame: memoryview) -> list[tuple[int, ...]]:
    versions = np.frombuffer(frame, "<i4")[::2].tolist()
    return [tuple(versions[start:stop]) for start, stop in pairwise(accumulate(counts, initial=0))]


def _hashes(prompts: Sequence[memoryview], responses: Sequence[memoryview]) -> list[int]:
    """Return 64-bit hashes of prompt and response, signed as in SQLite. An episode's first context may differ."""
    digests = map(xxhash.xxh3_64_digest, responses, map(xxhash.xxh3_64_intdigest, prompts))
    hashes: list[int] = np.frombuffer(b"".join(digests), "<i8").tolist()
    return hashes


# A run has few different settings, and with guided responses as many as demonstrations have tokens.
@functools.lru_cache(1 << 16)
def _settings(sampling: Sampling) -> tuple[str, tuple[int | None, int | None]]:
    return _json(sampling), (sampling.guided, sampling.phase)


def _depth(value: Any) -> int:
    """Return how many maps and lists are inside each other. Raises RecursionError."""
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)


def _metadata(rows: Sequence[msgspec.Raw]) -> tuple[list[str], list[int | None]]:
    """Return the metadata of each row as JSON, and `counts_from` as in PutColumns. Raises WireError.

    Each row is decoded by itself: msgpack may be a hundred times as large as Python objects.
    """
    # The usual case: empty maps.
    if rows.count(_EMPTY_MAP) == len(rows):
        return ["{}"] * len(rows), [None] * len(rows)
    texts: list[str] = []
    counts_from: list[int | None] = []
    characters = 0
    for row, packed in enumerate(rows):
        size = memoryview(packed).nbytes
        if size > MAX_METADATA_BYTES:
            raise Oversize(f"metadata of row {row} has {size} bytes, the limit is {MAX_METADATA_BYTES}")
        try:
            metadata = _decode_metadata(packed)
            if _depth(metadata) > _MAX_DEPTH:
                raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
            texts.append(json.dumps(metadata, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise WireError(f"metadata of row {row} cannot be written as JSON: {error}"[:300]) from error
        counts_from.append(_counts_from(metadata))
        characters += len(texts[-1])
        if characters > _MAX_JSON_CHARACTERS:
            raise Oversize(f"the metadata of rows 0 to {row} have more than {_MAX_JSON_CHARACTERS} characters as JSON")
    return texts, counts_from


def _counts_from(metadata: dict[str, Any]) -> int | None:
    """Return what the staleness of a row counts from: as `Trajectories.blocks` reads it from the database."""
    if "imported_version" in metadata:
        return NO_POLICY
    newest = metadata.get("newest_version", NO_POLICY)
    return (newest if type(newest) is int else NO_POLICY) if isinstance(metadata.get("policy"), str) else None
