"""Make problems of reasoning-gym: `python -m tba.searcher.tasks.reasoning_items`, with an `Items` as JSON on stdin.

It prints [training problems, held-out problems] as JSON on stdout. Run it with PYTHONHASHSEED = 0: the problems then
depend on nothing but the settings and the version of reasoning-gym.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

# Problems that are made for each one that is asked for, before a generator counts as exhausted.
_ATTEMPTS = 4
# Between the seeds of training and of held-out problems.
_SEED_DISTANCE = 1_000_000_007
_TUPLE, _DICT = "!tuple", "!dict"


@dataclass(frozen=True, slots=True)
class Items:
    """The problems to make: (weight, settings) by generator, their numbers, and the seed."""

    generators: Mapping[str, tuple[float, Mapping[str, Any]]]
    size: int
    held_out_size: int
    seed: int

    def to_json(self) -> str:
        """Return the object as JSON."""
        return json.dumps(asdict(self))

    @property
    def counts(self) -> Mapping[str, tuple[int, int]]:
        """(training, held-out) problems of each generator, in proportion to the weights, at least one of each."""
        total = sum(weight for weight, _ in self.generators.values())
        shares = {name: weight / total for name, (weight, _) in self.generators.items()}
        return {name: (_part(self.size, share), _part(self.held_out_size, share)) for name, share in shares.items()}


def _part(size: int, share: float) -> int:
    return max(1, round(size * share)) if size else 0


def make(items: Items) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the training and the held-out problems. No question occurs twice, in either or in both."""
    training: list[dict[str, Any]] = []
    held_out: list[dict[str, Any]] = []
    for name, (size, held_out_size) in items.counts.items():
        _, settings = items.generators[name]
        seen: set[str] = set()
        # Held-out ones first: a generator with few different questions then has fewer training problems.
        held_out += _different(name, held_out_size, items.seed + _SEED_DISTANCE, settings, seen)
        training += _different(name, size, items.seed, settings, seen)
    # The first N, of `task.limit`, then have the proportions of all.
    return sorted(training, key=_order), sorted(held_out, key=_order)


def _order(problem: dict[str, Any]) -> str:
    return hashlib.sha256(problem["key"].encode()).hexdigest()


def _different(
    name: str, size: int, seed: int, settings: Mapping[str, Any], seen: set[str]
) -> Iterator[dict[str, Any]]:
    """Yield up to `size` problems whose questions are not in `seen`, and add them."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(name, size=size * _ATTEMPTS, seed=seed, **settings) if size else []
    made = 0
    for index in range(size * _ATTEMPTS):
        if made == size:
            return
        entry = dataset[index]
        if entry["question"] in seen:
            continue
        seen.add(entry["question"])
        made += 1
        yield {
            "key": f"{name}-{seed}-{index}",
            "generator": name,
            "question": entry["question"],
            "entry": encode_entry(entry),
        }


def encode_entry(value: Any) -> Any:
    """Return a value as JSON holds it, with tuples and other keys than strings marked, so that it can be restored."""
    if isinstance(value, tuple):
        return {_TUPLE: [encode_entry(item) for item in value]}
    if isinstance(value, list):
        return [encode_entry(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: encode_entry(item) for key, item in value.items()}
    if isinstance(value, dict):
        return {_DICT: [[encode_entry(key), encode_entry(item)] for key, item in value.items()]}
    # Scalars of NumPy.
    return value.item() if hasattr(value, "item") else value


def decode_entry(value: Any) -> Any:
    """Return the value that `encode_entry` was given."""
    if isinstance(value, list):
        return [decode_entry(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TUPLE}:
        return tuple(decode_entry(value[_TUPLE]))
    if value.keys() == {_DICT}:
        return {decode_entry(key): decode_entry(item) for key, item in value[_DICT]}
    return {key: decode_entry(item) for key, item in value.items()}


if __name__ == "__main__":
    json.dump(make(Items(**json.load(sys.stdin))), sys.stdout)
