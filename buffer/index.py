"""The sampling index: what can be sampled, in memory, rebuilt from the database at start.

    put ──► live ──► trained ──► (over the prompt's cap, or an identical newer one) out of sampling
                                  the row stays in the database for ever

Invariant: after any sequence of puts and trainings, the index equals one rebuilt from the database.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Entry:
    """One sampleable trajectory. `step` is the optimiser step of the policy that generated it."""

    id: int
    prompt: int
    step: int
    reward: float
    dedup_hash: int
    trained: bool = False


@dataclass(slots=True)
class _Prompt:
    entries: OrderedDict[int, Entry] = field(default_factory=OrderedDict)  # by dedup hash or id, oldest first


class SamplingIndex:
    """Entries grouped by prompt, at most `cap` each, identical responses once if `dedup`."""

    def __init__(self, *, cap: int, dedup: bool) -> None:
        self._cap = cap
        self._dedup = dedup
        self._prompts: dict[int, _Prompt] = {}
        self._by_id: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, entry: Entry) -> None:
        """Insert an entry; the oldest, or its identical twin, leaves sampling if there are too many."""
        entries = self._prompts.setdefault(entry.prompt, _Prompt()).entries
        key = entry.dedup_hash if self._dedup else entry.id
        twin = entries.pop(key, None)
        if twin is not None:
            del self._by_id[twin.id]
        entries[key] = entry
        self._by_id[entry.id] = entry
        if len(entries) > self._cap:
            _, oldest = entries.popitem(last=False)
            del self._by_id[oldest.id]

    def mark_trained(self, ids: Iterator[int] | list[int]) -> None:
        """Remember that these were trained on. Ids that left sampling are ignored."""
        for id_ in ids:
            if (entry := self._by_id.get(id_)) is not None:
                entry.trained = True

    def prompts(self) -> list[int]:
        """Prompts with at least one entry, in the order of their first."""
        return list(self._prompts)

    def entries(self, prompt: int) -> list[Entry]:
        """The entries of a prompt, oldest first."""
        return list(self._prompts[prompt].entries.values())

    def fresh_prompts(self, min_step: int) -> set[int]:
        """Prompts that have an entry of at least this policy step that was never trained on."""
        return {
            prompt
            for prompt, group in self._prompts.items()
            if any(not entry.trained and entry.step >= min_step for entry in reversed(group.entries.values()))
        }
