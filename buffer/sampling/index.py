"""The sampling index: the trajectories that can be sampled, in memory, rebuilt from the database at start.

    put ──► untrained ──► trained (part of a recorded batch) ──► removed (over a limit, or identical to a newer one)
                                                                 the row stays in the database

Invariant: the index is a function of the history, in the order of its ids, and of the limits alone. So after any
sequence of puts and batches it equals one that is rebuilt from the database. Which entries leave a prompt with too many
depends on ids, rewards and the seed alone.

An entry is a row of flat typed columns (`EntryColumns`), linked to the next row of its prompt. A prompt has an
ordinal: its position in the order of first appearance.

Which entries leave at `max_trajectories` is decided by `keep`:

    newest      the oldest
    reservoir   those of the largest rank, a hash of the seed, the prompt and the step: what stays is a uniform sample
                of all that arrived (bottom-k sampling: Cohen and Kaplan 2007)
    both        the same among all but the newest half of the room, as in WMAR (arXiv 2401.16650)

The responses of a prompt at one step have one rank, so that they leave or stay together: a group of a single trajectory
teaches nothing, and a sample of single trajectories would be made of such groups.
"""

from array import array
from bisect import insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from tba.buffer.sampling.entry_columns import NONE, REMOVED, TRAINED, Block, EntryColumns, renumbered
from tba.buffer.sampling.rules import Limits, PromptKeep

# The share of a reservoir that is sorted at once, to find what leaves it next.
_SORTED_SHARE = 64


@dataclass(slots=True)
class Entry:
    """One trajectory that can be sampled.

    `prompt` is what `context_of` returns: guided responses are of a prompt of their own. `step` is the optimiser step
    of the policy that generated it; `trained` says whether a recorded batch has it.
    """

    id: int
    prompt: int
    step: int
    reward: float
    dedup_hash: int
    trained: bool = False
    payload_bytes: int = 0


