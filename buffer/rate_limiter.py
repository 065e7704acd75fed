"""Keeps training and generation in step: how often a trajectory is used on average.

One equation, in trajectories, with r = samples per insert:

    0 <= inserted - sampled / r <= slack

The left side holds the trainer back, the right side the searchers. Both at once would be a deadlock; that
cannot be. Let a batch be b trajectories and a lease g. The trainer waits only if sampled + b > r x inserted,
so inserted - sampled / r < b / r. A searcher waits only if inserted + under way + g - sampled / r > slack. With
nothing under way, both would need slack < b / r + g: such a slack is refused (`Config.least_slack`). And what is
under way comes back, or its lease expires.
"""

import math
from dataclasses import dataclass

from tba.common.quantity import quantity


@dataclass(frozen=True, slots=True)
class RateLimiter:
    """`samples_per_insert` None is no limit on either side."""

    samples_per_insert: float | None
    slack: float

    def shortage(self, inserted: int, sampled: int, batch: int) -> str | None:
        """Why the trainer cannot have a batch of this size yet, None if it can."""
        ratio = self.samples_per_insert
        if ratio is None or sampled + batch <= ratio * inserted:
            return None
        needed = quantity(math.ceil((sampled + batch) / ratio), "trajectory", "trajectories")
        return f"{inserted} of {needed} for {ratio:g} {'sample' if ratio == 1 else 'samples'} per insert"

    def room(self, inserted: int, under_way: int, sampled: int) -> int | None:
        """How many more trajectories searchers may start now, None for any number."""
        ratio = self.samples_per_insert
        if ratio is None:
            return None
        return max(0, math.floor(self.slack + sampled / ratio - inserted - under_way))
