"""Which sequence numbers of a sender are in the database: how a repeated put is recognised without a query.

Invariant: the ranges of a sender are what the table holds for it; the table's unique index guards the same.
"""

from bisect import bisect_right
from collections.abc import Iterable


class SequenceRanges:
    """Disjoint, sorted, half-open ranges. A sender that numbers without gaps needs one of them."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self.ranges: list[tuple[int, int]] = sorted(ranges)

    def missing(self, first: int, count: int) -> list[int]:
        """The numbers of [first, first + count) that are not there."""
        if not self.ranges or first >= self.ranges[-1][1]:
            return list(range(first, first + count))
        there: set[int] = set()
        for start, stop in self.ranges[max(0, bisect_right(self.ranges, (first, first)) - 1) :]:
            if start >= first + count:
                break
            there.update(range(max(start, first), min(stop, first + count)))
        return [n for n in range(first, first + count) if n not in there]

    def add(self, first: int, count: int) -> None:
        """Have [first, first + count) from now on."""
        start, stop = first, first + count
        if self.ranges and self.ranges[-1][1] == start:  # the usual case: the next put
            self.ranges[-1] = (self.ranges[-1][0], stop)
            return
        apart = [r for r in self.ranges if r[1] < start or r[0] > stop]
        touching = [r for r in self.ranges if not (r[1] < start or r[0] > stop)]
        merged = (min([start, *(r[0] for r in touching)]), max([stop, *(r[1] for r in touching)]))
        self.ranges = sorted([*apart, merged])
