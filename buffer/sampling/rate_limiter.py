"""The rate limiter: keeps training and generation in step, by how often a trajectory is used on average.

One condition, in trajectories, with r = samples per insert:

    0 <= inserted - sampled / r <= slack

The left side holds the trainer back, the right side the searchers. The two must never hold back both: that would be a
deadlock. Let a batch be b trajectories and a lease g. The trainer waits only if sampled + b > r x inserted, so
inserted - sampled / r < b / r. A searcher waits only if inserted + under way + g - sampled / r > slack. With nothing
under way, both could be true only if slack < b / r + g. The configuration refuses such a slack (`Config.least_slack`).
What is under way always ends: its trajectories arrive, or its lease expires.
"""

import math
from dataclasses import dataclass

from tba.common.errors import quantity


@dataclass(frozen=True, slots=True)
class RateLimiter:
    """The limits on both sides; no limit on either if `samples_per_insert` is None."""

    samples_per_insert: float | None
    slack: float

    def shortage(self, inserted: int, sampled: int, batch: int) -> str | None:
        """Return why the trainer cannot have a batch of this size yet, None if it can."""
        ratio = self.samples_per_insert
        if ratio is None or sampled + batch <= ratio * inserted:
            return None
        needed = quantity(math.ceil((sampled + batch) / ratio), "trajectory", "trajectories")
        return f"{inserted} of {needed} for {ratio:g} {'sample' if ratio == 1 else 'samples'} per insert"

    def room(self, inserted: int, under_way: int, sampled: int) -> int | None:
        """Return how many more trajectories searchers may start now, None for any number."""
        ratio = self.samples_per_insert
        if ratio is None:
            return None
        return max(0, math.floor(self.slack + sampled / ratio - inserted - under_way))
