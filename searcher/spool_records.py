"""The records of a spool as bytes: each can be told from damage, and found again behind it.

record   magic, frames, request id, bytes, checksum | length of each frame | the frames of the request
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

_MAGIC = b"tbaP"
_HEAD = struct.Struct("<4sIQQ")  # magic, number of frames, request id, bytes after the checksum
_CHECKSUM = struct.Struct("<Q")  # xxh3 of the head and all that follows
_START = _HEAD.size + _CHECKSUM.size
_MOST_FRAMES = 16


@dataclass(frozen=True, slots=True)
class Record:
    """A request as it went, or will go, to the buffer: `frames` are its whole multipart."""

    id: int
    frames: list[bytes]


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a segment that are no record. `torn`: the beginning of one whose end was never written."""

    start: int
    stop: int
    torn: bool


def encode(record: Record) -> list[bytes]:
    """The parts of a record, in order; the frames are not copied."""
    lengths = struct.pack(f"<{len(record.frames)}Q", *map(len, record.frames))
    size = len(lengths) + sum(map(len, record.frames))
    head = _HEAD.pack(_MAGIC, len(record.frames), record.id, size)
    return [head, _CHECKSUM.pack(_checksum(head, lengths, *record.frames)), lengths, *record.frames]


def scan(segment: bytes) -> Iterator[Record | Damage]:
    """The records of a segment in order, and what is between them. After damage, the next sound record is found."""
    at = 0
    while at < len(segment):
        if (found := _record_at(segment, at)) is not None:
            record, at = found
            yield record
            continue
        following = _next_record(segment, at + 1)
        torn = following == len(segment) and _is_cut_short(segment[at:])
        yield Damage(at, following, torn)
        at = following


def _record_at(segment: bytes, at: int) -> tuple[Record, int] | None:
    """The record that starts here and where it ends; None if there is no sound one."""
    if len(segment) - at < _START:
        return None
    head = segment[at : at + _HEAD.size]
    magic, frames, id_, size = _HEAD.unpack(head)
    start = at + _START
    stop = start + size
    if magic != _MAGIC or frames > _MOST_FRAMES or stop > len(segment) or 8 * frames > size:
        return None
    (checksum,) = _CHECKSUM.unpack_from(segment, at + _HEAD.size)
    if _checksum(head, memoryview(segment)[start:stop]) != checksum:
        return None
    lengths = struct.unpack_from(f"<{frames}Q", segment, start)
    return Record(id_, list(_cut(segment, start + 8 * frames, lengths))), stop


def _cut(segment: bytes, at: int, lengths: Sequence[int]) -> Iterator[bytes]:
    for length in lengths:
        yield segment[at : at + length]
        at += length


def _next_record(segment: bytes, at: int) -> int:
    """Where the next sound record starts; the end of the segment if there is none."""
    while (at := segment.find(_MAGIC, at)) >= 0:
        if _record_at(segment, at) is not None:
            return at
        at += 1
    return len(segment)


def _is_cut_short(tail: bytes) -> bool:
    if len(tail) < _START:
        return tail[: len(_MAGIC)] == _MAGIC[: len(tail)]
    magic, frames, _, size = _HEAD.unpack_from(tail)
    return bool(magic == _MAGIC and frames <= _MOST_FRAMES and _START + size > len(tail))


def _checksum(*parts: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest()
