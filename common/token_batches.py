"""Cutting rows into batches that stay within a number of tokens."""

from collections.abc import Sequence


def cut_by_tokens(
    lengths: Sequence[int], limit: int, *, padded: bool = False, in_order: bool = False, max_rows: int | None = None
) -> list[list[int]]:
    """Cut rows of these lengths (tokens) into batches of at most `limit` tokens and `max_rows` rows.

    Returns indices into `lengths`, each exactly once: longest first (equal lengths in their order), or `in_order`.
    With `padded`, every row of a batch costs as much as its longest one. A row over the limit is a batch by itself.
    """
    order = range(len(lengths)) if in_order else sorted(range(len(lengths)), key=lambda row: -lengths[row])
    batches: list[list[int]] = []
    tokens = longest = 0
    for row in order:
        if batches:
            longest = max(longest, lengths[row])
            tokens = (len(batches[-1]) + 1) * longest if padded else tokens + lengths[row]
        if not batches or tokens > limit or len(batches[-1]) == max_rows:
            batches.append([])
            tokens = longest = lengths[row]
        batches[-1].append(row)
    return batches
