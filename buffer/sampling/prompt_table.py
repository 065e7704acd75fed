"""What the chance of each prompt depends on, as numpy columns by the prompt's ordinal in the index."""

from itertools import chain

import numpy as np
import numpy.typing as npt

from tba.buffer.sampling.entry_columns import UNTRAINED
from tba.buffer.sampling.index import SamplingIndex

NEVER = -(1 << 31)
# Prompts that are read from the index together: their rows are a list of Python integers for a moment.
_CHUNK = 1024
Mask = npt.NDArray[np.bool_]


class PromptTable:
    """A summary of every prompt's entries, for groups that need `need` different entries of a prompt.

    newest_step      the step of the need-th newest entry: a prompt with it in a window has `need` entries there
    untrained_step   the newest step of the entries that no recorded batch has
    score            the mean reward of the entries
    flat             whether all rewards are equal

    The steps are NEVER where there is no such entry, and also beyond the last prompt: columns grow ahead.

    Invariant: after `refresh` a row is a function of the prompt's present entries alone, in the order of their ids. It
    does not depend on how the index came to have them.
    """

    def __init__(self, index: SamplingIndex, need: int) -> None:
        self.need = need
        self._index = index
        self._seen_changes = 0
        self.newest_step = np.empty(0, np.int32)
        self.untrained_step = np.empty(0, np.int32)
        self.score = np.empty(0, np.float64)
        self.flat = np.empty(0, np.bool_)

    def refresh(self) -> None:
        """Summarise the prompts that have changed since the last refresh."""
        if self._seen_changes == self._index.changes:
            return
        changed = self._index.changed_since(self._seen_changes)
        self._grow()
        for start in range(0, len(changed), _CHUNK):
            self._summarise(changed[start : start + _CHUNK])
        self._seen_changes = self._index.changes

    def with_entries_since(self, step: int, *, untrained: bool = False) -> Mask:
        """Return the prompts with `need` entries of at least this step; `untrained`: and one such in no batch."""
        least = max(NEVER + 1, step)
        found = self.newest_step >= least
        return found & (self.untrained_step >= least) if untrained else found

    def _grow(self) -> None:
        prompts, size = len(self._index.prompt_ids), len(self.score)
        if prompts <= size:
            return
        more = max(prompts - size, size // 4)
        unused = np.full(more, NEVER, np.int32)
        self.newest_step = np.concatenate([self.newest_step, unused])
        self.untrained_step = np.concatenate([self.untrained_step, unused])
        self.score = np.concatenate([self.score, np.zeros(more)])
        self.flat = np.concatenate([self.flat, np.zeros(more, np.bool_)])

    def _summarise(self, prompts: npt.NDArray[np.intp]) -> None:
        index, columns = self._index, self._index.columns
        rows_of_each = [index.rows(ordinal) for ordinal in prompts.tolist()]
        counts = np.array([len(rows) for rows in rows_of_each])
        rows = np.fromiter(chain.from_iterable(rows_of_each), np.intp)
        steps = np.frombuffer(columns.step, np.int32)[rows]
        rewards = np.frombuffer(columns.reward, np.float64)[rows]
        is_untrained = np.frombuffer(columns.state, np.uint8)[rows] == UNTRAINED
        ends = counts.cumsum()
        owners = np.repeat(np.arange(len(prompts)), counts)

        enough = counts >= self.need
        newest = np.full(len(prompts), NEVER, np.int32)
        newest[enough] = steps[np.lexsort((steps, owners))][ends[enough] - self.need]
        self.newest_step[prompts] = newest

        # `reduceat` must not see empty segments. Those of the other prompts follow each other without a gap.
        held = counts > 0
        starts = (ends - counts)[held]
        untrained, flat = np.full(len(prompts), NEVER, np.int32), np.ones(len(prompts), np.bool_)
        if len(rows):
            untrained[held] = np.maximum.reduceat(np.where(is_untrained, steps, NEVER), starts)
            flat[held] = np.minimum.reduceat(rewards, starts) == np.maximum.reduceat(rewards, starts)
        self.untrained_step[prompts] = untrained
        self.flat[prompts] = flat
        # `bincount` adds one after the other, oldest first: the sum is the same to the last bit after a rebuild.
        self.score[prompts] = np.bincount(owners, rewards, len(prompts)) / np.maximum(counts, 1)
