"""The plan of a step: a batch divided over ranks, then into micro-batches, chunks and forward passes.

    batch       all rows of a step
    rank        whole prompt groups, about the same number of tokens for each rank
    micro-batch whole groups within `train.micro_batch_tokens`; its loss is computed from all rows together
    chunk       rows that share one autograd graph: all of the micro-batch, unless a single group exceeds the limit
    pass        sequences of similar length that go through the model together; most rows are one sequence

FSDP gathers a layer's weights from all ranks in each forward and backward pass, so every rank must make the same
number of both, in the same order, however many rows it has. Each rank therefore computes the plan of all ranks, and
one that has less to do makes empty passes.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tba.common.token_batches import cut_by_tokens

# What one more forward pass costs, in tokens: below it, padding is cheaper than another pass. On an H200 padded steps
# of 1.5 B parameters made 12,500 tokens per second with 4,096, and 7,800 with 1,024 (docs/gpu).
CPU_PASS_TOKENS = 64
GPU_PASS_TOKENS = 4096

# Returns the forward passes over rows of some lengths, as indices.
Split = Callable[[Sequence[int]], list[list[int]]]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A slice of a micro-batch's rows, possibly empty, and the forward passes over them.

    `passes` are indices into the sequences of the chunk's rows, each exactly once. All ranks have the same number of
    passes; those that this rank does not need are empty.
    """

    rows: slice
    passes: list[list[int]]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch of one rank: indices of whole groups and of their rows in the batch, both possibly empty."""

    groups: list[int]
    rows: list[int]
    chunks: list[Chunk]


def micro_batches(
    lengths: Sequence[Sequence[int]], group_size: int, *, limit: int, split: Split, rank: int, ranks: int
) -> list[MicroBatch]:
    """Return the micro-batches of one rank. All ranks have equally many, of equally many chunks and passes.

    `lengths` are the tokens of the sequences of each row, of which `group_size` after one another form a group; `limit`
    is the largest number of tokens of a chunk with more than one row. `split` divides a chunk into forward passes.
    """
    groups = [range(first, first + group_size) for first in range(0, len(lengths), group_size)]
    sizes = [sum(sum(lengths[row]) for row in group) for group in groups]
    parts_of_ranks = [
        [[mine[index] for index in part] for part in cut_by_tokens([sizes[group] for group in mine], limit)]
        for mine in partition(sizes, ranks)
    ]
    plan = []
    for parts in itertools.zip_longest(*parts_of_ranks, fillvalue=[]):
        rows_of_ranks = [[row for group in part for row in groups[group]] for part in parts]
        lengths_of_ranks = [[lengths[row] for row in rows] for rows in rows_of_ranks]
        plan.append(MicroBatch(parts[rank], rows_of_ranks[rank], _chunks(lengths_of_ranks, limit, split, rank)))
    return plan


def partition(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Divide items over ranks, the largest first, each to the rank with the least so far. Returns indices per rank."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for item in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        least = loads.index(min(loads))
        parts[least].append(item)
        loads[least] += sizes[item]
    return parts


def _chunks(lengths_of_ranks: Sequence[Sequence[Sequence[int]]], limit: int, split: Split, rank: int) -> list[Chunk]:
    """Return the chunks of one rank in a micro-batch, given the lengths of every rank's rows in it."""
    slices_of_ranks = [
        [slice(part[0], part[-1] + 1) for part in cut_by_tokens(list(map(sum, lengths)), limit, in_order=True)]
        for lengths in lengths_of_ranks
    ]
    chunks = []
    for slices in itertools.zip_longest(*slices_of_ranks, fillvalue=slice(0, 0)):
        passes_of_ranks = [
            split(list(itertools.chain(*lengths[rows]))) for lengths, rows in zip(lengths_of_ranks, slices, strict=True)
        ]
        mine, count = passes_of_ranks[rank], max(map(len, passes_of_ranks))
        chunks.append(Chunk(slices[rank], [*mine, *([] for _ in range(count - len(mine)))]))
    return chunks


def forward_passes(lengths: Sequence[int], overhead: int | None) -> list[list[int]]:
    """Split rows into forward passes of similar lengths so that the least is computed.

    A pass costs its number of rows times the longest of them, plus `overhead`, in tokens. With `overhead` None all
    rows go into one pass, without padding. Returns indices into `lengths`, each exactly once.
    """
    if overhead is None:
        return [list(range(len(lengths)))] if lengths else []
    # In an optimal split each pass is a run of the rows sorted by length: swapping a longer row of one pass for a
    # shorter row of another never costs more. So dynamic programming over the sorted rows finds it, in O(N^2).
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    # The least cost of the first n rows, and where the last pass of that split starts.
    best = np.zeros(len(order) + 1)
    start_of = np.zeros(len(order) + 1, int)
    for end in range(1, len(order) + 1):
        costs = best[:end] + np.arange(end, 0, -1) * lengths[order[end - 1]]
        start_of[end] = int(costs.argmin())
        best[end] = costs[start_of[end]] + overhead
    passes, end = [], len(order)
    while end > 0:
        passes.append(order[start_of[end] : end])
        end = start_of[end]
    return passes
