"""Which trajectories leave sampling when a prompt has too many. They stay in the database.

Invariant: the choice depends on ids, rewards and the seed alone, never on training or on the state of a random
generator. So an index that is rebuilt from the database removes the same ones.
"""

from array import array

from tba.buffer.sampling.entry_columns import NONE, EntryColumns
from tba.buffer.sampling.rules import Keep

_MASK = (1 << 64) - 1


def surplus(columns: EntryColumns, head: int, keep: Keep) -> tuple[int, int]:
    """Return the entry that leaves a prompt with one entry too many: (the row before it or NONE, its row).

    newest: the oldest leaves. best: the lowest reward leaves, the oldest of equal ones. reservoir: the largest keyed
    hash of the id leaves; the entries with the smallest hashes are a uniform sample of all that arrived.
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
    """Hash a seed and an id to 64 well-mixed bits: the finaliser of SplitMix64, applied twice."""
    return _mix(_mix(seed & _MASK) ^ id_)


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