class SamplingIndex:
    """Entries grouped by prompt, within the limits. Ids are added in growing order."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.columns = EntryColumns(with_keys=limits.prompt_keep == "reservoir", with_ranks=limits.keep != "newest")
        # Columns by the ordinal of the prompt: its id, the rows of its oldest and newest entry, the number of its
        # entries, and the value that `changes` had after its last change.
        self.prompt_ids = array("q")
        self._head = array("i")
        self._tail = array("i")
        self._count = array("i")
        self._changed_at = array("q")
        self._ordinals: dict[int, int] = {}
        self.changes = 0
        self._rows = 0
        # How many have left, by the key of [buffer] that removed them, since this index was made.
        self.left: Counter[str] = Counter()
        # Payload of all entries.
        self.payload_bytes = 0
        # All rows before this one are removed.
        self._oldest = 0
        # With a reservoir: its rows are those before `_fresh`, and `_fresh_count` is the number of entries after them.
        # `_leaving` are the (rank, id) of its entries with at least the rank `_least`, ascending; some may be removed.
        self._fresh = self._fresh_count = 0
        self._leaving: list[tuple[int, int]] = []
        self._least = 1 << 64

    def __len__(self) -> int:
        return self._rows

    def __contains__(self, id_: int) -> bool:
        row = self.columns.find(id_)
        return row != NONE and self.columns.state[row] != REMOVED

    # ------------------------------------------------------------ changes

    def extend(self, block: Block) -> None:
        """Insert entries; older duplicates of them, and entries over the limits, leave sampling.

        The result is that of inserting one entry after the other. Where that makes no difference, all are inserted
        together, which takes half the time: if none has to leave, or only the oldest of the prompt.
        """
        ordinal, limits = self._ordinal(block.prompt), self.limits
        is_crowded = self._count[ordinal] + len(block) > limits.prompt_cap
        if len(block) > 1 and (
            (is_crowded and limits.prompt_keep != "newest")
            or self._exceeds_totals(len(block), sum(block.payload_bytes))
        ):
            for entry in block.single_entries():
                self.extend(entry)
            return
        if limits.dedup:
            arrived, before = len(block), self._rows
            block = block.without_duplicates()
            self._remove_duplicates(ordinal, set(block.dedup_hash))
            self.left["dedup"] += arrived - len(block) + before - self._rows
        self._append(ordinal, block)
        while self._count[ordinal] > limits.prompt_cap:
            self.left["prompt_cap"] += 1
            self._remove(ordinal, *surplus(self.columns, self._head[ordinal], limits.prompt_keep))
        while self._rows and self._exceeds_totals():
            is_full = limits.max_trajectories is not None and self._rows > limits.max_trajectories
            self.left["max_trajectories" if is_full else "max_payload_bytes"] += 1
            if limits.keep == "newest":
                self._remove_oldest()
            else:
                self._remove_from_reservoir()
        self._note_change(ordinal)
        removed = len(self.columns) - self._rows
        # A quarter of the rows: compaction then costs each entry the copying of three rows.
        if removed > 1024 and removed * 4 > len(self.columns):
            self.compact()

    def mark_trained(self, ids: Iterable[int]) -> None:
        """Record that these are part of a recorded batch. Ids that are out of sampling are ignored."""
        for id_ in ids:
            row = self.columns.find(id_)
            if row != NONE and self.columns.state[row] != REMOVED:
                self.columns.state[row] = TRAINED
                self._note_change(self.columns.prompt[row])

    def compact(self) -> None:
        """Drop the rows of removed entries. No result of any method changes."""
        new_rows = self.columns.compact()
        self._head, self._tail = renumbered(self._head, new_rows), renumbered(self._tail, new_rows)
        self._fresh = int(new_rows[self._fresh - 1]) + 1 if self._fresh else 0
        self._oldest = 0

    # ------------------------------------------------------------ questions

    def changed_since(self, changes: int) -> npt.NDArray[np.intp]:
        """Return the ordinals of the prompts that changed after `self.changes` had this value, in ascending order."""
        return np.flatnonzero(np.frombuffer(self._changed_at, np.int64) > changes)

    def rows(self, ordinal: int) -> list[int]:
        """Return the rows of a prompt's entries, oldest first."""
        links, row, found = self.columns.next, self._head[ordinal], []
        while row != NONE:
            found.append(row)
            row = links[row]
        return found

    def entry(self, row: int) -> Entry:
        """Return the entry of a row that is not removed."""
        columns = self.columns
        return Entry(
            columns.id[row],
            self.prompt_ids[columns.prompt[row]],
            columns.step[row],
            columns.reward[row],
            columns.dedup_hash[row],
            columns.state[row] == TRAINED,
            columns.payload_bytes[row],
        )

    def prompts(self) -> list[int]:
        """Return the ids of the prompts with at least one entry, in the order of their first appearance."""
        return [prompt for prompt, count in zip(self.prompt_ids, self._count, strict=True) if count]

    def entries(self, prompt: int) -> list[Entry]:
        """Return the entries of a prompt, oldest first."""
        ordinal = self._ordinals.get(prompt)
        return [] if ordinal is None else [self.entry(row) for row in self.rows(ordinal)]

    # ------------------------------------------------------------ parts

    def _ordinal(self, prompt: int) -> int:
        ordinal = self._ordinals.get(prompt)
        if ordinal is None:
            ordinal = self._ordinals[prompt] = len(self.prompt_ids)
            self.prompt_ids.append(prompt)
            self._head.append(NONE)
            self._tail.append(NONE)
            self._count.append(0)
            self._changed_at.append(0)
        return ordinal

    def _note_change(self, ordinal: int) -> None:
        self.changes += 1
        self._changed_at[ordinal] = self.changes

    def _append(self, ordinal: int, block: Block) -> None:
        first = self.columns.extend(ordinal, block)
        if self.columns.key is not None:
            self.columns.key.extend(keyed_hash(self.limits.seed, id_) for id_ in block.id)
        if self.columns.rank is not None:
            self.columns.rank.extend(keyed_hash(self.limits.seed, block.prompt << 32 | step) for step in block.step)
            self._fresh_count += len(block)
        if self._count[ordinal]:
            self.columns.next[self._tail[ordinal]] = first
        else:
            self._head[ordinal] = first
        self._tail[ordinal] = first + len(block) - 1
        self._count[ordinal] += len(block)
        self._rows += len(block)
        self.payload_bytes += sum(block.payload_bytes)

    def _remove_duplicates(self, ordinal: int, hashes: set[int]) -> None:
        held, links = self.columns.dedup_hash, self.columns.next
        previous, row = NONE, self._head[ordinal]
        while row != NONE:
            if held[row] in hashes:
                self._remove(ordinal, previous, row)
            else:
                previous = row
            row = links[row]

    def _exceeds_totals(self, more_rows: int = 0, more_bytes: int = 0) -> bool:
        rows, size = self.limits.max_trajectories, self.limits.max_payload_bytes
        return (rows is not None and self._rows + more_rows > rows) or (
            size is not None and self.payload_bytes + more_bytes > size
        )

    def _remove_oldest(self) -> None:
        state = self.columns.state
        while state[self._oldest] == REMOVED:
            self._oldest += 1
        # Rows and the entries of a prompt are both in the order of ids: the oldest of all is the first of its prompt.
        ordinal = self.columns.prompt[self._oldest]
        self._remove(ordinal, NONE, self._oldest)
        self._note_change(ordinal)

    def _remove_from_reservoir(self) -> None:
        """Let what is too old for the newest half of the room enter the reservoir, and remove its largest rank."""
        limits, state, rank = self.limits, self.columns.state, self.columns.rank
        assert rank is not None
        assert limits.max_trajectories is not None
        room = limits.max_trajectories - limits.max_trajectories // 2 if limits.keep == "both" else 0
        while self._fresh_count > room:
            if state[self._fresh] != REMOVED:
                self._fresh_count -= 1
                if rank[self._fresh] >= self._least:
                    insort(self._leaving, (rank[self._fresh], self.columns.id[self._fresh]))
            self._fresh += 1
        row = NONE
        while row == NONE or state[row] == REMOVED:
            if not self._leaving:
                self._sort_reservoir()
            row = self.columns.find(self._leaving.pop()[1])
        ordinal = self.columns.prompt[row]
        previous, other = NONE, self._head[ordinal]
        while other != row:
            previous, other = other, self.columns.next[other]
        self._remove(ordinal, previous, row)
        self._note_change(ordinal)

    def _sort_reservoir(self) -> None:
        """Find the entries of the reservoir with the largest ranks."""
        assert self.columns.rank is not None
        rows = np.flatnonzero(np.frombuffer(self.columns.state, np.uint8)[: self._fresh] != REMOVED)
        ranks = np.frombuffer(self.columns.rank, np.uint64)[rows]
        found = len(rows) - 1 - len(rows) // _SORTED_SHARE
        self._least = int(np.partition(ranks, found)[found])
        # All of an equal rank: the order of those is that of their ids.
        chosen = rows[ranks >= self._least].tolist()
        self._leaving = sorted((self.columns.rank[row], self.columns.id[row]) for row in chosen)

    def _remove(self, ordinal: int, previous: int, row: int) -> None:
        """Unlink a row from its prompt's list; `previous` is the row before it there, or NONE."""
        after = self.columns.next[row]
        if previous == NONE:
            self._head[ordinal] = after
        else:
            self.columns.next[previous] = after
        if after == NONE:
            self._tail[ordinal] = previous
        self.columns.state[row] = REMOVED
        self._count[ordinal] -= 1
        self._fresh_count -= self.columns.rank is not None and row >= self._fresh
        self._rows -= 1
        self.payload_bytes -= self.columns.payload_bytes[row]


def surplus(columns: EntryColumns, head: int, keep: PromptKeep) -> tuple[int, int]:
    """Return the entry that leaves a prompt with one entry too many: (the row before it or NONE, its row).

    newest: the oldest leaves; best: the lowest reward, the oldest of equal ones; reservoir: the largest keyed hash.
    """
    if keep == "newest":
        return NONE, head
    if keep == "best":
        return _least(columns, head, columns.reward, 1)
    assert columns.key is not None
    return _least(columns, head, columns.key, -1)


def _least(columns: EntryColumns, head: int, values: "array[int] | array[float]", sign: int) -> tuple[int, int]:
    found, least = (NONE, head), sign * values[head]
    previous, row = head, columns.next[head]
    while row != NONE:
        if sign * values[row] < least:
            found, least = (previous, row), sign * values[row]
        previous, row = row, columns.next[row]
    return found


def keyed_hash(seed: int, id_: int) -> int:
    """Hash a seed and an id, or the context and step of a group, to 64 bits."""
    # A context of guided responses, or of a phase, has more than 32 bits: see `context_of`.
    return xxhash.xxh3_64_intdigest(id_.to_bytes(8 if id_ < 1 << 64 else 16, "little"), seed)
