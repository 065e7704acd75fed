"""Messages that were made to hurt a buffer: each is refused in milliseconds, or stored as any other."""

from collections.abc import Iterator
from typing import Any

import msgpack

from tba.common.wire.codec import encode_request
from tba.common.wire.messages import PROTOCOL_VERSION
from tba.tests.helpers.puts import make_trajectory, put_message

Frames = list[bytes]
MIB = 1 << 20
_MARK = "put the bytes here"
_COLUMNS = [
    *("prompt_key", "lease", "reward", "reward_parts", "stop_reason", "sampling", "created_at", "generation_seconds"),
    *("text", "error", "metadata", "prompt_ids_count", "version_runs_count"),
]


def array(count: int, element: bytes) -> bytes:
    """Return a msgpack array of equal elements."""
    return b"\xdd" + count.to_bytes(4, "big") + element * count


def empty_maps(size: int) -> bytes:
    """Return nested arrays with this many empty maps, of one byte each."""
    return array(size // MIB, array(MIB, b"\x80"))


def header(type_: str, body: Any, **changes: Any) -> dict[str, Any]:
    """Return a request header of a searcher."""
    shared = {"role": "searcher", "sender": "hostile.1", "v": PROTOCOL_VERSION, "type": type_, "id": 7, "run": ""}
    return {**shared, "body": body, **changes}


def put_with(raw: bytes | None = None, columns: dict[str, Any] | None = None, rows: int = 1, **more: Any) -> Frames:
    """Return a put with these columns; `raw` takes the place of the mark in them."""
    message, arrays = put_message([make_trajectory()] * rows)
    sent = encode_request(message, id=7, role="searcher", sender="hostile.1", run="", frames=arrays)
    fields = msgpack.unpackb(sent[0])
    fields["body"]["rows"] |= (columns or {}) | more
    return [with_raw(fields, raw), *arrays]


def with_raw(fields: dict[str, Any], raw: bytes | None) -> bytes:
    """Return a packed map, with raw bytes in place of the mark."""
    packed: bytes = msgpack.packb(fields)
    return packed if raw is None else packed.replace(msgpack.packb(_MARK), raw)


def cases() -> Iterator[tuple[str, Frames]]:
    """Yield (name, multipart) of every case."""
    for name in _COLUMNS:
        yield f"a million nils as {name}", put_with(array(MIB, b"\xc0"), {name: _MARK})
        yield f"65536 empty maps as {name}", put_with(array(1 << 16, b"\x80"), {name: _MARK})
    yield "every column a million nils", put_with(array(MIB, b"\xc0"), dict.fromkeys(_COLUMNS, _MARK))
    yield "15 MiB of empty maps as the header", [empty_maps(15 * MIB)]
    yield (
        "15 MiB of empty maps in the header",
        [with_raw(header("get_status", {}, surprise=_MARK), empty_maps(15 * MIB))],
    )
    yield "15 MiB of empty maps as the body", [with_raw(header("get_status", _MARK), empty_maps(15 * MIB))]
    yield "15 MiB of empty maps as the id", [with_raw(header("get_status", {}, id=_MARK), empty_maps(15 * MIB))]
    yield "15 MiB of empty maps as the version", [with_raw(header("get_status", {}, v=_MARK), empty_maps(15 * MIB))]
    yield "15 MiB of nesting", [b"\x91" * (15 * MIB)]
    yield "nesting in the body", [with_raw(header("get_status", _MARK), b"\x91" * (15 * MIB))]
    yield "15 MiB of empty maps as metadata", put_with(b"\x81\xa1a" + empty_maps(15 * MIB), metadata=[_MARK])
    filled = b"\x81\xa1a" + array((128 << 10) - 8, b"\xc0")
    yield "metadata just below the limit in 100 rows", put_with(filled, rows=100, metadata=[_MARK] * 100)
    yield "nested metadata", put_with(b"\x81\xa1a" + b"\x91" * 100_000 + b"\xc0", metadata=[_MARK])
    parts = {f"part {n}": 0.5 for n in range(65)}
    yield "too many reward parts", put_with(reward_parts=[parts])
    yield "9 MiB of reward parts", put_with(reward_parts=[{f"{n:0100}": 0.5 for n in range(80_000)}])
    yield "a long name of a reward part", put_with(reward_parts=[{"x" * MIB: 0.5}])
    yield "a long prompt key", put_with(prompt_key=["x" * MIB])
    yield "a long error", put_with(error=["x" * MIB])
    yield "4096 rows with 64 reward parts", put_with(rows=4096, reward_parts=[dict(list(parts.items())[:64])] * 4096)
    yield "15 MiB of text with one wide character", put_with(text=["x" * (15 * MIB) + "\U0001f600"])
    yield "more rows than a put may have", put_with(rows=4097)
    beat: dict[str, Any] = {"activity": "x", "reason": "", "weights_version": None, "metrics": {}, "serves": ""}
    yield (
        "8 MiB of metrics",
        [with_raw(header("heartbeat", beat | {"metrics": {str(n): 1.0 for n in range(500_000)}}), None)],
    )
    yield "a long reason", [with_raw(header("heartbeat", beat | {"reason": "x" * (8 * MIB)}), None)]
    yield "a long activity", [with_raw(header("heartbeat", beat | {"activity": "x" * MIB}), None)]
    yield "a long name of a metric", [with_raw(header("heartbeat", beat | {"metrics": {"x" * MIB: 1.0}}), None)]
    yield "a name with markup", [with_raw(header("heartbeat", beat, sender="x[/].1"), None)]
    yield "a name with escapes", [with_raw(header("heartbeat", beat, sender="\x1b[2J\x1b]0;x\x07.1"), None)]
    yield "a long sender", [with_raw(header("heartbeat", beat, sender="x" * MIB), None)]
    yield "a long type", [with_raw(header("x" * MIB, {}), None)]
    yield "a long run", [with_raw(header("get_status", {}, run="x" * MIB), None)]
    lease = {"want": 1, "held": list(range(5000)), "weights_version": 0, "wait_seconds": 0.0}
    yield "many held leases", [with_raw(header("lease_prompts", lease), None)]
    yield "many wanted leases", [with_raw(header("lease_prompts", lease | {"held": [], "want": 1 << 16}), None)]
    yield "a long frame", [*put_with()[:2], bytes(33 * MIB), *put_with()[3:]]
    yield "many frames", [b""] * 10_000
    yield "a declared length of 2^32", [with_raw(header("get_status", _MARK), b"\xdd\xff\xff\xff\xff")]
    yield "no frame but an empty one", [b""]
