"""Malformed messages from good ones, by a seeded generator: what a broken, old or hostile peer might send."""

import random
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from tba.common import wire
from tba.common.codec import encode_request
from tba.common.trajectory import pack

from ..conftest import make_trajectory

Frames = list[bytes]
PROMPTS = [f"p{n}" for n in range(6)]
VERSIONS = range(3)
ODD: list[Any] = [
    *(-1, 0, 1, 2**24 + 1, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 2, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(float("nan"), float("inf"), -float("inf"), 1e308, -0.0, 5e-324, 0.5),
    *("", "p0", "\x00", "x" * 300, "é" * 4001, "run", b"", b"\xff\xfe", None, True, False, [], {}, [[]], {"": {}}),
    *(msgpack.ExtType(5, b"x"), msgpack.ExtType(127, b""), msgpack.Timestamp(2**33, 999_999_999)),
    *([0] * 3000, ["p0"] * 70_000, {"a" * n: 0.0 for n in range(50)}),
]
RAW = [
    b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1
    b"\xdf\xff\xff\xff\xff",  # a map of 2^32 - 1
    b"\xdb\xff\xff\xff\xff",  # a string of 2^32 - 1
    b"\xc6\xff\xff\xff\xff",
    b"\xc1",  # never used by msgpack
    b"\xd9\x04\xff\xfe\x80\x81",  # a string that is no UTF-8
    b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
    b"\xc7\x03\xff\x01\x02\x03",  # a timestamp of a length that there is not
    b"\x91" * 200,
    b"\x91" * 5000,
    b"\x81\xa1a" * 600,
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",  # NaN
]


class Mutator:
    """`message()` is one multipart: one in ten is good, the others are broken in one or more ways."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._sequence = 0
        self._ways: list[Callable[[Frames], Frames]] = [
            *([self._odd_value] * 8),
            *([self._flip] * 3),
            *(self._cut, self._insert_raw, self._splice, self._swap_frames, self._frames_of_another),
            *(self._duplicate_key, self._odd_numbers, self._empty_frame, self._garbage),
        ]

    def message(self) -> Frames:
        frames = self.good()
        if self.rng.random() < 0.1:
            return frames
        for _ in range(self.rng.choice((1, 1, 1, 2, 5))):
            frames = self.rng.choice(self._ways)(frames)
        return frames

    def good(self) -> Frames:
        """A valid request of any type, most of them puts."""
        rng = self.rng
        make = rng.choice([self._put] * 6 + list(_PLAIN))
        message, arrays = make() if make == self._put else (make(rng), [])
        role = rng.choice(("searcher", "searcher", "trainer", "publisher", "monitor"))
        return encode_request(message, id=rng.randrange(1000), role=role, sender=self._sender(), run="", frames=arrays)

    def _sender(self) -> str:
        return f"{self.rng.choice('abc')}.{self.rng.randrange(3)}"

    def _put(self) -> tuple[wire.Message, Frames]:
        rng = self.rng
        self._sequence += rng.choice((0, 1, 4, 100))
        columns, frames = pack([self._trajectory() for _ in range(rng.choice((1, 1, 2, 5)))])
        first = rng.choice((self._sequence, self._sequence, 0))
        return wire.PutTrajectories(first_sequence=first, rows=wire.Rows.model_validate(columns)), frames

    def _trajectory(self):
        rng = self.rng
        tokens = [rng.randrange(2**31) for _ in range(rng.choice((1, 3, 3, 20)))]
        runs = [[rng.choice(VERSIONS), 1] for _ in tokens] if rng.random() < 0.3 else None
        changes: dict[str, Any] = {"version_runs": np.array(runs, np.int32)} if runs else {}
        if rng.random() < 0.2:
            changes |= {"error": "reward: no", "stop_reason": "error"}
        if rng.random() < 0.2:
            changes |= {"text": "ä\x00", "metadata": {"deep": {"er": [1, None, "x"]}}}
        return make_trajectory(rng.choice(PROMPTS), lease=rng.randrange(20), tokens=tokens, **changes)

    # ------------------------------------------------------------ ways to break a message

    def _odd_value(self, frames: Frames) -> Frames:
        """Some value anywhere in the header becomes another one."""
        try:
            header = msgpack.unpackb(frames[0])
        except Exception:  # noqa: BLE001  # broken before
            return frames
        parent, key = self._place_in(header)
        if parent is None:
            return frames
        if isinstance(parent, dict) and self.rng.random() < 0.1:
            del parent[key]
        else:
            parent[key] = self.rng.choice(ODD)
        try:
            return [msgpack.packb(header), *frames[1:]]
        except ValueError:  # nested too deep
            return frames

    def _place_in(self, value: Any) -> tuple[Any, Any]:
        """(container, key) of a random value, deep ones as likely as shallow ones."""
        parent, key = None, None
        while isinstance(value, dict | list) and value and (parent is None or self.rng.random() < 0.8):
            parent = value
            key = self.rng.choice(list(value)) if isinstance(value, dict) else self.rng.randrange(len(value))
            value = value[key]
        return parent, key

    def _flip(self, frames: Frames) -> Frames:
        place = self.rng.randrange(len(frames)) if self.rng.random() < 0.4 else 0
        frame = bytearray(frames[place])
        for _ in range(self.rng.choice((1, 1, 3, 10))):
            if frame:
                frame[self.rng.randrange(len(frame))] ^= 1 << self.rng.randrange(8)
        return _with(frames, place, bytes(frame))

    def _cut(self, frames: Frames) -> Frames:
        place = self.rng.randrange(len(frames))
        return _with(frames, place, frames[place][: self.rng.randrange(len(frames[place]) + 1)])

    def _insert_raw(self, frames: Frames) -> Frames:
        at, raw = self.rng.randrange(len(frames[0]) + 1), self.rng.choice(RAW)
        return _with(frames, 0, frames[0][:at] + raw + frames[0][at + self.rng.choice((0, 1, len(raw))) :])

    def _splice(self, frames: Frames) -> Frames:
        other = self.good()[0]
        return _with(frames, 0, frames[0][: self.rng.randrange(len(frames[0]) + 1)] + other[len(other) // 2 :])

    def _swap_frames(self, frames: Frames) -> Frames:
        return self.rng.sample(frames, len(frames))

    def _frames_of_another(self, frames: Frames) -> Frames:
        return [frames[0], *self.good()[1:]]

    def _duplicate_key(self, frames: Frames) -> Frames:
        if not frames[0] or not 0x80 <= frames[0][0] < 0x8F:
            return frames
        key = self.rng.choice(("id", "v", "body", "sender", "type"))
        extra = msgpack.packb(key) + msgpack.packb(self.rng.choice(ODD))
        return _with(frames, 0, bytes([frames[0][0] + 1]) + frames[0][1:] + extra)

    def _odd_numbers(self, frames: Frames) -> Frames:
        """An array frame of the right length with other numbers in it."""
        place = self.rng.randrange(len(frames))
        units = len(frames[place]) // 4
        if not place or not units:
            return frames
        numbers = np.array([self.rng.choice((-1, 0, 1, 2, 2**31 - 1, -(2**31))) for _ in range(units)], "<i4")
        return _with(frames, place, numbers.tobytes())

    def _empty_frame(self, frames: Frames) -> Frames:
        place = self.rng.randrange(len(frames) + 1)
        return [*frames[:place], b"", *frames[place + self.rng.randrange(2) :]]

    def _garbage(self, _: Frames) -> Frames:
        return [self.rng.randbytes(self.rng.randrange(60)) for _ in range(self.rng.randrange(1, 8))]


def _with(frames: Frames, place: int, frame: bytes) -> Frames:
    return [*frames[:place], frame, *frames[place + 1 :]]


def reference(version: int, step: int) -> wire.WeightsRef:
    """A snapshot that was announced."""
    return wire.WeightsRef(version=version, step=step, path=f"/v{version}", manifest_sha256="0" * 64)


_PLAIN: list[Callable[[random.Random], wire.Message]] = [
    lambda r: wire.Hello(host="h", pid=1, software="t"),
    lambda r: wire.RegisterPrompts(task="t", fingerprint="0" * 64, total=6, offset=0, keys=PROMPTS),
    lambda r: wire.LeasePrompts(want=r.randrange(4), held=[r.randrange(9)], weights_version=2, wait_seconds=0.0),
    lambda r: wire.SampleBatch(step=r.randrange(9), prompts=1, samples=2, reference="initial", wait_seconds=0.0),
    lambda r: wire.ReportStep(
        step=r.randrange(9), metrics={"loss": 0.1}, reference="x", trajectory_ids=[1], reference_logprobs=[-2.0]
    ),
    lambda r: wire.AnnounceSnapshot(weights=reference(r.choice(VERSIONS), 0), bytes=1),
    lambda r: wire.FinishRun(step=r.randrange(9)),
    lambda r: wire.Heartbeat(activity="x", reason="", weights_version=r.choice((None, 1)), metrics={"a": 1.0}),
    lambda r: wire.Goodbye(),
    lambda r: wire.GetStatus(),
]
