"""The sampling index: what can be sampled, in memory, rebuilt from the database at start.

    put ──► live ──► taken ──► (over a cap of `Limits`, or an identical newer one) out of sampling
                                  the row stays in the database for ever

Invariant: the index is a function of the history in the order of its ids and of the limits alone. So after
any sequence of puts and trainings it equals one rebuilt from the database.

Entries are rows of flat typed columns (`slots.py`), 41 bytes each, linked to the next one of their prompt;
a prompt is a number in the order of first appearance, its *place*. Whoever keeps something derived per
prompt follows the index and learns which places changed; it is brought up to date when it is asked.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tba.buffer.changes import Changes
from tba.buffer.fresh import FreshPrompts
from tba.buffer.remover import Limits, keyed_hash, surplus
from tba.buffer.slots import GONE, NONE, TAKEN, Slots, moved

if TYPE_CHECKING:
    from tba.buffer.prompt_board import PromptBoard

_PAGE_BITS = 8


@dataclass(slots=True)
class Entry:
    """One sampleable trajectory. `step` is the optimiser step of the policy that generated it."""

    id: int
    prompt: int
    step: int
    reward: float
    dedup_hash: int
    taken: bool = False
    payload_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """Entries of one prompt as columns of equal length, in the order of their ids: see `Entry`."""

    prompt: int
    id: Sequence[int]
    step: Sequence[int]
    reward: Sequence[float]
    dedup_hash: Sequence[int]
    taken: Sequence[bool]
    payload_bytes: Sequence[int]

    def __len__(self) -> int:
        return len(self.id)

    def without_repeats(self) -> "Block":
        """Of entries with one hash only the last."""
        last = {dedup_hash: place for place, dedup_hash in enumerate(self.dedup_hash)}
        if len(last) == len(self):
            return self
        places = sorted(last.values())
        return Block(self.prompt, *([column[place] for place in places] for column in self._columns()))

    def one_by_one(self) -> "Iterator[Block]":
        """Each entry as a block of its own."""
        for values in zip(*self._columns(), strict=True):
            yield Block(self.prompt, *([value] for value in values))

    def _columns(self) -> tuple[Sequence[Any], ...]:
        return (self.id, self.step, self.reward, self.dedup_hash, self.taken, self.payload_bytes)


class SamplingIndex:
    """Entries grouped by prompt, within the limits. Ids are added in growing order."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.slots = Slots(with_keys=limits.keep == "reservoir")
        self.prompt_of = array("i")  # by place, as the next three
        self._head = array("i")  # slot of the oldest entry
        self._tail = array("i")
        self._count = array("i")
        self._pages: dict[int, array[int]] = {}  # prompt id -> place, in pages: ids are dense but start anywhere
        self._rows = 0
        self._bytes = 0
        self._oldest = 0  # no live slot is before this one
        self._followers: dict[str, Changes] = {}
        self._fresh: FreshPrompts | None = None
        self.board: PromptBoard | None = None  # the sampler's view, kept here between batches

    def __len__(self) -> int:
        return self._rows

    @property
    def payload_bytes(self) -> int:
        """Payload of all that can be sampled, in bytes."""
        return self._bytes

    # ------------------------------------------------------------ changes

    def extend(self, block: Block) -> None:
        """Insert entries; the identical twin of each, and what is then over the limits, leaves sampling.

        As if one came after the other. Where the oldest leave a full prompt, or nobody has to leave, all are inserted
        at once, in half of the time: whoever are the newest at the end would have stayed anyway.
        """
        place, limits = self._place(block.prompt), self.limits
        is_crowded = self._count[place] + len(block) > limits.prompt_cap
        if len(block) > 1 and (
            (is_crowded and limits.keep != "newest") or self._over_totals(len(block), sum(block.payload_bytes))
        ):
            for one in block.one_by_one():
                self.extend(one)
            return
        if limits.dedup:
            block = block.without_repeats()
            if self.slots.perhaps_held(place, block.dedup_hash):
                self._remove_twins(place, set(block.dedup_hash))
        self._append(place, block)
        while self._count[place] > limits.prompt_cap:
            self._remove(place, surplus(self.slots, self._head[place], limits.keep))
        while self._rows and self._over_totals():
            self._remove_oldest()
        for follower in self._followers.values():
            follower.note(place)
        if self.slots.wants_squeeze(self._rows):
            self.squeeze()

    def mark_taken(self, ids: Iterable[int]) -> None:
        """Remember that these were taken for a batch. Ids that left sampling are ignored."""
        for id_ in ids:
            slot = self.slots.find(id_)
            if slot == NONE or self.slots.state[slot] == GONE:
                continue
            self.slots.state[slot] = TAKEN
            for follower in self._followers.values():
                follower.note(self.slots.place[slot])

    def squeeze(self) -> None:
        """Drop the slots of entries that left. It changes no answer."""
        new_slots = self.slots.squeeze()
        self._head, self._tail = moved(self._head, new_slots), moved(self._tail, new_slots)
        self._oldest = 0

    def follow(self, name: str) -> Changes:
        """A queue that hears of every changed place from now on. One per name: a new one ends the old one."""
        self._followers[name] = Changes(self.places)
        return self._followers[name]

    # ------------------------------------------------------------ questions

    @property
    def places(self) -> int:
        """Number of prompts seen, those with nothing left to sample included."""
        return len(self.prompt_of)

    def group(self, place: int) -> list[int]:
        """Slots of a prompt's entries, oldest first."""
        links, slot, found = self.slots.next, self._head[place], []
        while slot != NONE:
            found.append(slot)
            slot = links[slot]
        return found

    def entry(self, slot: int) -> Entry:
        """The entry in a live slot."""
        slots = self.slots
        return Entry(
            slots.id[slot],
            self.prompt_of[slots.place[slot]],
            slots.step[slot],
            slots.reward[slot],
            slots.dedup[slot],
            slots.state[slot] == TAKEN,
            slots.size[slot],
        )

    def prompts(self) -> list[int]:
        """Prompts with at least one entry, in the order of their first."""
        return [prompt for prompt, count in zip(self.prompt_of, self._count, strict=True) if count]

    def entries(self, prompt: int) -> list[Entry]:
        """The entries of a prompt, oldest first."""
        return [self.entry(slot) for slot in self.group(self._place(prompt))]

    def fresh_prompts(self, min_step: int, need: int = 1) -> frozenset[int]:
        """Prompts with `need` entries of at least this policy step, one of them never taken for a batch.

        Costs what changed since the last call, and as many prompts as it returns when `min_step` moved.
        """
        if self._fresh is None or self._fresh.need != need:
            self._fresh = FreshPrompts(self, need)
        return self._fresh.at(min_step)

    def buffer_bytes(self) -> int:
        """Memory of the flat arrays, growth slack included: what a trajectory costs, but for a few objects."""
        arrays = [self.prompt_of, self._head, self._tail, self._count, *self._pages.values()]
        return self.slots.buffer_bytes() + sum(column.__sizeof__() for column in arrays)

    # ------------------------------------------------------------ parts

    def _place(self, prompt: int) -> int:
        number, offset = prompt >> _PAGE_BITS, prompt & ((1 << _PAGE_BITS) - 1)
        page = self._pages.get(number)
        if page is None:
            page = self._pages[number] = array("i", [NONE]) * (1 << _PAGE_BITS)
        if page[offset] == NONE:
            page[offset] = self.places
            self.prompt_of.append(prompt)
            self._head.append(NONE)
            self._tail.append(NONE)
            self._count.append(0)
        return page[offset]

    def _append(self, place: int, block: Block) -> None:
        first = self.slots.extend(
            place, block.id, block.step, block.reward, block.dedup_hash, block.taken, block.payload_bytes
        )
        if self.slots.key is not None:
            self.slots.key.extend(keyed_hash(self.limits.seed, id_) for id_ in block.id)
        if self._count[place]:
            self.slots.next[self._tail[place]] = first
        else:
            self._head[place] = first
        self._tail[place] = first + len(block) - 1
        self._count[place] += len(block)
        self._rows += len(block)
        self._bytes += sum(block.payload_bytes)

    def _remove_twins(self, place: int, hashes: set[int]) -> None:
        held, links = self.slots.dedup, self.slots.next
        previous, slot = NONE, self._head[place]
        while slot != NONE:
            if held[slot] in hashes:
                self._remove(place, (previous, slot))
            else:
                previous = slot
            slot = links[slot]

    def _over_totals(self, more_rows: int = 0, more_bytes: int = 0) -> bool:
        rows, size = self.limits.max_rows, self.limits.max_bytes
        return (rows is not None and self._rows + more_rows > rows) or (
            size is not None and self._bytes + more_bytes > size
        )

    def _remove_oldest(self) -> None:
        state = self.slots.state
        while state[self._oldest] == GONE:
            self._oldest += 1
        # Slots and groups are both in the order of ids: the oldest of all is the head of its prompt.
        place = self.slots.place[self._oldest]
        self._remove(place, (NONE, self._oldest))
        for follower in self._followers.values():
            follower.note(place)

    def _remove(self, place: int, where: tuple[int, int]) -> None:
        """Take a slot out of its prompt's list; `where` is (the slot before it or NONE, the slot)."""
        previous, slot = where
        after = self.slots.next[slot]
        if previous == NONE:
            self._head[place] = after
        else:
            self.slots.next[previous] = after
        if after == NONE:
            self._tail[place] = previous
        self.slots.state[slot] = GONE
        self._count[place] -= 1
        self._rows -= 1
        self._bytes -= self.slots.size[slot]
