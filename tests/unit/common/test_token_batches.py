"""Rows are cut into batches by their tokens."""

from tba.common.token_batches import cut_by_tokens


def test_rows_are_cut_longest_first_within_the_limit():
    assert cut_by_tokens([3, 10, 9, 30, 2], 20) == [[3], [1, 2], [0, 4]]
    assert cut_by_tokens([5, 5, 5], 10) == [[0, 1], [2]]
    assert cut_by_tokens([], 10) == []


def test_padding_counts_when_batches_are_padded():
    assert cut_by_tokens([3, 10, 9, 30, 2], 20, padded=True) == [[3], [1, 2], [0, 4]]
    assert cut_by_tokens([10, 1, 1], 20) == [[0, 1, 2]]
    assert cut_by_tokens([10, 1, 1], 20, padded=True) == [[0, 1], [2]]
    assert cut_by_tokens([1, 10, 1], 20, padded=True, in_order=True) == [[0, 1], [2]]


def test_rows_can_keep_their_order_and_a_batch_its_number_of_rows():
    assert cut_by_tokens([3, 10, 9, 30, 2], 20, in_order=True) == [[0, 1], [2], [3], [4]]
    assert cut_by_tokens([1, 1, 1], 20, max_rows=2) == [[0, 1], [2]]
