"""Exploration: the temperature, top-p and seed of each response.

All draws follow from (run seed, prompt, epoch, sample), and not from the order of leases or the batch that a response
happens to be in. So a run can be repeated, and a visit that is leased again after its searcher died is explored in the
same way.
"""

import hashlib
import random

from tba.common.config import Explored, SearchSection
from tba.common.wire.messages import Visit
from tba.searcher.engines.engine import SamplingSettings

# Both a torch.Generator and a msgpack integer accept this many bits.
_SEED_BITS = 63


class Exploration:
    """Draws the sampling settings of a run's responses. `searcher` is this one's name, for `explore = "searcher"`."""

    def __init__(self, config: SearchSection, *, run_seed: int, searcher: str) -> None:
        self._config = config
        self._run_seed = run_seed
        self._searcher = searcher
        # Per-response seeds cost vLLM one generator per row of its batch (docs/design.md), and would not make a run
        # repeatable: in vLLM the rounding of a row depends on the other rows.
        self._seeded = config.engine == "transformers"

    def settings(self, visit: Visit, sample: int) -> SamplingSettings:
        """Return the settings of one sample of a visit."""
        unit = {"sample": (visit.prompt_key, visit.epoch, sample), "group": (visit.prompt_key, visit.epoch)}
        drawn_for = unit.get(self._config.explore, (self._searcher,))
        generator = random.Random(self._hash("settings", *drawn_for))  # noqa: S311
        return SamplingSettings(
            temperature=draw(self._config.temperature, generator),
            top_p=draw(self._config.top_p, generator),
            max_tokens=self._config.max_tokens,
            seed=self._hash("response", visit.prompt_key, visit.epoch, sample) if self._seeded else None,
        )

    def _hash(self, *parts: str | int) -> int:
        # repr distinguishes ("a", 11) from ("a1", 1).
        digest = hashlib.blake2b(repr((self._run_seed, *parts)).encode(), digest_size=8).digest()
        return int.from_bytes(digest) >> (64 - _SEED_BITS)


def draw(explored: Explored, generator: random.Random) -> float:
    """Draw one value: the only one, one of a list with equal probability, or one of a range in steps of 0.01.

    The steps keep the number of distinct settings small and the recorded values readable.
    """
    if isinstance(explored, tuple):
        return generator.choice(explored)
    if isinstance(explored, dict):
        low, high = explored["min"], explored["max"]
        return min(max(round(generator.uniform(low, high), 2), low), high)
    return explored
