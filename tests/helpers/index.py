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


def entries_of(index: SamplingIndex) -> dict[int, list[Entry]]:
    """Return the entries of an index by prompt, oldest first, in the order of the prompts' first appearance."""
    rows = {prompt: index.rows([ordinal])[0].tolist() for ordinal, prompt in enumerate(index.prompt_ids)}
    return {prompt: [index.entry(row) for row in own] for prompt, own in rows.items() if own}


def kept_ids(index: SamplingIndex) -> list[int]:
    """Return the ids of the entries of an index."""
    return sorted(entry.id for entries in entries_of(index).values() for entry in entries)
