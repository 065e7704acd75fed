"""Encode messages as multiparts and decode them, with every limit and check.

Input is not trusted: a multipart that is malformed, too large or of another version raises a WireError, whose
sentence is sent back. Headers are decoded straight into the types of their fields, up to the first error: nothing that
a type does not allow is ever built in memory (docs/decisions/0032-messages-are-decoded-by-type.md).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from tba.common.errors import Oversize, VersionMismatch, WireError, quantity
from tba.common.wire import messages
from tba.common.wire.fields import Id, Name, Role
from tba.common.wire.messages import PROTOCOL_VERSION, Chunk, FetchChunk, Message, PutTrajectories, RunState
from tba.common.wire.trajectory import ARRAY_KINDS, all_frames, check_errors, check_frames, check_tokens, check_turns

# Of a request.
MAX_HEADER_BYTES = 16 << 20
MAX_REQUEST_FRAME_BYTES = 32 << 20
# Of a reply: batches are larger than puts, and their receiver trusts the buffer.
MAX_REPLY_HEADER_BYTES = 64 << 20
MAX_FRAME_BYTES = 256 << 20


def _by_type(*classes: type[Message]) -> dict[str, type[Message]]:
    return {cls.TYPE: cls for cls in classes}


REQUESTS = _by_type(*messages.Request.__subclasses__())
REPLIES = _by_type(*messages.Reply.__subclasses__())
FILE_REQUESTS, FILE_REPLIES = _by_type(FetchChunk), _by_type(Chunk, messages.Failure)
_COUNT_COLUMNS = {f"{kind.name}_count" for kind in ARRAY_KINDS}


class Envelope(Struct, frozen=True, forbid_unknown_fields=True):
    """Frame 0, as far as requests and replies share it. A plain reply has nothing else."""

    v: int
    type: Annotated[str, Meta(max_length=60)]
    id: Id
    # Empty before Welcome.
    run: Annotated[str, Meta(max_length=200)]


class RequestHeader(Envelope, frozen=True):
    """Frame 0 of a request. `sender` is the wire identity of a client, unique for each start of a process."""

    role: Role
    sender: Name


class ReplyHeader(Envelope, frozen=True):
    state: RunState


class _LooseEnvelope(Struct):
    """What is read of a header that is malformed or of another version. Everything else is skipped, not decoded."""

    v: Raw = Raw(b"\xc0")
    id: Raw = Raw(b"\xc0")


Frames = list[bytes]
Header = TypeVar("Header", bound=Envelope)
# What msgspec raises for bytes that it cannot decode. UnicodeDecodeError is a ValueError, too.
_UNREADABLE = (msgspec.DecodeError, ValueError, TypeError, RecursionError)


@dataclass(slots=True)
class Decoded(Generic[Header]):
    header: Header
    message: Message
    frames: list[memoryview]


Request = Decoded[RequestHeader]
Reply = Decoded[ReplyHeader]
PlainReply = Decoded[Envelope]


def encode_request(
    message: Message, *, id: int, role: Role, sender: str, run: str, frames: Sequence[bytes] = ()
) -> Frames:
    header = {"role": role, "sender": sender, **_envelope(message, id, run)}
    return [_encode(header), *frames]


def encode_reply(message: Message, *, id: int, run: str, state: RunState, frames: Sequence[bytes] = ()) -> Frames:
    """Return the multipart of a reply, or that of a Failure if no receiver would accept the reply for its size."""
    header = _encode({"state": state, **_envelope(message, id, run)})
    if len(header) <= MAX_REPLY_HEADER_BYTES and all(len(frame) <= MAX_FRAME_BYTES for frame in frames):
        return [header, *frames]
    size = max([len(header), *map(len, frames)])
    failure = messages.Failure(code=Oversize.code, message=f"the reply {message.TYPE} has a frame of {size} bytes")
    return [_encode({"state": state, **_envelope(failure, id, run)})]


def encode_plain_reply(message: Message, *, id: int, run: str, frames: Sequence[bytes] = ()) -> Frames:
    """Return the multipart of a plain reply, one without run state, as that of a snapshot server."""
    return [_encode(_envelope(message, id, run)), *frames]


def decode_plain_reply(frames: Sequence[memoryview], types: dict[str, type[Message]] = FILE_REPLIES) -> PlainReply:
    """Validate a plain reply of one of these types. Raises WireError, VersionMismatch or Oversize."""
    _check_sizes(frames, MAX_HEADER_BYTES, MAX_FRAME_BYTES)
    return _decode(frames, Envelope, types)


def decode_request(frames: Sequence[memoryview], types: dict[str, type[Message]] = REQUESTS) -> Request:
    """Validate a request of one of these types. Raises WireError, VersionMismatch or Oversize."""
    _check_sizes(frames, MAX_HEADER_BYTES, MAX_REQUEST_FRAME_BYTES)
    return _decode(frames, RequestHeader, types)


def decode_reply(frames: Sequence[memoryview]) -> Reply:
    """Validate a reply. Raises WireError, VersionMismatch or Oversize."""
    _check_sizes(frames, MAX_REPLY_HEADER_BYTES, MAX_FRAME_BYTES)
    return _decode(frames, ReplyHeader, REPLIES)


def request_id_of(frames: Sequence[memoryview], header_bytes: int = MAX_HEADER_BYTES) -> int:
    """Return the id of a request or a reply that may be malformed; 0 if it has none, or a longer header than this."""
    if not frames or frames[0].nbytes > header_bytes:
        return 0
    try:
        id_ = _integer(_glance(frames[0]).id)
    except WireError:
        return 0
    return id_ if id_ is not None and 0 <= id_ < 1 << 63 else 0


def _envelope(message: Message, id_: int, run: str) -> dict[str, Any]:
    return {"v": PROTOCOL_VERSION, "type": message.TYPE, "id": id_, "run": run, "body": message}


def _decode(
    frames: Sequence[memoryview], header_type: type[Header], types: dict[str, type[Message]]
) -> Decoded[Header]:
    try:
        fields = _decoder(_with_body(header_type)).decode(frames[0])
    except _UNREADABLE as error:
        # Another version may have other fields: that is the cause to name.
        _check_version(_integer(_glance(frames[0]).v))
        raise WireError(_sentence(error)) from error
    _check_version(fields.v)
    message_type = types.get(fields.type)
    if message_type is None:
        raise WireError(f"unknown message type {fields.type!r}")
    try:
        message = _decoder(message_type).decode(fields.body)
    except _UNREADABLE as error:
        raise WireError(_sentence(error, "body")) from error
    # Without the body, which refers to the whole frame: a request may be kept for a minute.
    header = header_type(**{name: getattr(fields, name) for name in header_type.__struct_fields__})
    arrays = all_frames(frames[1:]) if message_type.ARRAYS else list(frames[1:])
    _check_arrays(message, arrays)
    return Decoded(header, message, arrays)


def _check_version(version: int | None) -> None:
    if version is None:
        raise WireError("the header has no protocol version")
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"protocol version {version} where this side speaks {PROTOCOL_VERSION}: run the same tba release everywhere"
        )


def _check_sizes(frames: Sequence[memoryview], header_bytes: int, frame_bytes: int) -> None:
    if not frames:
        raise WireError("empty message")
    if frames[0].nbytes > header_bytes:
        raise Oversize(f"header of {frames[0].nbytes} bytes, the limit is {header_bytes}")
    if len(frames) > 1 + len(ARRAY_KINDS):
        raise WireError(f"{len(frames)} frames, at most {1 + len(ARRAY_KINDS)} are meaningful")
    for frame in frames[1:]:
        if frame.nbytes > frame_bytes:
            raise Oversize(f"array frame of {frame.nbytes} bytes, the limit is {frame_bytes}")


def _check_arrays(message: Message, frames: Sequence[memoryview]) -> None:
    if message.RAW:
        if len(frames) != 1:
            raise WireError(f"{message.TYPE} carries one frame of bytes, {len(frames)} came with it")
        return
    if not message.ARRAYS:
        if frames:
            raise WireError(f"{message.TYPE} carries no arrays, {quantity(len(frames), 'frame')} came with it")
        return
    columns = message.rows if isinstance(message, PutTrajectories) else message
    counts = {name: getattr(columns, name) for name in _COUNT_COLUMNS}
    check_frames(counts, frames)
    if isinstance(message, PutTrajectories):
        rows = message.rows
        check_tokens(counts, frames, rows.error)
        check_errors(rows.error, rows.error_kind, rows.stop_reason)
        if rows.turns is not None:
            check_turns(rows.turns, rows.response_ids_count)


@functools.cache
def _with_body(header_type: Any) -> Any:
    """Return the type of a whole header, with the body undecoded: `type` says what it is."""
    name = f"{header_type.__name__}AndBody"
    return msgspec.defstruct(name, [("body", Raw)], bases=(header_type,), frozen=True, forbid_unknown_fields=True)


@functools.cache
def _decoder(type_: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(type_)


def _plain(value: Any) -> Any:
    """Return the Python number of a NumPy scalar, which a reward or a metric may be."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be sent")


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode


def _glance(frame: memoryview) -> _LooseEnvelope:
    try:
        glance: _LooseEnvelope = _decoder(_LooseEnvelope).decode(frame)
    except _UNREADABLE as error:
        raise WireError(_sentence(error)) from error
    return glance


def _integer(value: Raw) -> int | None:
    try:
        integer: int = _decoder(int).decode(value)
    except _UNREADABLE:
        return None
    return integer


def _sentence(error: Exception, root: str = "header") -> str:
    """Return msgspec's reason with the field first: `field rows.reward[0]: Expected `float`, got `null``."""
    if not isinstance(error, msgspec.ValidationError):
        return f"the header is not msgpack: {error}"[:300]
    reason, _, path = str(error).partition(" - at ")
    field = path.removeprefix("`key` in ").strip("`").removeprefix("$").removeprefix(".")
    return (f"field {field}: {reason}" if field else f"{root}: {reason}")[:1000]
