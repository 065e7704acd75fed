"""How a batch is divided over ranks and cut into micro-batches.

FSDP gathers a layer's weights from all ranks at each forward and backward pass: every rank has to make the same
number of both, in the same order, whatever its share of the batch is. So the shares of all ranks are computed on each
of them, and a rank with less to do makes passes over nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tba.trainer.batch import cut


@dataclass(frozen=True, slots=True)
class Turn:
    """One micro-batch of a rank: indices of whole groups, maybe none, and how many forward passes all ranks make."""

    groups: list[int]
    passes: int


def share(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Divide items over ranks, the largest first, each to the rank that has least. Returns indices for each rank."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for item in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        least = loads.index(min(loads))
        shares[least].append(item)
        loads[least] += sizes[item]
    return shares


def turns_of(
    groups: Sequence[Sequence[int]],
    tokens: Sequence[int],
    *,
    limit: int,
    passes_of: Callable[[Sequence[int]], Sequence[Sequence[int]]],
    rank: int,
    ranks: int,
) -> list[Turn]:
    """The micro-batches of a rank: as many on every rank, of as many passes.

    `groups` are indices into `tokens`, the length of each row; `limit` is `cut`'s and `passes_of` the scorer's.
    """
    parts = [
        [[mine[index] for index in part] for part in cut([groups[group] for group in mine], tokens.__getitem__, limit)]
        for mine in share([sum(tokens[row] for row in group) for group in groups], ranks)
    ]
    turns = []
    for turn in range(max(map(len, parts))):
        at_once = [of_rank[turn] if turn < len(of_rank) else [] for of_rank in parts]
        passes = (passes_of([tokens[row] for group in part for row in groups[group]]) for part in at_once)
        turns.append(Turn(at_once[rank], max(map(len, passes))))
    return turns
