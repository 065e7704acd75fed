"""Prompt leases: the order of prompts in an epoch, and which searcher works on which prompt.

Invariant: within an epoch every prompt is visited exactly once, except for those that the curriculum skips. A visit is
open from its lease to the commit of its last trajectories. If its searcher falls silent, the same visit is leased to
another one.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np

from tba.buffer.store.tables.prompts import Decision, OpenVisit

# Returns the expected tokens of a response to each of these prompts, where they are known.
Lengths: TypeAlias = Callable[[list[int]], dict[int, float]]


class LeaseBook:
    """The open visits by id, and the position in the epoch order of the next new visit.

    The order of an epoch is what was visited, then the rest of a seeded shuffle of prompt ids, changed by the decisions
    of the curriculum: visits and decisions are all that needs to be stored. Visits by sender and leases by prompt are
    kept as they change: each request of each waiting searcher needs them.
    """

    def __init__(
        self,
        seed: int,
        prompts: list[int],
        epoch: int,
        visited: Sequence[int],
        visits: Iterable[OpenVisit],
        decisions: Iterable[Decision],
    ) -> None:
        self.seed = seed
        self.prompts = prompts
        self.begin(epoch, decisions, visited)
        self.open: dict[int, OpenVisit] = {}
        # The stored trajectories of open visits.
        self.stored = 0
        # The leases of each prompt that has any: it may be leased in two epochs.
        self.leased_prompts: Counter[int] = Counter()
        # The open visits of each sender by id. Those of None are abandoned.
        self._of_sender: defaultdict[str | None, dict[int, OpenVisit]] = defaultdict(dict)
        for visit in visits:
            self.add(visit)

    def shuffled(self, epoch: int) -> list[int]:
        """Return the ids of all prompts in the order that the seed gives them in an epoch."""
        rng = np.random.default_rng([self.seed, epoch])
        return [self.prompts[n] for n in rng.permutation(len(self.prompts))]

    def begin(self, epoch: int, decisions: Iterable[Decision], visited: Sequence[int] = ()) -> None:
        """Begin an epoch without the prompts that are skipped, and with those that are postponed at its end.

        If it was begun before, `visited` are the prompts that were visited, in order.
        """
        of = {one.prompt: one.decision for one in decisions}
        self.epoch, self.position = epoch, len(visited)
        self._visited = visited
        self.skipped = frozenset(prompt for prompt, decision in of.items() if decision == "skipped")
        self.postponed = frozenset(of.keys() - self.skipped)
        # Computed at the first visit: the prompts may not be registered yet.
        self._order: list[int] | None = None

    @property
    def order(self) -> list[int]:
        """The prompt ids in the order of this epoch."""
        if self._order is None:
            gone = self.skipped.union(self._visited)
            rest = [prompt for prompt in self.shuffled(self.epoch) if prompt not in gone]
            self._order = [*self._visited, *sorted(rest, key=self.postponed.__contains__)]
        return self._order

    @property
    def at_end(self) -> bool:
        """Whether every prompt of this epoch has been visited, so that the next visit needs another one."""
        return self.position == len(self.order)

    def next_position(self) -> tuple[int, int, int]:
        """Return (epoch, position, prompt id) of the next new visit of this epoch, and advance."""
        position = self.position
        self.position += 1
        return self.epoch, position, self.order[position]

    def longest_first(self, window: int, count: int, searchers: int, lengths: Lengths) -> int:
        """Let the next visits be of the prompts that are expected longest; returns of how many, at most `count`.

        They are chosen from what is left of a window of this many positions, so that the lengths of all windows are
        alike. One searcher takes each n-th of the longest if there are n: else the first one would have all of them. A
        prompt of unknown length counts as average; equal ones stay in order.
        """
        stop = min((self.position // window + 1) * window, len(self.order))
        left = self.order[self.position : stop]
        expected = lengths(left)
        average = sum(expected.values()) / max(1, len(expected))
        longest = sorted(left, key=lambda prompt: (prompt in self.postponed, -expected.get(prompt, average)))
        count = min(count, len(left))
        among = min(count * searchers, len(left))
        chosen = [longest[n * among // count] for n in range(count)]
        taken = set(chosen)
        self.order[self.position : stop] = [*chosen, *(prompt for prompt in left if prompt not in taken)]
        return count

    # ------------------------------------------------------------ changes

    def add(self, visit: OpenVisit) -> None:
        """Add an open visit, which its sender holds if it has one."""
        self.open[visit.id] = visit
        self.stored += visit.stored
        self._hold(visit, visit.sender)

    def note(self, visit_id: int) -> None:
        """Count a trajectory of a visit that is not answered yet."""
        if visit := self.open.get(visit_id):
            visit.stored += 1
            self.stored += 1

    def lease(self, visit: OpenVisit, sender: str) -> None:
        """Lease an open visit to this sender instead of the one that held it."""
        self._end(visit)
        self._hold(visit, sender)

    def release(self, sender: str) -> int:
        """End all leases of a sender; its visits stay open. Returns how many there were."""
        held = list(self._of_sender.get(sender, {}).values())
        for visit in held:
            self._end(visit)
            self._hold(visit, None)
        return len(held)

    def close(self, visit_id: int, prompt: int, sender: str) -> bool:
        """Close a visit that was answered. False if it is not open, of another prompt, or leased to another."""
        visit = self.open.get(visit_id)
        if visit is None or visit.prompt != prompt or visit.sender not in (sender, None):
            return False
        self._end(visit)
        self.stored -= visit.stored
        del self.open[visit_id]
        return True

    def _hold(self, visit: OpenVisit, sender: str | None) -> None:
        visit.sender = sender
        self._of_sender[sender][visit.id] = visit
        if sender is not None:
            self.leased_prompts[visit.prompt] += 1

    def _end(self, visit: OpenVisit) -> None:
        held = self._of_sender[visit.sender]
        del held[visit.id]
        if not held:
            del self._of_sender[visit.sender]
        if visit.sender is None:
            return
        self.leased_prompts[visit.prompt] -= 1
        if not self.leased_prompts[visit.prompt]:
            del self.leased_prompts[visit.prompt]

    # ------------------------------------------------------------ questions

    def lost_by(self, sender: str, held: set[int]) -> list[OpenVisit]:
        """Return the visits leased to a sender that it does not hold, oldest first: the reply with them was lost."""
        return [visit for id_, visit in sorted(self._of_sender.get(sender, {}).items()) if id_ not in held]

    def abandoned(self, count: int) -> list[OpenVisit]:
        """Return the oldest open visits that no sender holds, at most `count` of them."""
        visits = self._of_sender.get(None, {})
        return [visits[id_] for id_ in heapq.nsmallest(count, visits)]

    def holders(self) -> list[str]:
        return [sender for sender in self._of_sender if sender is not None]

    def held_by(self, sender: str) -> int:
        """Return the number of visits leased to a sender."""
        return len(self._of_sender.get(sender, ()))

    @property
    def leases(self) -> int:
        """The number of visits that any sender holds."""
        return len(self.open) - len(self._of_sender.get(None, ()))
