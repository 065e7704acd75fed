"""Mutates valid messages with a seeded generator into what a broken, old or hostile peer might send."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import numpy as np

from tba.common.wire import messages
from tba.common.wire.codec import encode_request
from tba.common.wire.messages import Archive, GetStatus, PutEvaluation
from tba.tests.helpers.puts import make_episode, make_trajectory, numbers_of, put_message, reference

Frames = list[bytes]
_ARCHIVE = "s3://b/000000000009-0a1b2c3d.parquet"
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
    b"\xdd\xff\xff\xff\xff",  # array of 2^32-1
    b"\xdf\xff\xff\xff\xff",  # map of 2^32-1
    b"\xdb\xff\xff\xff\xff",  # string of 2^32-1
    b"\xc6\xff\xff\xff\xff",
    b"\xc1",  # never used by msgpack
    b"\xd9\x04\xff\xfe\x80\x81",  # not UTF-8
    b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
    b"\xc7\x03\xff\x01\x02\x03",  # an invalid timestamp
    b"\x91" * 200,
    b"\x91" * 5000,
    b"\x81\xa1a" * 600,
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",  # NaN
]


class Mutator:
    """`message()` returns a multipart: one in ten is valid, the others are mutated once or several times.

    Those of `examples` are mutated, or else requests to a buffer.
    """

    def __init__(self, seed: int, examples: Sequence[Frames] = ()) -> None:
        self.rng = random.Random(seed)
        self._examples = examples
        self._sequence = 0
        self._mutations: list[Callable[[Frames], Frames]] = [
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
            frames = self.rng.choice(self._mutations)(frames)
        return frames

    def good(self) -> Frames:
        """Return an example; without any a valid request of any type, most often a put."""
        rng = self.rng
        if self._examples:
            return rng.choice(self._examples)
        make = rng.choice([None] * 6 + list(_PLAIN))
        message, arrays = self._put() if make is None else (make(rng), [])
        role: Any = rng.choice(("searcher", "searcher", "trainer", "publisher", "monitor"))
        return encode_request(message, id=rng.randrange(1000), role=role, sender=self._sender(), run="", frames=arrays)

    def _sender(self) -> str:
        return f"{self.rng.choice('abc')}.{self.rng.randrange(3)}"

    def _put(self) -> tuple[messages.Message, Frames]:
        rng = self.rng
        self._sequence += rng.choice((0, 1, 4, 100))
        rows = [self._trajectory() for _ in range(rng.choice((1, 1, 2, 5)))]
        first = rng.choice((self._sequence, self._sequence, 0))
        return put_message(rows, first)

    def _trajectory(self):
        rng = self.rng
        if rng.random() < 0.2:
            return make_episode(rng.choice(PROMPTS), lease=rng.randrange(20))
        tokens = [rng.randrange(2**31) for _ in range(rng.choice((1, 3, 3, 20)))]
        runs = [[rng.choice(VERSIONS), 1] for _ in tokens] if rng.random() < 0.3 else None
        changes: dict[str, Any] = {"version_runs": np.array(runs, np.int32)} if runs else {}
        if rng.random() < 0.2:
            changes |= {"error": "reward: no", "stop_reason": "error"}
        if rng.random() < 0.2:
            changes |= {"text": "ä\x00", "metadata": {"deep": {"er": [1, None, "x"]}}}
        return make_trajectory(rng.choice(PROMPTS), lease=rng.randrange(20), tokens=tokens, **changes)

    # ------------------------------------------------------------ mutations

    def _odd_value(self, frames: Frames) -> Frames:
        """Reposition a random value in the header."""
        try:
            header = msgpack.unpackb(frames[0])
        # An earlier mutation broke it.
        except Exception:  # noqa: BLE001
            return frames
        parent, key = self._position_in(header)
        if parent is None:
            return frames
        if isinstance(parent, dict) and self.rng.random() < 0.1:
            del parent[key]
        else:
            parent[key] = self.rng.choice(ODD)
        try:
            return [msgpack.packb(header), *frames[1:]]
        # Nested too deeply.
        except ValueError:
            return frames

    def _position_in(self, value: Any) -> tuple[Any, Any]:
        """Return (container, key) of a random value, nested ones included."""
        parent, key = None, None
        while isinstance(value, dict | list) and value and (parent is None or self.rng.random() < 0.8):
            parent = value
            key = self.rng.choice(list(value)) if isinstance(value, dict) else self.rng.randrange(len(value))
            value = value[key]
        return parent, key

    def _flip(self, frames: Frames) -> Frames:
        position = self.rng.randrange(len(frames)) if self.rng.random() < 0.4 else 0
        frame = bytearray(frames[position])
        for _ in range(self.rng.choice((1, 1, 3, 10))):
            if frame:
                frame[self.rng.randrange(len(frame))] ^= 1 << self.rng.randrange(8)
        return _with(frames, position, bytes(frame))

    def _cut(self, frames: Frames) -> Frames:
        position = self.rng.randrange(len(frames))
        return _with(frames, position, frames[position][: self.rng.randrange(len(frames[position]) + 1)])

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
        """Reposition the numbers of an array frame, keeping its length."""
        position = self.rng.randrange(len(frames))
        units = len(frames[position]) // 4
        if not position or not units:
            return frames
        numbers = np.array([self.rng.choice((-1, 0, 1, 2, 2**31 - 1, -(2**31))) for _ in range(units)], "<i4")
        return _with(frames, position, numbers.tobytes())

    def _empty_frame(self, frames: Frames) -> Frames:
        position = self.rng.randrange(len(frames) + 1)
        return [*frames[:position], b"", *frames[position + self.rng.randrange(2) :]]

    def _garbage(self, _: Frames) -> Frames:
        return [self.rng.randbytes(self.rng.randrange(60)) for _ in range(self.rng.randrange(1, 8))]


def _with(frames: Frames, position: int, frame: bytes) -> Frames:
    return [*frames[:position], frame, *frames[position + 1 :]]


_PLAIN: list[Callable[[random.Random], messages.Message]] = [
    lambda r: messages.Hello(host="h", pid=1),
    lambda r: messages.RegisterPrompts(task="t", fingerprint="0" * 64, total=6, offset=0, keys=PROMPTS),
    lambda r: messages.LeasePrompts(want=r.randrange(4), held=[r.randrange(9)], weights_version=2, wait_seconds=0.0),
    lambda r: messages.SampleBatch(step=r.randrange(9), prompts=1, samples=2, reference="initial", wait_seconds=0.0),
    lambda r: messages.ReportStep(
        step=r.randrange(9),
        metrics={"loss": 0.1},
        reference="x",
        trajectory_ids=[1],
        reference_logprobs=[-2.0],
        rows=numbers_of(n := r.randrange(1, 4), token_log_ratios=[r.choice((None, b"", bytes(6))) for _ in range(n)]),
    ),
    lambda r: Archive(since_step=r.randrange(9), after=r.randrange(9)),
    lambda r: Archive(since_step=r.randrange(9), url=_ARCHIVE, trajectories=[r.randrange(9)], complete=True),
    lambda r: messages.AnnounceSnapshot(weights=reference(r.choice(VERSIONS), 0), bytes=1),
    lambda r: messages.FinishRun(step=r.randrange(9)),
    lambda r: messages.Heartbeat(activity="x", reason="", weights_version=r.choice((None, 1)), metrics={"a": 1.0}),
    lambda r: messages.Goodbye(),
    lambda r: GetStatus(),
    lambda r: PutEvaluation(
        version=r.choice(VERSIONS),
        step=r.randrange(9),
        prompts=2,
        prompt_set="a",
        settings="b",
        evaluated_at=1.0,
        seconds=1.0,
        metrics={"reward": 0.5},
        intervals={"reward": (0.0, 1.0)},
    ),
]
