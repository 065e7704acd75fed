"""How a prompt is drawn: by weight, or by rank. Both in O(log n), both without replacement within a batch.

A prompt is a place of the index. `hold` keeps a place out of the draw until `release`, at the end of a batch:
chances are then those of what is left, renormalised. It is enough to hold what has been drawn a second time.
"""

import math
import struct
from array import array
from dataclasses import dataclass
from typing import Protocol

from sortedcontainers import SortedList

from tba.buffer.weight_tree import WeightTree

_PLACE_BITS = 32
_SIGN = 1 << 63
_ALL = (1 << 64) - 1


@dataclass(slots=True)
class Standing:
    """What a prompt's chance depends on. `age`: 0 has recent data that no batch had, 1 has recent data, 2 has not.

    `score` is the mean reward of what the index holds of the prompt; `flat` if these rewards are all equal.
    """

    age: int
    score: float
    flat: bool


class Lottery(Protocol):
    """Draws places. `enter` again changes a standing; nothing enters or leaves while a batch is drawn."""

    def enter(self, place: int, standing: Standing) -> None: ...
    def leave(self, place: int) -> None: ...
    def draw(self, chance: float) -> tuple[int, float]: ...
    def hold(self, place: int) -> None: ...
    def release(self) -> None: ...
    def buffer_bytes(self) -> int: ...


class WeightedPrompts:
    """By weight: exp(inverse_temperature x score), times `flat_weight` where rewards are flat.

    `by_age`: younger ones first, and only among those of one age by weight. A flat weight of 0 is a tier of
    its own, behind the others of the same age: a flat prompt is drawn when there is nothing else.
    """

    def __init__(self, *, inverse_temperature: float, by_age: bool, flat_weight: float) -> None:
        self._inverse_temperature = inverse_temperature
        self._by_age = by_age
        self._flat_last = flat_weight == 0
        self._log_flat = math.log(flat_weight) if flat_weight > 0 else 0.0
        self._tree = WeightTree()
        self._held: list[tuple[int, tuple[int, float]]] = []

    def enter(self, place: int, standing: Standing) -> None:
        """Let a place take part, or change its standing."""
        tier = 2 * standing.age if self._by_age else 0
        log_weight = self._inverse_temperature * standing.score
        if standing.flat:
            tier, log_weight = tier + self._flat_last, log_weight + self._log_flat
        self._tree.set(place, tier, log_weight)

    def leave(self, place: int) -> None:
        """Take a place out for good."""
        self._tree.remove(place)

    def draw(self, chance: float) -> tuple[int, float]:
        """The place at a uniform number from [0, 1), and what is left of that: another such number."""
        return self._tree.draw(chance)

    def hold(self, place: int) -> None:
        """Keep a place out until `release`."""
        self._held.append((place, self._tree.leaf(place)))
        self._tree.remove(place)

    def release(self) -> None:
        """End of the batch."""
        for place, leaf in self._held:
            self._tree.set(place, *leaf)
        self._held.clear()

    def buffer_bytes(self) -> int:
        """Memory of the tree."""
        return self._tree.buffer_bytes()


class RankedPrompts:
    """By rank: P(rank i) proportional to i^-exponent, the highest score first, of equal ones the older prompt.

    `flat_last`: prompts with flat rewards rank behind all others. A rank is counted among all that take part,
    those on hold included.
    """

    def __init__(self, *, exponent: float, flat_last: bool) -> None:
        self._exponent = exponent
        self._flat_last = flat_last
        self._order: SortedList[int] = SortedList()  # one integer a place, see _key
        self._keys = array("Q")  # by place: the upper part of its integer, to find it again
        self._flags = bytearray()  # by place: 0 not there, 1 there, 2 there and behind all others
        self._ranks = WeightTree()  # leaf i is rank i + 1
        self._known = 0  # leaves of self._ranks
        self._held: list[int] = []  # ranks

    def enter(self, place: int, standing: Standing) -> None:
        """Let a place take part, or change its standing."""
        while len(self._keys) <= place:
            self._keys.append(0)
            self._flags.append(0)
        flag, key = 1 + (standing.flat and self._flat_last), _descending(standing.score)
        if (self._flags[place], self._keys[place]) == (flag, key):
            return
        self.leave(place)
        self._flags[place], self._keys[place] = flag, key
        self._order.add(self._key(place))

    def leave(self, place: int) -> None:
        """Take a place out for good."""
        if place < len(self._flags) and self._flags[place]:
            self._order.remove(self._key(place))
            self._flags[place] = 0

    def draw(self, chance: float) -> tuple[int, float]:
        """The place at a uniform number from [0, 1), and what is left of that: another such number."""
        self._count_ranks()
        rank, rest = self._ranks.draw(chance)
        return int(self._order[rank]) & ((1 << _PLACE_BITS) - 1), rest

    def hold(self, place: int) -> None:
        """Keep a place out until `release`."""
        self._held.append(self._order.index(self._key(place)))
        self._ranks.remove(self._held[-1])

    def release(self) -> None:
        """End of the batch."""
        for rank in self._held:
            self._set_rank(rank)
        self._held.clear()

    def buffer_bytes(self) -> int:
        """Memory of the arrays, and of the integers in order (48 bytes each)."""
        return self._keys.__sizeof__() + len(self._flags) + self._ranks.buffer_bytes() + 48 * len(self._order)

    def _count_ranks(self) -> None:
        while self._known < len(self._order):
            self._set_rank(self._known)
            self._known += 1
        while self._known > len(self._order):
            self._known -= 1
            self._ranks.remove(self._known)

    def _set_rank(self, rank: int) -> None:
        self._ranks.set(rank, 0, -self._exponent * math.log(rank + 1))

    def _key(self, place: int) -> int:
        """Sorts like (flag, -score, place), in 40 bytes where a tuple of three takes 120."""
        return ((self._flags[place] << 64 | self._keys[place]) << _PLACE_BITS) | place


def _descending(score: float) -> int:
    """64 bits that sort the other way round than the score; 0.0 and -0.0 are equal."""
    bits = int.from_bytes(struct.pack(">d", 0.0 - score), "big")
    return bits ^ _ALL if bits & _SIGN else bits ^ _SIGN
