"""Entries into an index, one by one or as blocks."""

from collections.abc import Sequence

from tba.buffer.index import Block, Entry, SamplingIndex

NAMES = ("id", "step", "reward", "dedup_hash", "taken", "payload_bytes")


def block_of(entries: Sequence[Entry]) -> Block:
    """Entries of one prompt as columns."""
    columns = {name: [getattr(entry, name) for entry in entries] for name in NAMES}
    return Block(prompt=entries[0].prompt, **columns)


def add(index: SamplingIndex, entry: Entry) -> None:
    """Insert one."""
    index.extend(block_of([entry]))
