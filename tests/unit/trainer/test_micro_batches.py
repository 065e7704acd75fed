"""The plan of a step: each row exactly once, balanced over ranks, and equally many passes on every rank."""

import dataclasses
import itertools
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tba.tests.helpers.trainer import make_batch, make_row, random_batch
from tba.trainer.batch.batch import pack_batch, unpack_batch
from tba.trainer.batch.micro_batches import MicroBatch, forward_passes, micro_batches, partition


@dataclasses.dataclass
class Case:
    """The plans of all ranks for rows of some lengths in groups."""

    # The tokens of the sequences of each row.
    sequences: list[list[int]]
    group_size: int
    limit: int
    overhead: int | None
    plans: list[list[MicroBatch]]

    @property
    def lengths(self) -> list[int]:
        return list(map(sum, self.sequences))

    def micro_batches(self) -> Iterator[MicroBatch]:
        return itertools.chain(*self.plans)

    def size(self, group: int) -> int:
        return sum(self.lengths[group * self.group_size : (group + 1) * self.group_size])


@st.composite
def cases(draw):
    prompts, samples, ranks = draw(st.integers(0, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    sequences = st.lists(st.integers(1, 90), min_size=1, max_size=3)
    lengths = draw(st.lists(sequences, min_size=prompts * samples, max_size=prompts * samples))
    limit, overhead = draw(st.integers(1, 400)), draw(st.none() | st.integers(0, 100))
    plans = [
        micro_batches(
            lengths,
            samples,
            limit=limit,
            split=partial(forward_passes, overhead=overhead),
            rank=rank,
            ranks=ranks,
        )
        for rank in range(ranks)
    ]
    return Case(lengths, samples, limit, overhead, plans)


@given(cases())
def test_every_group_is_in_one_micro_batch_of_one_rank_with_all_of_its_rows(case):
    groups = [group for micro_batch in case.micro_batches() for group in micro_batch.groups]
    assert sorted(groups) == list(range(len(case.lengths) // case.group_size))
    for micro_batch in case.micro_batches():
        rows = [range(group * case.group_size, (group + 1) * case.group_size) for group in micro_batch.groups]
        assert micro_batch.rows == list(itertools.chain(*rows))


@given(cases())
def test_all_ranks_make_the_same_number_of_passes(case):
    counts = [tuple(tuple(len(c.passes) for c in m.chunks) for m in plan) for plan in case.plans]
    assert len(set(counts)) == 1
    assert all(count for plan in counts for chunks in plan for count in chunks)


@given(cases())
def test_chunks_cover_the_rows_in_order_and_passes_cover_each_chunk(case):
    for micro_batch in case.micro_batches():
        lengths = [case.lengths[row] for row in micro_batch.rows]
        assert [length for chunk in micro_batch.chunks for length in lengths[chunk.rows]] == lengths
        for chunk in micro_batch.chunks:
            in_chunk = list(itertools.chain(*[case.sequences[row] for row in micro_batch.rows[chunk.rows]]))
            assert sum(in_chunk) <= case.limit or len(lengths[chunk.rows]) == 1
            assert [part for part in chunk.passes if part] == forward_passes(in_chunk, case.overhead)


@given(cases())
def test_there_are_several_chunks_only_where_some_group_exceeds_the_limit(case):
    for at_once in zip(*case.plans, strict=True):
        largest = max((case.size(group) for micro_batch in at_once for group in micro_batch.groups), default=0)
        assert (len(at_once[0].chunks) > 1) <= (largest > case.limit)


@given(st.lists(st.integers(1, 100), min_size=1), st.integers(1, 6))
def test_loads_of_ranks_differ_by_at_most_one_item(sizes, ranks):
    loads = [sum(sizes[item] for item in items) for items in partition(sizes, ranks)]
    assert max(loads) - min(loads) <= max(sizes)


@pytest.mark.parametrize(("limit", "expected"), [(30, [[0, 2, 1]]), (22, [[0, 2], [1]]), (18, [[0], [2, 1]])])
def test_micro_batches_are_whole_groups_within_the_limit(limit, expected):
    plan = micro_batches(
        [[3], [9], [4], [4], [8], [2]], 2, limit=limit, split=partial(forward_passes, overhead=None), rank=0, ranks=1
    )
    assert [micro_batch.groups for micro_batch in plan] == expected


def test_passes_have_similar_lengths_and_are_as_few_as_their_overhead_asks_for():
    assert forward_passes([10, 100, 11, 99], 20) == [[3, 1], [0, 2]]
    assert forward_passes([10, 100, 11, 99], 1000) == [[0, 2, 3, 1]]
    assert forward_passes([7, 7, 7], 0) == [[0, 1, 2]]
    assert forward_passes([10, 100, 11, 99], None) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("overhead", [0, 5, 64])
def test_no_other_split_into_passes_costs_less(overhead):
    rng = np.random.default_rng(overhead)
    lengths = rng.integers(1, 60, size=8).tolist()

    def cost(passes):
        return sum(len(part) * max(lengths[n] for n in part) + overhead for part in passes)

    order = sorted(range(8), key=lengths.__getitem__)
    cuts = [[c for c in range(1, 8) if bits >> c & 1] for bits in range(256)]
    every = [[order[a:b] for a, b in itertools.pairwise([0, *cut_at, 8])] for cut_at in cuts]
    found = forward_passes(lengths, overhead)
    assert sorted(n for part in found for n in part) == list(range(8))
    assert cost(found) == min(map(cost, every))


def test_a_batch_is_equal_on_the_other_ranks():
    rows = [*random_batch(1).rows, make_row(2**40, [1, 2], [], on_policy=True)]
    rows[3] = dataclasses.replace(rows[3], loss_mask=np.zeros_like(rows[3].loss_mask))
    sent = make_batch(rows, np.random.default_rng(0).random((len(rows), 1)), step=7)
    rows[4] = dataclasses.replace(rows[4], segments=np.array([1], np.int32))
    sent = dataclasses.replace(make_batch(rows, sent.reward_BK, step=7), turn_rewards=[[0.5]] * len(rows))
    sent.reference_BK[2] = -1.5
    received = unpack_batch(pack_batch(sent))
    assert (received.step, received.turn_rewards) == (7, sent.turn_rewards)
    for name in ("reward_BK", "reference_BK", "staleness_BK"):
        assert torch.equal(getattr(received, name).nan_to_num(9.0), getattr(sent, name).nan_to_num(9.0))
    for mine, theirs in zip(received.rows, sent.rows, strict=True):
        for field in dataclasses.fields(theirs):
            a, b = getattr(mine, field.name), getattr(theirs, field.name)
            assert type(a) is type(b)
            assert np.array_equal(a, b)
            assert np.asarray(a).dtype == np.asarray(b).dtype
