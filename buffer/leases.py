"""Prompt leases: the epoch order, and who is working on which prompt.

Invariant: within an epoch every prompt is visited exactly once. A visit is open from its lease to the
commit of its trajectories; the lease of a searcher that fell silent goes to another one, as it is.
"""

from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class OpenVisit:
    """A prompt that was handed out and has not come back. `sender` is None if nobody holds it."""

    id: int
    epoch: int
    prompt: int
    sender: str | None


@dataclass(slots=True)
class LeaseBook:
    """The open visits, and the place in the epoch order where the next one comes from.

    `order(epoch)` is a seeded shuffle of prompt ids: it needs no storage, only epoch and place do.
    """

    seed: int
    prompts: list[int]
    epoch: int = 0
    place: int = 0
    open: dict[int, OpenVisit] = field(default_factory=dict)
    _order: tuple[int, list[int]] = (-1, [])

    def order(self, epoch: int) -> list[int]:
        """Prompt ids in the order of an epoch."""
        if self._order[0] != epoch:
            rng = np.random.default_rng([self.seed, epoch])
            shuffled = [self.prompts[place] for place in rng.permutation(len(self.prompts))]
            self._order = (epoch, shuffled)
        return self._order[1]

    def next_place(self) -> tuple[int, int, int]:
        """(epoch, place, prompt) of the next new visit; moves on."""
        if self.place == len(self.prompts):
            self.epoch, self.place = self.epoch + 1, 0
        taken = (self.epoch, self.place, self.order(self.epoch)[self.place])
        self.place += 1
        return taken

    def lost_by(self, sender: str, held: set[int]) -> list[OpenVisit]:
        """Visits leased to a sender that it does not know of: their reply was lost."""
        return [visit for visit in self.open.values() if visit.sender == sender and visit.id not in held]

    def unheld(self) -> list[OpenVisit]:
        """Open visits that nobody holds, oldest first."""
        return sorted((visit for visit in self.open.values() if visit.sender is None), key=lambda v: v.id)

    def release(self, sender: str) -> int:
        """Take all leases from a sender. Returns how many there were."""
        held = [visit for visit in self.open.values() if visit.sender == sender]
        for visit in held:
            visit.sender = None
        return len(held)

    def close(self, lease: int, prompt: int, sender: str) -> bool:
        """End a visit that a sender has answered. False if it is not open, of another prompt, or another sender's."""
        visit = self.open.get(lease)
        if visit is None or visit.prompt != prompt or visit.sender not in (sender, None):
            return False
        del self.open[lease]
        return True

    def held(self) -> int:
        """Number of open visits that somebody holds."""
        return sum(visit.sender is not None for visit in self.open.values())

    def held_by(self, sender: str) -> int:
        """Number of open visits of a sender."""
        return sum(visit.sender == sender for visit in self.open.values())

    def leased_prompts(self) -> set[int]:
        """Prompts with an open visit that somebody holds."""
        return {visit.prompt for visit in self.open.values() if visit.sender is not None}
