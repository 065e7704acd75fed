"""How a batch is divided over ranks and cut into micro-batches.

FSDP gathers a layer's weights from all ranks at each forward and backward pass: every rank has to make the same
number of both, in the same order, whatever its share of the batch is. So the shares of all ranks are computed on each
of them, and a rank with less to do makes passes over nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tba.trainer.batch import cut


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a micro-batch, in their order there, maybe none, and how many forward passes all ranks make."""

    rows: slice
    passes: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One micro-batch of a rank: indices of whole groups, maybe none, and its rows in pieces.

    There is one piece, unless some rank has a group here that is over the limit by itself.
    """

    groups: list[int]
    pieces: list[Piece]


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
    """The micro-batches of a rank: as many on every rank, of as many pieces and passes.

    `groups` are indices into `tokens`, the length of each row; `limit` is `cut`'s and `passes_of` the scorer's.
    """
    parts = [
        [[mine[index] for index in part] for part in cut([groups[group] for group in mine], tokens.__getitem__, limit)]
        for mine in share([sum(tokens[row] for row in group) for group in groups], ranks)
    ]
    turns = []
    for turn in range(max(map(len, parts))):
        at_once = [of_rank[turn] if turn < len(of_rank) else [] for of_rank in parts]
        lengths = [[tokens[row] for group in part for row in groups[group]] for part in at_once]
        turns.append(Turn(at_once[rank], _pieces(lengths, limit, passes_of, rank)))
    return turns


def _pieces(
    lengths: Sequence[Sequence[int]],
    limit: int,
    passes_of: Callable[[Sequence[int]], Sequence[Sequence[int]]],
    rank: int,
) -> list[Piece]:
    """The pieces of a rank's rows in one turn, of which every rank knows the `lengths` of all."""
    cuts = [_within(of_rank, limit) for of_rank in lengths]
    pieces = []
    for number in range(max(map(len, cuts))):
        at_once = [cut_[number] if number < len(cut_) else slice(0, 0) for cut_ in cuts]
        passes = (passes_of(of_rank[rows]) for of_rank, rows in zip(lengths, at_once, strict=True))
        pieces.append(Piece(at_once[rank], max(map(len, passes))))
    return pieces


def _within(lengths: Sequence[int], limit: int) -> list[slice]:
    """Cut rows, in their order, into as long pieces as are within the limit; a row over it stands alone."""
    starts, tokens = [0], 0
    for row, length in enumerate(lengths):
        if tokens and tokens + length > limit:
            starts.append(row)
            tokens = 0
        tokens += length
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], len(lengths)], strict=True)]
