"""The sampling index: the trajectories that can be sampled, in memory, rebuilt from the database at start.

    put ──► untrained ──► trained (part of a recorded batch) ──► removed (over a limit, or identical to a newer one)
                                                                 the row stays in the database

Invariant: the index is a function of the history, in the order of its ids, and of the limits alone. So after any
sequence of puts and batches it equals one that is rebuilt from the database. Which entries leave a prompt with too many
depends on ids, rewards and the seed alone.

An entry is a row of flat typed columns: an object per entry would take 200 bytes and more. Rows are in the order of
ids, which only grow. So a bisection finds the row of an id, and the oldest entry is the first row that is not removed.
A prompt has an ordinal, its position in the order of first appearance, and a list of the ids and hashes of its entries.

Which entries leave at `max_trajectories` is decided by `keep`:

    newest      the oldest
    reservoir   those of the largest rank, a hash of the seed, the prompt and the step: what stays is a uniform sample
                of all that arrived (bottom-k sampling: Cohen and Kaplan 2007)
    both        the same among all but the newest half of the room, as in WMAR (arXiv 2401.16650)

The responses of a prompt at one step have one rank, so that they leave or stay together: a group of a single trajectory
teaches nothing, and a sample of single trajectories would be made of such groups.
"""

from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from tba.common.config.buffer import BufferSection

# The states of a row: out of sampling; never part of a recorded batch; part of one.
REMOVED, UNTRAINED, TRAINED = range(3)
# The columns and their types; `prompt` is the ordinal. Two more are there if a reservoir needs them: `key`, which
# decides what leaves a prompt, and `rank`, which decides what leaves the run.
_COLUMNS = {"id": "q", "prompt": "i", "step": "i", "reward": "d", "payload_bytes": "I", "state": "B"}
# The share of a reservoir that is sorted at once, to find what leaves it next.
_SORTED_SHARE = 64


def context_of(prompt: int, guided: int | None, phase: int | None) -> int:
    """Return the number under which the sampler groups responses: one for each prompt, beginning and phase.

    `guided` is the number of tokens that were given to the response, None for none; `phase` is that of its reward, None
    for the reward without phases. Each beginning has a log Z of its own and each phase another reward, so no group may
    mix two. Without either it is the id of the prompt, which has at most 32 bits.
    """
    return prompt + ((guided or 0) << 32) + ((0 if phase is None else phase + 1) << 56)


