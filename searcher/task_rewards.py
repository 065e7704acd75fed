"""The task's rewards in worker processes, so that none of them stalls or ends the searcher.

submit ──► waiting ──► a batch to an idle worker ──► one answer per item ──► done

A worker that exceeds its time or dies is replaced; the first item without an answer gets the error, and
the rest of its batch goes back to the front of the queue. One that dies before it is ready, as when memory is short
for a while, is started again after a pause; only a task that does not load, or `_STARTS` failures, end the searcher.
"""

import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tba.common.config import TaskSection
from tba.common.errors import TaskError, WorkerLost
from tba.common.guard import SessionGuard
from tba.common.log import get_logger
from tba.searcher.scores import Item, Scored
from tba.searcher.tasks.scoring import failed, score
from tba.searcher.tasks.task import Reward, Task
from tba.searcher.worker_process import WorkerProcess, pause_after

log = get_logger(__name__)

# Large enough that a message costs little per item, small enough that all workers get some.
_BATCH = 32
_STARTS = 5  # rounds of starts in a row that may fail, with pauses of 1, 2, 4, 8 s between them


@dataclass(slots=True)
class _Worker:
    process: WorkerProcess
    ready: bool = False
    items: deque[Item] = field(default_factory=deque)


class TaskScorer:
    """`task.reward_workers` processes; with 0 of them, `submit` scores at once in this process.

    Start it in the main thread (a worker dies with the thread that started it) and before the engine.
    """

    def __init__(self, task: Task, config: TaskSection) -> None:
        self._task = task
        self._config = config
        self._waiting: deque[Item] = deque()
        self._answers: list[Scored] = []
        self._guard = SessionGuard()
        self._failed_starts = 0
        self._start_at = 0.0  # monotonic; not before this
        self._workers: list[_Worker] = []
        self._start_missing()
        self.timeouts = 0

    @property
    def channels(self) -> Sequence[socket.socket]:
        """Readable when there may be something for `done`."""
        return [worker.process.channel for worker in self._workers]

    def submit(self, item: Item) -> None:
        """Queue a response."""
        if self._config.reward_workers:
            self._waiting.append(item)
        else:
            reward, error = score(self._task, item.prompt, item.text, item.finished)
            self._answers.append(Scored(item.ticket, item.text, reward, error))

    def done(self) -> list[Scored]:
        """What is scored by now. Never blocks.

        Raises TaskError if the task does not load, WorkerLost if no worker lives until it has loaded it.
        """
        for worker in list(self._workers):
            worker.process.flush()
            self._receive(worker)
            if trouble := self._trouble(worker):
                self._bury(worker, trouble)
        self._start_missing()
        self._deal()
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """End the workers and what they started."""
        for worker in self._workers:
            worker.process.kill()
        self._workers = []
        self._guard.close()

    def _start_missing(self) -> None:
        while len(self._workers) < self._config.reward_workers and time.monotonic() >= self._start_at:
            settings = {"task": self._config.model_dump(mode="json"), "memory_mib": self._config.reward_memory_mib}
            self._workers.append(_Worker(WorkerProcess("tba.searcher.reward_worker", settings, self._guard)))

    def _deal(self) -> None:
        for worker in self._workers:
            if worker.ready and not worker.items and self._waiting:
                share = min(_BATCH, -(-len(self._waiting) // len(self._workers)))
                worker.items.extend(self._waiting.popleft() for _ in range(share))
                worker.process.send([_fields(item) for item in worker.items])

    def _receive(self, worker: _Worker) -> None:
        for message in worker.process.receive():
            if message == "ready":
                worker.ready = True
                self._failed_starts = 0
            elif not worker.ready:  # the sentence of what it could not load
                raise TaskError(message)
            else:
                total, parts, error = message
                item = worker.items.popleft()
                self._answers.append(Scored(item.ticket, item.text, Reward(total, parts), error))

    def _trouble(self, worker: _Worker) -> str | None:
        """Why a worker must be replaced."""
        if death := worker.process.death():
            return death
        silent = worker.process.silent_seconds
        if worker.items and silent > self._config.reward_seconds:
            self.timeouts += 1
            return f"timed out after {self._config.reward_seconds:g} s"
        if not worker.ready and silent > self._config.load_seconds:
            return f"the worker was not ready within task.load_seconds = {self._config.load_seconds:g}"
        return None

    def _bury(self, worker: _Worker, trouble: str) -> None:
        self._receive(worker)  # what it answered before its end counts
        worker.process.kill()
        self._workers.remove(worker)
        if not worker.ready:
            self._start_failed(trouble)
            return
        log.warning("reward worker replaced", reason=trouble, pid=worker.process.pid)
        if worker.items:
            item = worker.items.popleft()
            self._answers.append(Scored(item.ticket, item.text, *failed(trouble)))
        self._waiting.extendleft(reversed(worker.items))
        worker.items.clear()

    def _start_failed(self, trouble: str) -> None:
        now = time.monotonic()
        if now < self._start_at:  # of a round that has been counted
            return
        self._failed_starts += 1
        if self._failed_starts == _STARTS:
            raise WorkerLost(
                f"task {self._config.name}: {trouble} while it loaded the task, {_STARTS} times in a row; "
                "see its output above"
            )
        pause = pause_after(self._failed_starts)
        self._start_at = now + pause
        log.warning("reward worker did not start", reason=trouble, again_in_seconds=pause)


def _fields(item: Item) -> list[Any]:
    return [item.prompt.key, item.prompt.text, item.prompt.answer, item.text, item.finished]
