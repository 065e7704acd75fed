"""Insert entries into a sampling index."""

from collections.abc import Sequence

from tba.buffer.sampling.index import Block, Entry, SamplingIndex

NAMES = ("id", "step", "reward", "dedup_hash", "trained", "payload_bytes")


def block_of(entries: Sequence[Entry]) -> Block:
    """Return entries of one prompt as a block."""
    columns = {name: [getattr(entry, name) for entry in entries] for name in NAMES}
    return Block(prompt=entries[0].prompt, **columns)


def add(index: SamplingIndex, entry: Entry) -> None:
    """Insert one entry."""
    index.extend(block_of([entry]))
