"""Which trajectories leave sampling when there are too many. What leaves stays in history.

Invariant: who leaves depends on ids, rewards and sizes alone, never on training or on a random state. So a
rebuild from history takes out the same ones.
"""

from array import array
from dataclasses import dataclass
from typing import Literal

from tba.buffer.slots import NONE, Slots

Keep = Literal["newest", "best", "reservoir"]
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What stays sampleable. `seed` is for the reservoir; None is no limit."""

    prompt_cap: int
    dedup: bool
    keep: Keep = "newest"
    max_rows: int | None = None
    max_bytes: int | None = None
    seed: int = 0


def surplus(slots: Slots, head: int, keep: Keep) -> tuple[int, int]:
    """Who leaves a prompt that has one entry too many: (the slot before it or NONE, its slot).

    newest: the oldest. best: the lowest reward, of equal ones the oldest. reservoir: the largest keyed hash of
    the id: those that stay are the ones with the smallest hashes, which is a uniform sample of all that came.
    """
    if keep == "newest":
        return NONE, head
    if keep == "best":
        return _least(slots, head, slots.reward, 1)
    assert slots.key is not None
    return _least(slots, head, slots.key, -1)


def _least(slots: Slots, head: int, column: "array[int] | array[float]", sign: int) -> tuple[int, int]:
    found, least = (NONE, head), sign * column[head]
    previous, slot = head, slots.next[head]
    while slot != NONE:
        if sign * column[slot] < least:
            found, least = (previous, slot), sign * column[slot]
        previous, slot = slot, slots.next[slot]
    return found


def keyed_hash(seed: int, id_: int) -> int:
    """64 mixed bits of a seed and an id: the finaliser of SplitMix64, twice."""
    return _mix(_mix(seed & _MASK) ^ id_)


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
