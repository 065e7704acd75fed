"""Reference log-probabilities of complete groups, computed by a thread beside generation.

    submit ──► waiting ──► all that wait, as one batch ──► done

The thread spends its time in torch, which lets the engine's step go on. Nothing is lost by a reference that fails:
a row without one is left to the trainer.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from tba.common.log import get_logger
from tba.common.trajectory import Trajectory
from tba.searcher.groups import Group

log = get_logger(__name__)

# Sequence log-probabilities, None for a row that has none.
Score = Callable[[Sequence[Trajectory]], list[float | None]]
# So many responses are enough for a batch; the rest wait for the next one, and the first come back sooner.
_BATCH = 64


class References:
    """Adds what `score` gives to the rows of groups; without a `score` they pass as they are."""

    def __init__(self, score: Score | None) -> None:
        self._score = score
        self._todo: queue.SimpleQueue[Group | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Group] = queue.SimpleQueue()
        self._submitted = self._returned = 0
        self._closing = threading.Event()
        self.errors = 0
        self._thread = threading.Thread(target=self._run, name="references", daemon=True) if score else None
        if self._thread is not None:
            self._thread.start()

    @property
    def waiting(self) -> int:
        """Responses submitted and not yet returned by `done`."""
        return self._submitted - self._returned

    def submit(self, group: Group) -> None:
        """Take a complete group."""
        self._submitted += group.size
        (self._done if self._thread is None else self._todo).put(group)

    def done(self) -> list[Group]:
        """The groups that are ready by now. Never blocks."""
        groups = []
        while not self._done.empty():  # this thread is the only one that takes from it
            groups.append(self._done.get())
        self._returned += sum(group.size for group in groups)
        return groups

    def close(self) -> list[Group]:
        """End the thread after the batch that it computes. Returns all other groups too, without references."""
        if self._thread is not None:
            self._closing.set()
            self._todo.put(None)
            self._thread.join()
            self._thread = None
        return self.done()

    def _run(self) -> None:
        ending = False
        while not ending:
            groups, ending = self._take()
            if not self._closing.is_set():
                self._complete(groups)
            for group in groups:
                self._done.put(group)

    def _take(self) -> tuple[list[Group], bool]:
        """Wait for a group, and take those that wait with it. True after the last one."""
        groups: list[Group] = []
        while not groups or (sum(group.size for group in groups) < _BATCH and not self._todo.empty()):
            if (group := self._todo.get()) is None:
                return groups, True
            groups.append(group)
        return groups, False

    def _complete(self, groups: Sequence[Group]) -> None:
        assert self._score is not None
        rows = [row for group in groups for row in group.done]
        try:
            logprobs = iter(self._score(rows))
        except Exception:  # such as memory of the device: the trainer computes them
            self.errors += 1
            log.exception("reference log-probabilities are left to the trainer", rows=len(rows))
            return
        for group in groups:
            group.done = [replace(row, reference_logprob=next(logprobs)) for row in group.done]
