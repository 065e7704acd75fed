"""Prompts that the trainer has not had yet: what the staleness limit counts as under way."""

from typing import TYPE_CHECKING

from tba.buffer.slots import LIVE

if TYPE_CHECKING:
    from tba.buffer.index import SamplingIndex


class FreshPrompts:
    """The prompts with `need` entries of at least a step, one of them never taken for a batch.

    Nothing is done while nobody asks. The least step only grows (it follows the optimiser): then members are
    looked at again, and nobody else can have become one. A smaller one looks at every prompt.
    """

    def __init__(self, index: "SamplingIndex", need: int) -> None:
        self.need = need
        self._index = index
        self._changes = index.follow("fresh")
        self._min_step: int | None = None
        self._places: set[int] = set()
        self._answer: frozenset[int] = frozenset()

    def at(self, min_step: int) -> frozenset[int]:
        """Prompt ids, brought up to date."""
        changed = set(self._changes.drain())
        if self._min_step is None or min_step < self._min_step:
            changed = set(range(self._index.places))
        elif min_step > self._min_step:
            changed |= self._places
        elif not changed:
            return self._answer
        self._min_step = min_step
        for place in changed:
            (self._places.add if self._is_fresh(place, min_step) else self._places.discard)(place)
        self._answer = frozenset(map(self._index.prompt_of.__getitem__, self._places))
        return self._answer

    def _is_fresh(self, place: int, min_step: int) -> bool:
        slots = self._index.slots
        young = [slot for slot in self._index.group(place) if slots.step[slot] >= min_step]
        return len(young) >= self.need and any(slots.state[slot] == LIVE for slot in young)
