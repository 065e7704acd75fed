"""Rows are cut into batches by their tokens."""

import pytest

from tba.common.token_batches import cut_by_tokens

BATCHES: list[tuple[list[int], int, dict[str, int], list[list[int]]]] = [
    ([3, 10, 9, 30, 2], 20, {}, [[3], [1, 2], [0, 4]]),
    ([5, 5, 5], 10, {}, [[0, 1], [2]]),
    ([], 10, {}, []),
    ([10, 1, 1], 20, {}, [[0, 1, 2]]),
    ([3, 10, 9, 30, 2], 20, {"padded": True}, [[3], [1, 2], [0, 4]]),
    ([10, 1, 1], 20, {"padded": True}, [[0, 1], [2]]),
    ([1, 10, 1], 20, {"padded": True, "in_order": True}, [[0, 1], [2]]),
    ([3, 10, 9, 30, 2], 20, {"in_order": True}, [[0, 1], [2], [3], [4]]),
    ([1, 1, 1], 20, {"max_rows": 2}, [[0, 1], [2]]),
]


@pytest.mark.parametrize(("lengths", "limit", "options", "batches"), BATCHES)
def test_rows_are_cut_within_the_limit_longest_first_or_in_order(lengths, limit, options, batches):
    assert cut_by_tokens(lengths, limit, **options) == batches
