"""Prompt leases: the order of prompts in an epoch, and which searcher works on which prompt.

Invariant: within an epoch every prompt is visited exactly once. A visit is open from its lease to the commit of its
trajectories. If its searcher falls silent, the same visit is leased to another one.
"""

from dataclasses import dataclass, field

import numpy as np

from tba.buffer.store.tables.prompts import OpenVisit


@dataclass(slots=True)
class LeaseBook:
    """The open visits by id, and the position in the epoch order of the next new visit.

    The order of an epoch is a seeded shuffle of prompt ids, so only epoch and position need to be stored.
    """

    seed: int
    prompts: list[int]
    epoch: int = 0
    position: int = 0
    open: dict[int, OpenVisit] = field(default_factory=dict)
    _order: tuple[int, list[int]] = (-1, [])

    def order(self, epoch: int) -> list[int]:
        """Return the prompt ids in the order of an epoch."""
        if self._order[0] != epoch:
            rng = np.random.default_rng([self.seed, epoch])
            shuffled = [self.prompts[n] for n in rng.permutation(len(self.prompts))]
            self._order = (epoch, shuffled)
        return self._order[1]

    def next_position(self) -> tuple[int, int, int]:
        """Return (epoch, position, prompt id) of the next new visit, and advance."""
        if self.position == len(self.prompts):
            self.epoch, self.position = self.epoch + 1, 0
        epoch, position = self.epoch, self.position
        self.position += 1
        return epoch, position, self.order(epoch)[position]

    def lost_by(self, sender: str, held: set[int]) -> list[OpenVisit]:
        """Return the visits leased to a sender that it does not hold: the reply with them was lost."""
        return [visit for visit in self.open.values() if visit.sender == sender and visit.id not in held]

    def unheld(self) -> list[OpenVisit]:
        """Return the open visits that no sender holds, oldest first."""
        return sorted((visit for visit in self.open.values() if visit.sender is None), key=lambda v: v.id)

    def release(self, sender: str) -> int:
        """End all leases of a sender; its visits stay open. Returns how many there were."""
        held = [visit for visit in self.open.values() if visit.sender == sender]
        for visit in held:
            visit.sender = None
        return len(held)

    def close(self, visit_id: int, prompt: int, sender: str) -> bool:
        """Close a visit that a sender has answered.

        Returns False, and closes nothing, if the visit is not open, is of another prompt, or is leased to another
        sender.
        """
        visit = self.open.get(visit_id)
        if visit is None or visit.prompt != prompt or visit.sender not in (sender, None):
            return False
        del self.open[visit_id]
        return True

    def leased(self) -> list[OpenVisit]:
        """Return the visits that a sender holds."""
        return [visit for visit in self.open.values() if visit.sender is not None]

    def held_by(self, sender: str) -> int:
        """Return the number of visits leased to a sender."""
        return sum(visit.sender == sender for visit in self.open.values())
