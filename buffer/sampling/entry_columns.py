"""The entries of the sampling index as flat typed columns.

Invariant: rows are in the order of ids, which only grow. So a bisection finds the row of an id, and the oldest entry
is the first row that is not removed. An object per entry would take 200 bytes and more; a row here takes 41.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

NONE = -1
# The states of a row: out of sampling; never part of a recorded batch; part of one.
REMOVED, UNTRAINED, TRAINED = range(3)
_COLUMNS = ("id", "prompt", "step", "reward", "dedup_hash", "payload_bytes", "state", "next")


def context_of(prompt: int, guided: int | None, phase: int | None) -> int:
    """Return the number under which the sampler groups responses: one for each prompt, beginning and phase.

    `guided` is the number of tokens that were given to the response, None for none; `phase` is that of its reward, None
    for the reward without phases. Each beginning has a log Z of its own and each phase another reward, so no group may
    mix two. Without either it is the id of the prompt, which has at most 32 bits.
    """
    return prompt + ((guided or 0) << 32) + ((0 if phase is None else phase + 1) << 56)


@dataclass(frozen=True, slots=True)
class Block:
    """Entries of one prompt as columns of equal length, in the order of their ids: see `index.Entry`.

    `prompt` is what `context_of` returns.
    """

    prompt: int
    id: Sequence[int]
    step: Sequence[int]
    reward: Sequence[float]
    dedup_hash: Sequence[int]
    trained: Sequence[bool]
    payload_bytes: Sequence[int]

    def __len__(self) -> int:
        return len(self.id)

    def without_duplicates(self) -> "Block":
        """Keep only the last of the entries with the same hash."""
        last = {dedup_hash: position for position, dedup_hash in enumerate(self.dedup_hash)}
        if len(last) == len(self):
            return self
        kept = sorted(last.values())
        return Block(self.prompt, *([column[position] for position in kept] for column in self._columns()))

    def single_entries(self) -> Iterator["Block"]:
        """Yield each entry as a block of its own."""
        for values in zip(*self._columns(), strict=True):
            yield Block(self.prompt, *([value] for value in values))

    def _columns(self) -> tuple[Sequence[Any], ...]:
        return (self.id, self.step, self.reward, self.dedup_hash, self.trained, self.payload_bytes)


class EntryColumns:
    """Columns of equal length; removed rows stay until `compact`.

    `prompt` is the prompt's ordinal in the index, `next` the row of the same prompt's next entry.
    """

    def __init__(self, *, with_keys: bool, with_ranks: bool) -> None:
        self.id = array("q")
        self.prompt = array("i")
        self.step = array("i")
        self.reward = array("d")
        self.dedup_hash = array("q")
        self.payload_bytes = array("I")
        self.state = array("B")
        self.next = array("i")
        self.key = array("Q") if with_keys else None
        self.rank = array("Q") if with_ranks else None

    def __len__(self) -> int:
        return len(self.id)

    def extend(self, prompt: int, block: Block) -> int:
        """Add the entries of the prompt with this ordinal, each linked to the next. Return the row of the first."""
        first, count = len(self.id), len(block)
        self.id.extend(block.id)
        self.prompt.extend(array("i", [prompt]) * count)
        self.step.extend(block.step)
        self.reward.extend(block.reward)
        self.dedup_hash.extend(block.dedup_hash)
        self.payload_bytes.extend(block.payload_bytes)
        self.state.extend([TRAINED if is_trained else UNTRAINED for is_trained in block.trained])
        self.next.extend(range(first + 1, first + count))
        self.next.append(NONE)
        return first

    def find(self, id_: int) -> int:
        """Return the row of an id, NONE if there is none."""
        row = bisect_left(self.id, id_)
        return row if row < len(self.id) and self.id[row] == id_ else NONE

    def compact(self) -> npt.NDArray[np.int32]:
        """Drop the removed rows. Return the new row of each old one, for `renumbered`."""
        live = np.frombuffer(self.state, np.uint8) != REMOVED
        new_rows = np.cumsum(live, dtype=np.int32) - 1
        for name in (*_COLUMNS, "key", "rank"):
            if (column := getattr(self, name)) is None:
                continue
            rows = np.frombuffer(column, dtype=column.typecode)[live]
            setattr(self, name, array(column.typecode, rows.tobytes()))
        self.next = renumbered(self.next, new_rows)
        return new_rows


def renumbered(links: "array[int]", new_rows: npt.NDArray[np.int32]) -> "array[int]":
    """Return links to live rows, or NONE, as they are after a compaction."""
    rows = np.array(links, np.int32)
    linked = rows != NONE
    rows[linked] = new_rows[rows[linked]]
    return array("i", rows.tobytes())
