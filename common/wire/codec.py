"""Encode messages as multiparts and decode them, with every limit and check.

Input is not trusted: a multipart that is malformed, too large or of another version raises a WireError, whose
sentence is sent back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tba.common.errors import Oversize, VersionMismatch, WireError, first_problem
from tba.common.quantity import quantity
from tba.common.wire import messages
from tba.common.wire.file_messages import Chunk, FetchChunk
from tba.common.wire.messages import PROTOCOL_VERSION, Id, Message, Name, PutTrajectories, Role, RunState
from tba.common.wire.query_messages import QueryResult, RunQuery
from tba.common.wire.status_messages import GetStatus, Status
from tba.common.wire.trajectory import ARRAY_KINDS, check_frames, check_tokens

MAX_HEADER_BYTES = 16 << 20
MAX_FRAME_BYTES = 256 << 20


def _by_type(*classes: type[Message]) -> dict[str, type[Message]]:
    return {cls.TYPE: cls for cls in classes}


REQUESTS = _by_type(*messages.Request.__subclasses__(), GetStatus)
REPLIES = _by_type(*messages.Reply.__subclasses__(), Status)
FILE_REQUESTS, FILE_REPLIES = _by_type(FetchChunk), _by_type(Chunk, messages.Failure)
QUERY_REQUESTS, QUERY_REPLIES = _by_type(RunQuery), _by_type(QueryResult, messages.Failure)
_COUNT_COLUMNS = {f"{kind.name}_count" for kind in ARRAY_KINDS}


class Envelope(BaseModel):
    """Frame 0, as far as requests and replies share it. The file server's replies have nothing else."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    v: int
    type: str
    id: Id
    # Empty before Welcome.
    run: Annotated[str, Field(max_length=200)]


class RequestHeader(Envelope):
    """Frame 0 of a request. `sender` is the wire identity of a client, unique for each start of a process."""

    role: Role
    sender: Name


class ReplyHeader(Envelope):
    """Frame 0 of a reply."""

    state: RunState


Frames = list[bytes]
Header = TypeVar("Header", bound=Envelope)


@dataclass(slots=True)
class Decoded(Generic[Header]):
    """A decoded multipart."""

    header: Header
    message: Message
    frames: list[memoryview]


Request = Decoded[RequestHeader]
Reply = Decoded[ReplyHeader]
FileReply = Decoded[Envelope]


def encode_request(
    message: Message, *, id: int, role: Role, sender: str, run: str, frames: Sequence[bytes] = ()
) -> Frames:
    """Return the multipart of a request."""
    header = {"role": role, "sender": sender, **_envelope(message, id, run)}
    return [msgpack.packb(header), *frames]


def encode_reply(message: Message, *, id: int, run: str, state: RunState, frames: Sequence[bytes] = ()) -> Frames:
    """Return the multipart of a reply."""
    header = {"state": state.model_dump(), **_envelope(message, id, run)}
    return [msgpack.packb(header), *frames]


def encode_file_reply(message: Message, *, id: int, run: str, frames: Sequence[bytes] = ()) -> Frames:
    """Return the multipart of a reply without run state: of a snapshot server or a query server."""
    return [msgpack.packb(_envelope(message, id, run)), *frames]


def decode_file_reply(frames: Sequence[memoryview], types: dict[str, type[Message]] = FILE_REPLIES) -> FileReply:
    """Validate a reply without run state, of one of these types. Raises WireError, VersionMismatch or Oversize."""
    return _decode(frames, Envelope, types)


def decode_request(frames: Sequence[memoryview], types: dict[str, type[Message]] = REQUESTS) -> Request:
    """Validate a request of one of these types. Raises WireError, VersionMismatch or Oversize."""
    return _decode(frames, RequestHeader, types)


def decode_reply(frames: Sequence[memoryview]) -> Reply:
    """Validate a reply. Raises WireError, VersionMismatch or Oversize."""
    return _decode(frames, ReplyHeader, REPLIES)


def request_id_of(frames: Sequence[memoryview]) -> int:
    """Return the id of a request that may be malformed, for the error reply; 0 if it has none."""
    if not frames or frames[0].nbytes > MAX_HEADER_BYTES:
        return 0
    try:
        id_ = _unpack(frames[0]).get("id")
    except WireError:
        return 0
    return id_ if type(id_) is int and 0 <= id_ < 1 << 63 else 0


def _envelope(message: Message, id_: int, run: str) -> dict[str, Any]:
    return {"v": PROTOCOL_VERSION, "type": message.TYPE, "id": id_, "run": run, "body": message.model_dump()}


def _decode(
    frames: Sequence[memoryview], header_type: type[Header], types: dict[str, type[Message]]
) -> Decoded[Header]:
    _check_sizes(frames)
    fields = _unpack(frames[0])
    version = fields.get("v")
    if type(version) is not int:
        raise WireError("the header has no protocol version")
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"protocol version {version} where this side speaks {PROTOCOL_VERSION}: run the same tba release everywhere"
        )
    try:
        body = fields.pop("body", None)
        header = header_type.model_validate(fields)
        message_type = types.get(header.type)
        if message_type is None:
            raise WireError(f"unknown message type {header.type!r:.60}")
        if not isinstance(body, dict):
            raise WireError("the header has no body that is a map")
        message = message_type.model_validate(body)
    except ValidationError as error:
        raise WireError(_sentence(error)) from error
    arrays = list(frames[1:])
    _check_arrays(message, arrays)
    return Decoded(header, message, arrays)


def _check_sizes(frames: Sequence[memoryview]) -> None:
    if not frames:
        raise WireError("empty message")
    if frames[0].nbytes > MAX_HEADER_BYTES:
        raise Oversize(f"header of {frames[0].nbytes} bytes, the limit is {MAX_HEADER_BYTES}")
    if len(frames) > 1 + len(ARRAY_KINDS):
        raise WireError(f"{len(frames)} frames, at most {1 + len(ARRAY_KINDS)} are meaningful")
    for frame in frames[1:]:
        if frame.nbytes > MAX_FRAME_BYTES:
            raise Oversize(f"array frame of {frame.nbytes} bytes, the limit is {MAX_FRAME_BYTES}")


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
        check_tokens(counts, frames, failed=[error is not None for error in message.rows.error])


def _unpack(frame: memoryview) -> dict[str, Any]:
    try:
        fields = msgpack.unpackb(frame, ext_hook=_no_extension_types, max_array_len=1 << 20, max_map_len=1 << 12)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"the header is not msgpack: {error}"[:300]) from error
    if not isinstance(fields, dict):
        raise WireError("the header is not a map")
    return fields


def _no_extension_types(code: int, _: bytes) -> Any:
    raise ValueError(f"extension type {code}")


def _sentence(error: ValidationError) -> str:
    field, reason = first_problem(error)
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"field {'.'.join(field) or 'message'}: {reason}{more}"[:1000]
