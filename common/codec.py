"""From message to multipart and back, with every limit and check in between.

Nothing here trusts its input: what is malformed, too large or of another version raises a WireError
whose sentence goes back to the sender.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tba.common.errors import Oversize, VersionMismatch, WireError
from tba.common.quantity import quantity
from tba.common.trajectory import ARRAY_KINDS, check_frames, check_tokens
from tba.common.wire import (
    FILE_REPLIES,
    FILE_REQUESTS,
    PROTOCOL_VERSION,
    REPLIES,
    REQUESTS,
    Id,
    Message,
    Name,
    PutTrajectories,
    Role,
    RunState,
)

MAX_HEADER_BYTES = 16 << 20
MAX_FRAME_BYTES = 256 << 20
_COUNT_COLUMNS = {f"{kind.name}_count" for kind in ARRAY_KINDS}


class _Envelope(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    v: int
    type: str
    id: Id
    run: Annotated[str, Field(max_length=200)]  # empty before Welcome


class RequestHeader(_Envelope):
    """Frame 0 of a request. `sender` is unique for each start of a process."""

    role: Role
    sender: Name


class ReplyHeader(_Envelope):
    """Frame 0 of a reply."""

    state: RunState


class FileReplyHeader(_Envelope):
    """Frame 0 of a reply of the trainer's file server."""


@dataclass(slots=True)
class Request:
    """A decoded request."""

    header: RequestHeader
    message: Message
    frames: list[memoryview]


@dataclass(slots=True)
class Reply:
    """A decoded reply."""

    header: ReplyHeader
    message: Message
    frames: list[memoryview]


class FileReply(BaseModel):
    """A decoded reply of the trainer's file server."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)
    header: FileReplyHeader
    message: Message
    frames: list[memoryview]


Frames = list[bytes]
Header = TypeVar("Header", bound=_Envelope)


def encode_request(
    message: Message, *, id: int, role: Role, sender: str, run: str, frames: Sequence[bytes] = ()
) -> Frames:
    """The multipart of a request."""
    header = {"role": role, "sender": sender, **_envelope(message, id, run)}
    return [msgpack.packb(header), *frames]


def encode_reply(message: Message, *, id: int, run: str, state: RunState, frames: Sequence[bytes] = ()) -> Frames:
    """The multipart of a reply."""
    header = {"state": state.model_dump(), **_envelope(message, id, run)}
    return [msgpack.packb(header), *frames]


def encode_file_reply(message: Message, *, id: int, run: str, frames: Sequence[bytes] = ()) -> Frames:
    """The multipart of a reply of the trainer's file server."""
    return [msgpack.packb(_envelope(message, id, run)), *frames]


def decode_file_request(frames: Sequence[memoryview]) -> Request:
    """Validate a request to the trainer's file server. Raises WireError, VersionMismatch or Oversize."""
    header, message = _decode(frames, RequestHeader, FILE_REQUESTS)
    return Request(header, message, list(frames[1:]))


def decode_file_reply(frames: Sequence[memoryview]) -> FileReply:
    """Validate a reply of the trainer's file server. Raises WireError, VersionMismatch or Oversize."""
    header, message = _decode(frames, FileReplyHeader, FILE_REPLIES)
    return FileReply.model_construct(header=header, message=message, frames=list(frames[1:]))


def decode_request(frames: Sequence[memoryview]) -> Request:
    """Validate a request. Raises WireError, VersionMismatch or Oversize."""
    header, message = _decode(frames, RequestHeader, REQUESTS)
    return Request(header, message, list(frames[1:]))


def decode_reply(frames: Sequence[memoryview]) -> Reply:
    """Validate a reply. Raises WireError, VersionMismatch or Oversize."""
    header, message = _decode(frames, ReplyHeader, REPLIES)
    return Reply(header, message, list(frames[1:]))


def request_id_of(frames: Sequence[memoryview]) -> int:
    """The id of a request that may be malformed, so that its sender can be told; 0 if there is none."""
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
) -> tuple[Header, Message]:
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
    _check_arrays(message, frames[1:])
    return header, message


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
        fields = msgpack.unpackb(
            frame,
            ext_hook=_no_extension_types,
            max_array_len=1 << 20,
            max_map_len=1 << 12,
        )
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"the header is not msgpack: {error}"[:300]) from error
    if not isinstance(fields, dict):
        raise WireError("the header is not a map")
    return fields


def _no_extension_types(code: int, _: bytes) -> Any:
    raise ValueError(f"extension type {code}")


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "message"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"field {where}: {first['msg']}{more}"[:1000]
