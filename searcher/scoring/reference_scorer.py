"""Reference log-probabilities of complete groups, computed in a thread alongside generation.

    submit ──► waiting ──► everything that waits, as one batch ──► done

The thread spends its time in torch, which releases the GIL, so that the engine continues. No group is lost when the
reference model fails: a row without a reference log-probability is left to the trainer.
"""

import queue
from collections.abc import Callable, Sequence
from dataclasses import replace

from tba.common.log import get_logger
from tba.common.system.background import Background
from tba.common.wire.trajectory import Trajectory
from tba.searcher.scoring.scoring import Group

log = get_logger(__name__)

# A batch is complete with this many responses: later groups wait for the next one, and the first come back sooner.
_BATCH = 64


class ReferenceScorer:
    """Adds the log-probabilities that `score` returns to the rows of groups, None for a row that has none."""

    def __init__(self, score: Callable[[Sequence[Trajectory]], list[float | None]]) -> None:
        self._score = score
        # None ends the thread.
        self._todo: queue.SimpleQueue[Group | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Group] = queue.SimpleQueue()
        # Number of responses submitted and not yet returned by `done`.
        self.waiting = 0
        self.errors = 0
        self._thread = Background("references", self._run, wake=lambda: self._todo.put(None))
        self._thread.start()

    def submit(self, group: Group) -> None:
        """Queue a complete group."""
        self.waiting += group.size
        self._todo.put(group)

    def done(self) -> list[Group]:
        """The groups completed since the last call. Never blocks."""
        self._thread.check()
        groups = []
        # No other thread reads this queue: once it is not empty, `get` does not block.
        while not self._done.empty():
            groups.append(self._done.get())
        self.waiting -= sum(group.size for group in groups)
        return groups

    def close(self) -> list[Group]:
        """End the thread after its current batch. Returns all remaining groups, those it did not begin unchanged."""
        self._thread.stop()
        return self.done()

    def _run(self) -> None:
        while groups := self._next_batch():
            if not self._thread.stopping.is_set():
                self._score_groups(groups)
            for group in groups:
                self._done.put(group)

    def _next_batch(self) -> list[Group]:
        """Wait for a group, and return it with those waiting behind it; none after the last one."""
        groups: list[Group] = []
        while not groups or (sum(group.size for group in groups) < _BATCH and not self._todo.empty()):
            if (group := self._todo.get()) is None:
                # Read again after these groups.
                self._todo.put(None)
                break
            groups.append(group)
        return groups

    def _score_groups(self, groups: Sequence[Group]) -> None:
        rows = [row for group in groups for row in group.done]
        # Whatever fails here, such as memory of the device: the trainer computes these rows.
        try:
            logprobs = iter(self._score(rows))
        except Exception:
            self.errors += len(rows)
            log.exception("reference log-probabilities are left to the trainer", rows=len(rows))
            return
        for group in groups:
            group.done = [replace(row, reference_logprob=next(logprobs)) for row in group.done]
