"""How a batch is divided over ranks: everything once, evenly, and the same number of passes everywhere."""

import dataclasses

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tba.trainer.batch import by_length
from tba.trainer.follow import pack_batch, unpack_batch
from tba.trainer.shares import share, turns_of

from .tb_lab import make_batch, make_row, random_batch


@st.composite
def divided(draw):
    """A batch of K samples per prompt, and how many ranks there are."""
    prompts, samples, ranks = draw(st.integers(0, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    tokens = draw(st.lists(st.integers(1, 90), min_size=prompts * samples, max_size=prompts * samples))
    groups = [range(b * samples, (b + 1) * samples) for b in range(prompts)]
    limit, overhead = draw(st.integers(1, 400)), draw(st.integers(0, 100))

    def passes_of(lengths):
        return by_length(lengths, overhead)

    turns = [turns_of(groups, tokens, limit=limit, passes_of=passes_of, rank=r, ranks=ranks) for r in range(ranks)]
    return groups, tokens, overhead, limit, turns


@given(divided())
def test_every_group_has_one_turn_on_one_rank(case):
    groups, _, _, _, turns = case
    assert sorted(group for of_rank in turns for turn in of_rank for group in turn.groups) == list(range(len(groups)))


@given(divided())
def test_ranks_make_the_same_passes_and_each_piece_has_enough_of_them(case):
    groups, tokens, overhead, _, turns = case
    assert len({tuple(tuple(piece.passes for piece in turn.pieces) for turn in of_rank) for of_rank in turns}) == 1
    for turn in (turn for of_rank in turns for turn in of_rank):
        rows = [tokens[row] for group in turn.groups for row in groups[group]]
        for piece in turn.pieces:
            assert piece.passes >= max(len(by_length(rows[piece.rows], overhead)), 1)


@given(divided())
def test_pieces_are_all_rows_in_their_order_and_only_a_single_row_is_over_the_limit(case):
    groups, tokens, _, limit, turns = case
    for turn in (turn for of_rank in turns for turn in of_rank):
        rows = [tokens[row] for group in turn.groups for row in groups[group]]
        pieces = [rows[piece.rows] for piece in turn.pieces]
        assert [row for piece in pieces for row in piece] == rows
        assert all(sum(piece) <= limit or len(piece) == 1 for piece in pieces)


@given(divided())
def test_a_turn_has_more_than_one_piece_only_for_a_group_that_is_over_the_limit(case):
    groups, tokens, _, limit, turns = case
    for at_once in zip(*turns, strict=True):
        largest = max(
            (sum(tokens[row] for row in groups[group]) for turn in at_once for group in turn.groups), default=0
        )
        assert (len(at_once[0].pieces) > 1) <= (largest > limit)


@given(st.lists(st.integers(1, 100), min_size=1), st.integers(1, 6))
def test_no_rank_has_more_than_the_least_by_over_one_item(sizes, ranks):
    loads = [sum(sizes[item] for item in items) for items in share(sizes, ranks)]
    assert max(loads) - min(loads) <= max(sizes)


def test_a_batch_arrives_on_the_other_ranks_as_it_is():
    rows = [*random_batch(1).rows, make_row(2**40, [1, 2], [], on_policy=True)]
    rows[3] = dataclasses.replace(rows[3], loss_mask=np.zeros_like(rows[3].loss_mask))
    sent = make_batch(rows, np.random.default_rng(0).random((len(rows), 1)), step=7)
    sent.reference_BK[2] = -1.5
    got = unpack_batch(pack_batch(sent))
    assert got.step == 7
    for name in ("reward_BK", "reference_BK", "staleness_BK"):
        assert torch.equal(getattr(got, name).nan_to_num(9.0), getattr(sent, name).nan_to_num(9.0))
    for mine, theirs in zip(got.rows, sent.rows, strict=True):
        for field in dataclasses.fields(theirs):
            a, b = getattr(mine, field.name), getattr(theirs, field.name)
            assert type(a) is type(b)
            assert np.array_equal(a, b)
            assert np.asarray(a).dtype == np.asarray(b).dtype
