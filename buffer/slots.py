"""The entries of the sampling index as flat typed columns.

Invariant: slots are in the order of ids, which only grow. So id -> slot is a bisection, and the oldest entry
is the first slot that is not gone. An object per entry would cost 200 bytes and more; a row here is 41.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

NONE = -1
GONE, LIVE, TAKEN = range(3)  # states: out of sampling, never taken for a batch, taken
_COLUMNS = ("id", "place", "step", "reward", "dedup", "size", "state", "next")
_GOLDEN = 0x9E3779B97F4A7C15


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

    def extend(
        self,
        place: int,
        ids: Sequence[int],
        steps: Sequence[int],
        rewards: Sequence[float],
        hashes: Sequence[int],
        taken: Sequence[bool],
        sizes: Sequence[int],
    ) -> int:
        """Add entries of one prompt, each linked to the next. Returns the slot of the first."""
        first, count = len(self.id), len(ids)
        self.id.extend(ids)
        self.place.extend(array("i", [place]) * count)
        self.step.extend(steps)
        self.reward.extend(rewards)
        self.dedup.extend(hashes)
        self.size.extend(sizes)
        self.state.extend([TAKEN if is_taken else LIVE for is_taken in taken])
        self.next.extend(range(first + 1, first + count))
        self.next.append(NONE)
        if len(self.id) > len(self._filter):
            self._refill_filter()
        else:
            for bit in self._filter_bits(place, hashes):
                self._filter[bit >> 3] |= 1 << (bit & 7)
        return first

    def find(self, id_: int) -> int:
        """The slot of an id, NONE if it is not there."""
        slot = bisect_left(self.id, id_)
        return slot if slot < len(self.id) and self.id[slot] == id_ else NONE

    def perhaps_held(self, place: int, hashes: Sequence[int]) -> bool:
        """Whether an entry of a prompt may have one of these hashes: for each at most one time in eight it has not.

        It spares the walk through a full prompt, which is 100 entries long by default.
        """
        bits = self._filter
        return any(bits[bit >> 3] & (1 << (bit & 7)) for bit in self._filter_bits(place, hashes))

    def wants_squeeze(self, live: int) -> bool:
        """A quarter of the slots is gone: squeezing costs each entry then the copying of three rows."""
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

    def _filter_bits(self, place: int, hashes: Sequence[int]) -> list[int]:
        """Where a prompt's hashes, whose bits are mixed well, stand in the filter: its length is a power of two."""
        salt, mask = place * _GOLDEN, 8 * len(self._filter) - 1
        return [(dedup ^ salt) & mask for dedup in hashes]

    def _refill_filter(self) -> None:
        size = max(1 << 7, 1 << len(self.id).bit_length())
        with np.errstate(over="ignore"):
            salts = np.frombuffer(self.place, np.int32).astype(np.uint64) * np.uint64(_GOLDEN)
        bits = (salts ^ np.frombuffer(self.dedup, np.int64).view(np.uint64)) & np.uint64(8 * size - 1)
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
