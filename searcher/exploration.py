"""How each response explores: its temperature, its top-p and its seed, drawn for every sample of every visit.

Everything follows from (run seed, prompt, epoch, sample): not from the searcher, the order of the leases or the
batch a response happens to be in. So a run can be repeated, and a visit that is made again, after its searcher
died, is explored in the same way.
"""

import hashlib
import random

from tba.common.config import Explored, SearchSection
from tba.common.wire import Visit
from tba.searcher.engine import SamplingSettings

_SEED_BITS = 63  # what a torch.Generator and a msgpack integer both take


class Exploration:
    """Draws the sampling settings of a run's responses; `searcher` names the one that asks."""

    def __init__(self, config: SearchSection, *, run_seed: int, searcher: str) -> None:
        self._config = config
        self._run_seed = run_seed
        self._searcher = searcher
        # Seeds of its own for each response cost vLLM a generator per row of its batch (docs/benchmarks.md), and
        # would not repeat a run: there, a row's rounding depends on the other rows.
        self._seeded = config.engine == "transformers"

    def settings(self, visit: Visit, sample: int) -> SamplingSettings:
        """The settings of one response."""
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
        # repr keeps ("a", 11) and ("a1", 1) apart.
        digest = hashlib.blake2b(repr((self._run_seed, *parts)).encode(), digest_size=8).digest()
        return int.from_bytes(digest) >> (64 - _SEED_BITS)


def draw(explored: Explored, generator: random.Random) -> float:
    """One value: the only one, one of several alike, or one of a range in steps of 0.01.

    The steps keep the number of different settings small, and what is recorded readable.
    """
    if isinstance(explored, tuple):
        return generator.choice(explored)
    if isinstance(explored, dict):
        low, high = explored["min"], explored["max"]
        return min(max(round(generator.uniform(low, high), 2), low), high)
    return explored
