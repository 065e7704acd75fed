"""The sequence numbers of a sender that occur in a file, as ranges: a set of them all would need too much memory."""

from bisect import bisect_right
from collections.abc import Iterable


class SequenceRanges:
    """Disjoint, sorted, half-open ranges. A sender that numbers without gaps needs one of them."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self.ranges: list[tuple[int, int]] = sorted(ranges)

    def missing(self, first: int, count: int) -> list[int]:
        """Return the numbers of [first, first + count) that are not in any range."""
        if not self.ranges or first >= self.ranges[-1][1]:
            return list(range(first, first + count))
        known: set[int] = set()
        # The last range that starts at `first` or before may reach beyond it; earlier ranges end before it starts.
        for start, stop in self.ranges[max(0, bisect_right(self.ranges, (first, first)) - 1) :]:
            if start >= first + count:
                break
            known.update(range(max(start, first), min(stop, first + count)))
        return [n for n in range(first, first + count) if n not in known]

    def add(self, first: int, count: int) -> None:
        """Add [first, first + count), merging the ranges that it overlaps or touches."""
        start, stop = first, first + count
        # The usual case: the next put of the sender.
        if self.ranges and self.ranges[-1][1] == start:
            self.ranges[-1] = (self.ranges[-1][0], stop)
            return
        apart = [r for r in self.ranges if r[1] < start or r[0] > stop]
        touching = [r for r in self.ranges if not (r[1] < start or r[0] > stop)]
        merged = (min([start, *(r[0] for r in touching)]), max([stop, *(r[1] for r in touching)]))
        self.ranges = sorted([*apart, merged])