class Block(NamedTuple):
    """Entries of one prompt as columns of equal length, in the order of their ids: see `Entry`.

    `prompt` is what `context_of` returns.
    """

    prompt: int
    id: Sequence[int]
    step: Sequence[int]
    reward: Sequence[float]
    dedup_hash: Sequence[int]
    trained: Sequence[bool]
    payload_bytes: Sequence[int]


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
    """Entries grouped by prompt, within the limits. Ids are added in growing order.

    The seed of the run decides which trajectories a reservoir keeps.
    """

    def __init__(self, limits: BufferSection, *, seed: int = 0) -> None:
        self._limits = limits
        self._seed = seed
        self._max_rows = None if limits.max_trajectories == "unbounded" else limits.max_trajectories
        self._max_bytes = None if limits.max_payload_bytes == "unbounded" else limits.max_payload_bytes
        self._with_keys, self._with_ranks = limits.prompt_keep == "reservoir", limits.keep != "newest"
        kinds = _COLUMNS | ({"key": "Q"} if self._with_keys else {}) | ({"rank": "Q"} if self._with_ranks else {})
        self._columns: dict[str, array[Any]] = {name: array(kind) for name, kind in kinds.items()}
        # By the ordinal of the prompt: its id, the id and the hash of each entry in turn, oldest first, and the value
        # that `changes` had after its last change.
        self.prompt_ids = array("q")
        self._held: list[array[int]] = []
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
        return self._find(id_) is not None

    # ------------------------------------------------------------ changes

    def extend(self, block: Block) -> None:
        """Insert entries one after the other; older duplicates of each, and entries over the limits, leave sampling."""
        ordinal, limits, columns = self._ordinal(block.prompt), self._limits, self._columns
        held = self._held[ordinal]
        # The hashes of the prompt's entries, and some that have left it. The usual entry needs no search.
        seen = set(held[1::2])
        for id_, step, reward, dedup_hash, is_trained, payload_bytes in zip(*block[1:], strict=True):
            if limits.dedup and dedup_hash in seen and dedup_hash in (hashes := held[1::2]):
                self.left["dedup"] += 1
                self._remove(bisect_left(columns["id"], held[2 * hashes.index(dedup_hash)]))
            row = (id_, ordinal, step, reward, payload_bytes, TRAINED if is_trained else UNTRAINED)
            for column, value in zip(columns.values(), row, strict=False):
                column.append(value)
            if self._with_keys:
                columns["key"].append(keyed_hash(self._seed, id_))
            if self._with_ranks:
                columns["rank"].append(keyed_hash(self._seed, block.prompt << 32 | step))
                self._fresh_count += 1
            held.extend((id_, dedup_hash))
            seen.add(dedup_hash)
            self._rows += 1
            self.payload_bytes += payload_bytes
            self._note_change(ordinal)
            if len(held) // 2 > limits.prompt_cap:
                self.left["prompt_cap"] += 1
                self._remove(self._surplus(ordinal))
            while self._rows and self._exceeds_totals():
                is_full = self._max_rows is not None and self._rows > self._max_rows
                self.left["max_trajectories" if is_full else "max_payload_bytes"] += 1
                self._remove(self._largest_of_reservoir() if self._with_ranks else self._oldest_row())
        removed = len(columns["id"]) - self._rows
        # A quarter of the rows: compaction then costs each entry the copying of three rows.
        if removed > 1024 and removed * 4 > len(columns["id"]):
            self.compact()

    def mark_trained(self, ids: Iterable[int]) -> None:
        """Record that these are part of a recorded batch. Ids that are out of sampling are ignored."""
        for id_ in ids:
            if (row := self._find(id_)) is not None:
                self._columns["state"][row] = TRAINED
                self._note_change(self._columns["prompt"][row])

    def compact(self) -> None:
        """Drop the rows of removed entries. No result of any method changes."""
        live = self.column("state") != REMOVED
        self._fresh = int(np.count_nonzero(live[: self._fresh]))
        self._oldest = 0
        for name, column in self._columns.items():
            self._columns[name] = array(column.typecode, self.column(name)[live].tobytes())

    # ------------------------------------------------------------ questions

    def changed_since(self, changes: int) -> npt.NDArray[np.intp]:
        """Return the ordinals of the prompts that changed after `self.changes` had this value, in ascending order."""
        return np.flatnonzero(np.frombuffer(self._changed_at, np.int64) > changes)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return the values of all rows, to be used before the next change."""
        return np.frombuffer(self._columns[name], self._columns[name].typecode)

    def rows(self, ordinals: Iterable[int]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Return the rows of the entries of some prompts, of each oldest first, and how many each prompt has."""
        held = [self._held[ordinal][::2] for ordinal in ordinals]
        ids = np.fromiter(chain.from_iterable(held), np.int64)
        return np.searchsorted(self.column("id"), ids), np.array([len(own) for own in held], np.intp)

    def entry(self, row: int) -> Entry:
        """Return the entry of a row that is not removed."""
        id_, ordinal, step, reward, size, state = (self._columns[name][row] for name in _COLUMNS)
        dedup_hash = self._held[ordinal][2 * bisect_left(self._held[ordinal][::2], id_) + 1]
        return Entry(id_, self.prompt_ids[ordinal], step, reward, dedup_hash, state == TRAINED, size)

    # ------------------------------------------------------------ parts

    def _ordinal(self, prompt: int) -> int:
        ordinal = self._ordinals.setdefault(prompt, len(self.prompt_ids))
        if ordinal == len(self.prompt_ids):
            self.prompt_ids.append(prompt)
            self._held.append(array("q"))
            self._changed_at.append(0)
        return ordinal

    def _find(self, id_: int) -> int | None:
        """Return the row of an entry, None if there is none or it is removed."""
        ids = self._columns["id"]
        row = bisect_left(ids, id_)
        is_there = row < len(ids) and ids[row] == id_ and self._columns["state"][row] != REMOVED
        return row if is_there else None

    def _note_change(self, ordinal: int) -> None:
        self.changes += 1
        self._changed_at[ordinal] = self.changes

    def _exceeds_totals(self) -> bool:
        return (self._max_rows is not None and self._rows > self._max_rows) or (
            self._max_bytes is not None and self.payload_bytes > self._max_bytes
        )

    def _surplus(self, ordinal: int) -> int:
        """Return the row that leaves a prompt with one entry too many.

        newest: the oldest leaves; best: the lowest reward, the oldest of equal ones; reservoir: the largest keyed hash.
        """
        if self._limits.prompt_keep == "newest":
            return bisect_left(self._columns["id"], self._held[ordinal][0])
        rows: list[int] = self.rows([ordinal])[0].tolist()
        if self._limits.prompt_keep == "best":
            return min(rows, key=self._columns["reward"].__getitem__)
        return max(rows, key=self._columns["key"].__getitem__)

    def _oldest_row(self) -> int:
        while self._columns["state"][self._oldest] == REMOVED:
            self._oldest += 1
        return self._oldest

    def _largest_of_reservoir(self) -> int:
        """Return the row of the largest rank, once what is too old for the newest half has entered the reservoir."""
        state, rank = self._columns["state"], self._columns["rank"]
        assert self._max_rows is not None
        room = self._max_rows - self._max_rows // 2 if self._limits.keep == "both" else 0
        while self._fresh_count > room:
            if state[self._fresh] != REMOVED:
                self._fresh_count -= 1
                if rank[self._fresh] >= self._least:
                    insort(self._leaving, (rank[self._fresh], self._columns["id"][self._fresh]))
            self._fresh += 1
        while True:
            if not self._leaving:
                self._sort_reservoir()
            if (row := self._find(self._leaving.pop()[1])) is not None:
                return row

    def _sort_reservoir(self) -> None:
        """Find the entries of the reservoir with the largest ranks."""
        rows = np.flatnonzero(self.column("state")[: self._fresh] != REMOVED)
        ranks = self.column("rank")[rows]
        found = len(rows) - 1 - len(rows) // _SORTED_SHARE
        self._least = int(np.partition(ranks, found)[found])
        # All of an equal rank: the order of those is that of their ids.
        chosen = rows[ranks >= self._least].tolist()
        self._leaving = sorted((self._columns["rank"][row], self._columns["id"][row]) for row in chosen)

    def _remove(self, row: int) -> None:
        columns = self._columns
        ordinal = columns["prompt"][row]
        held = self._held[ordinal]
        position = 2 * bisect_left(held[::2], columns["id"][row])
        del held[position : position + 2]
        columns["state"][row] = REMOVED
        self._fresh_count -= self._with_ranks and row >= self._fresh
        self._rows -= 1
        self.payload_bytes -= columns["payload_bytes"][row]
        self._note_change(ordinal)


def keyed_hash(seed: int, id_: int) -> int:
    """Hash a seed and an id, or the context and step of a group, to 64 bits."""
    # A context of guided responses, or of a phase, has more than 32 bits: see `context_of`.
    return xxhash.xxh3_64_intdigest(id_.to_bytes(8 if id_ < 1 << 64 else 16, "little"), seed)
