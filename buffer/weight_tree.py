"""Draws a place by weight in O(log n): a binary tree of sums, kept in logarithms.

Invariant: an inner node is a function of its two children alone. Nothing is ever added to or taken from a sum,
so the tree is the same, to the last bit, however it came to its leaves: a rebuilt one draws the same places.

A leaf has a tier and a log weight. While a lower tier has a leaf, higher tiers have no chance; within a tier
the chance is proportional to the weight. Logarithms, because softmax weights span more than floats can: with
scores of 1e9 every weight but the largest is 0, and drawing without replacement needs the next one.
"""

import math
from array import array

ABSENT = 127
_NOTHING = -math.inf


class WeightTree:
    """Leaves 0 .. capacity - 1, at first absent. Node 1 is the root; node k has children 2k and 2k + 1."""

    def __init__(self, places: int = 1) -> None:
        self._capacity = 1 << max(0, places - 1).bit_length()
        self._tier = array("b", [ABSENT]) * (2 * self._capacity)
        self._log = array("d", [_NOTHING]) * (2 * self._capacity)

    def __contains__(self, place: int) -> bool:
        return place < self._capacity and self._tier[self._capacity + place] != ABSENT

    def leaf(self, place: int) -> tuple[int, float]:
        """(tier, log weight) of a place."""
        return self._tier[self._capacity + place], self._log[self._capacity + place]

    def set(self, place: int, tier: int, log_weight: float) -> None:
        """Give a place a tier and a weight."""
        if place >= self._capacity:
            self._grow(place + 1)
        node = self._capacity + place
        self._tier[node], self._log[node] = tier, log_weight
        while node > 1:
            node >>= 1
            if not self._join(node):
                return

    def remove(self, place: int) -> None:
        """Take a place out."""
        if place in self:
            self.set(place, ABSENT, _NOTHING)

    def draw(self, chance: float) -> tuple[int, float]:
        """The place at a uniform number from [0, 1), and what is left of that: another such number.

        There must be a place.
        """
        node, tier = 1, self._tier[1]
        assert tier != ABSENT, "nothing to draw from"
        while node < self._capacity:
            left = 2 * node
            if self._tier[left] != tier:
                node = left + 1
            elif self._tier[left + 1] != tier:
                node = left
            else:
                share = math.exp(self._log[left] - self._log[node])
                if chance < share:
                    node, chance = left, chance / share
                else:
                    # The rest of a uniform number is uniform again; a rounded share of 1 leaves no rest.
                    node, chance = left + 1, (chance - share) / (1 - share) if share < 1 else 0.0
        return node - self._capacity, chance

    def buffer_bytes(self) -> int:
        """Memory of the nodes."""
        return self._tier.__sizeof__() + self._log.__sizeof__()

    def _grow(self, places: int) -> None:
        old = self._capacity
        bigger = WeightTree(places)
        bigger._tier[bigger._capacity : bigger._capacity + old] = self._tier[old:]
        bigger._log[bigger._capacity : bigger._capacity + old] = self._log[old:]
        self._capacity, self._tier, self._log = bigger._capacity, bigger._tier, bigger._log
        for node in range(self._capacity - 1, 0, -1):
            self._join(node)

    def _join(self, node: int) -> bool:
        """Make a node from its children. False if that changed nothing."""
        tiers, logs = self._tier, self._log
        left, right = 2 * node, 2 * node + 1
        if tiers[left] < tiers[right]:
            tier, total = tiers[left], logs[left]
        elif tiers[right] < tiers[left]:
            tier, total = tiers[right], logs[right]
        else:
            tier, total = tiers[left], _log_add(logs[left], logs[right])
        if tiers[node] == tier and logs[node] == total:
            return False
        tiers[node], logs[node] = tier, total
        return True


def _log_add(one: float, other: float) -> float:
    if one < other:
        one, other = other, one
    return one if other == _NOTHING else one + math.log1p(math.exp(other - one))
