"""Prompts of a searcher's own choice, for the time that the buffer is away and no lease can be had."""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from tba.common.config import Config
from tba.common.wire import NO_VISIT, Visit
from tba.searcher.tasks.task import Prompt


class UnleasedPrompts:
    """An endless shuffle of the task's prompts, another one for each searcher and start.

    What they give are rows without a visit: they are trained on, and the epoch order goes on without them, so that
    no prompt is skipped. Where the buffer limits what searchers may be ahead, nothing is generated without asking.
    """

    def __init__(self, prompts: Sequence[Prompt], config: Config, sender: str) -> None:
        self.allowed = config.max_staleness is None and config.samples_per_insert is None
        self._visits = _shuffles(prompts, np.random.default_rng([config.run.seed, *sender.encode()]))

    def take(self, count: int) -> list[Visit]:
        """So many prompts, or none if the configuration allows none."""
        return list(islice(self._visits, count)) if self.allowed else []


def _shuffles(prompts: Sequence[Prompt], rng: np.random.Generator) -> Iterator[Visit]:
    # Epochs that nobody else has: the seed of a response follows from its epoch.
    epoch = int(rng.integers(1 << 40, 1 << 62))
    while prompts:
        for place in rng.permutation(len(prompts)):
            yield Visit(lease=NO_VISIT, epoch=epoch, prompt_key=prompts[place].key)
        epoch += 1
