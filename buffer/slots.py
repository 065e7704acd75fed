"""The entries of the sampling index as flat typed columns.

Invariant: slots are in the order of ids, which only grow. So id -> slot is a bisection, and the oldest entry
is the first slot that is not gone. An object per entry would cost 200 bytes and more; a row here is 41.
"""

from array import array
from bisect import bisect_left
from typing import Any

import numpy as np
import numpy.typing as npt

NONE = -1
GONE, LIVE, TAKEN = range(3)  # states: out of sampling, never taken for a batch, taken
_COLUMNS = ("id", "place", "step", "reward", "dedup", "size", "state", "next")
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Slots:
    """Columns of equal length; `next` links the entries of a prompt, oldest first. Gone slots stay until `squeeze`."""

    def __init__(self, *, with_keys: bool) -> None:
        self.id = array("q")
        self.place = array("i")
        self.step = array("i")
        self.reward = array("d")
        self.dedup = array("q")
        self.size = array("I")
        self.state = array("B")
        self.next = array("i")
        self.key = array("Q") if with_keys else None
        self._filter = bytearray(1 << 7)  # a bit for each (place, dedup hash) that may be there

    def __len__(self) -> int:
        return len(self.id)

    def append(self, id_: int, place: int, step: int, reward: float, dedup: int, size: int, bit: int) -> int:
        """Add a live entry; `bit` is `filter_bit(place, dedup)`. Returns its slot."""
        slot = len(self.id)
        self.id.append(id_)
        self.place.append(place)
        self.step.append(step)
        self.reward.append(reward)
        self.dedup.append(dedup)
        self.size.append(size)
        self.state.append(LIVE)
        self.next.append(NONE)
        if slot >= len(self._filter):
            self._refill_filter()
        else:
            self._filter[bit >> 3] |= 1 << (bit & 7)
        return slot

    def find(self, id_: int) -> int:
        """The slot of an id, NONE if it is not there."""
        slot = bisect_left(self.id, id_)
        return slot if slot < len(self.id) and self.id[slot] == id_ else NONE

    def may_hold(self, bit: int) -> bool:
        """False if no entry of a prompt has a hash, by their `filter_bit`; True is a perhaps, wrong for one in eight.

        It spares `add` the walk through a full prompt, which is 100 entries long by default.
        """
        return bool(self._filter[bit >> 3] & (1 << (bit & 7)))

    def wants_squeeze(self, live: int) -> bool:
        """A quarter of the slots is gone: squeezing costs each `add` then the copying of three rows."""
        gone = len(self.id) - live
        return gone > 1024 and gone * 4 > len(self.id)

    def squeeze(self) -> npt.NDArray[np.int32]:
        """Drop the slots that are gone. Returns the new slot of each old one, for `moved`."""
        live = np.frombuffer(self.state, np.uint8) != GONE
        new_slots = np.cumsum(live, dtype=np.int32) - 1
        names = _COLUMNS if self.key is None else (*_COLUMNS, "key")
        for name in names:
            setattr(self, name, _kept(getattr(self, name), live))
        self.next = moved(self.next, new_slots)
        self._refill_filter()
        return new_slots

    def buffer_bytes(self) -> int:
        """Memory of the columns, growth slack included."""
        names = _COLUMNS if self.key is None else (*_COLUMNS, "key")
        columns: list[array[Any]] = [getattr(self, name) for name in names]
        return sum(column.__sizeof__() for column in columns) + self._filter.__sizeof__()

    def filter_bit(self, place: int, dedup: int) -> int:
        """Where a prompt and a hash stand in the filter, until the next `append` or `squeeze`."""
        # The filter has 2^n bytes, 2^(n + 3) bits; the high bits of a product with an odd number are mixed best.
        return (((place * _GOLDEN) ^ dedup) * _GOLDEN & _MASK) >> (62 - len(self._filter).bit_length())

    def _refill_filter(self) -> None:
        size = max(1 << 7, 1 << len(self.id).bit_length())
        with np.errstate(over="ignore"):
            places = np.frombuffer(self.place, np.int32).astype(np.uint64) * np.uint64(_GOLDEN)
            mixed = (places ^ np.frombuffer(self.dedup, np.int64).view(np.uint64)) * np.uint64(_GOLDEN)
        bits = mixed >> np.uint64(62 - size.bit_length())
        flags = np.zeros(size * 8, np.bool_)
        flags[bits.astype(np.intp)] = True
        self._filter = bytearray(np.packbits(flags, bitorder="little").tobytes())


def moved(links: "array[int]", new_slots: npt.NDArray[np.int32]) -> "array[int]":
    """Links to live slots, or NONE, after a squeeze."""
    renamed = np.array(links, np.int32)
    there = renamed != NONE
    renamed[there] = new_slots[renamed[there]]
    return array("i", renamed.tobytes())


def _kept(column: "array[Any]", live: npt.NDArray[np.bool_]) -> "array[Any]":
    return array(column.typecode, np.frombuffer(column, dtype=column.typecode)[live].tobytes())
