"""The scorer: rewards in worker processes, so that none of them stalls or ends the searcher.

submit ──► waiting ──► a batch to an idle worker ──► one answer per item ──► done

A worker that exceeds its time or dies is replaced; the first item without an answer gets the error, and
the rest of its batch goes back to the front of the queue. One that dies before it is ready, as when memory is short
for a while, is started again after a pause; only a task that does not load, or `_STARTS` failures, end the searcher.
"""

import contextlib
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgpack

from tba.common.config import TaskSection
from tba.common.errors import TaskError
from tba.common.guard import SessionGuard, kill_sessions
from tba.common.log import get_logger
from tba.common.process import PARENT_VARIABLE
from tba.searcher.tasks.scoring import failed, score
from tba.searcher.tasks.task import Prompt, Reward, Task

log = get_logger(__name__)

# Large enough that a message costs little per item, small enough that all workers get some.
_BATCH = 32
_START_SECONDS = 120.0
_STARTS = 5  # rounds of starts in a row that may fail, with pauses of 1, 2, 4, 8 s between them
_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Item:
    """A response to score. `ticket` is the caller's."""

    ticket: int
    prompt: Prompt
    text: str
    finished: bool
    submitted_at: float


@dataclass(frozen=True, slots=True)
class Scored:
    """An answer: a reward, or a reward of 0 and the sentence of an error."""

    ticket: int
    text: str | None
    reward: Reward
    error: str | None


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    channel: socket.socket
    outbox: bytearray
    progress_at: float  # monotonic: the start, or the last answer
    ready: bool = False
    items: deque[Item] = field(default_factory=deque)
    unpacker: Any = field(default_factory=lambda: msgpack.Unpacker(max_buffer_size=1 << 24))


class Scorer:
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
        self.errors = 0
        self.timeouts = 0
        self.latency_seconds = 0.0

    @property
    def waiting(self) -> int:
        """Items submitted and not yet returned by `done`."""
        return len(self._waiting) + len(self._answers) + sum(len(worker.items) for worker in self._workers)

    def submit(self, ticket: int, prompt: Prompt, text: str, finished: bool) -> None:
        """Queue a response; `text` has no lone surrogates."""
        item = Item(ticket, prompt, text, finished, time.monotonic())
        if self._config.reward_workers:
            self._waiting.append(item)
        else:
            self._answer(item, *score(self._task, prompt, text, finished))

    def done(self) -> list[Scored]:
        """What is scored by now. Never blocks. Raises TaskError if a worker cannot load the task."""
        for worker in list(self._workers):
            _flush(worker)
            self._receive(worker)
            if trouble := self._trouble(worker):
                self._bury(worker, trouble)
        self._start_missing()
        self._deal()
        answers, self._answers = self._answers, []
        return answers

    def wait(self, seconds: float) -> list[Scored]:
        """Like `done`, after something came from a worker or `seconds` passed."""
        if not self._answers and self._config.reward_workers:
            multiprocessing.connection.wait([worker.channel for worker in self._workers], seconds)
        return self.done()

    def close(self) -> None:
        """End the workers and what they started."""
        for worker in self._workers:
            self._kill(worker)
        self._workers = []
        self._guard.close()

    def _start_missing(self) -> None:
        while len(self._workers) < self._config.reward_workers and time.monotonic() >= self._start_at:
            self._workers.append(self._spawn())

    def _spawn(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own: Ctrl-C is for the searcher, and what a reward started can be ended with it.
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "tba.searcher.reward_worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=os.environ | {PARENT_VARIABLE: str(os.getpid())},
            )
        self._guard.add(process.pid)
        ours.setblocking(False)
        settings = {"task": self._config.model_dump(mode="json"), "memory_mib": self._config.reward_memory_mib}
        worker = _Worker(process, ours, bytearray(msgpack.packb(settings)), time.monotonic())
        _flush(worker)  # it loads the task while the engine starts, which may take minutes
        return worker

    def _deal(self) -> None:
        for worker in self._workers:
            if worker.ready and not worker.items and self._waiting:
                share = min(_BATCH, -(-len(self._waiting) // len(self._workers)))
                worker.items.extend(self._waiting.popleft() for _ in range(share))
                worker.progress_at = time.monotonic()
                worker.outbox += msgpack.packb([_fields(item) for item in worker.items])
            _flush(worker)

    def _receive(self, worker: _Worker) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):  # a death is seen by its exit code
            while chunk := worker.channel.recv(_CHUNK_BYTES):
                worker.unpacker.feed(chunk)
        for message in worker.unpacker:
            worker.progress_at = time.monotonic()
            if message == "ready":
                worker.ready = True
                self._failed_starts = 0
                continue
            if not worker.ready:  # the sentence of what it could not load
                raise TaskError(message)
            total, parts, error = message
            self._answer(worker.items.popleft(), Reward(total, parts), error)

    def _trouble(self, worker: _Worker) -> str | None:
        """Why a worker must be replaced."""
        silent = time.monotonic() - worker.progress_at
        if (code := worker.process.poll()) is not None:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"died with exit code {code}"
            trouble = f"the worker {how}"
        elif worker.items and silent > self._config.reward_seconds:
            self.timeouts += 1
            return f"timed out after {self._config.reward_seconds:g} s"
        elif not worker.ready and silent > _START_SECONDS:
            trouble = f"the worker did not start within {_START_SECONDS:g} s"
        else:
            return None
        return trouble

    def _bury(self, worker: _Worker, trouble: str) -> None:
        self._receive(worker)  # what it answered before its end counts
        self._kill(worker)
        self._workers.remove(worker)
        if not worker.ready:
            self._start_failed(trouble)
            return
        log.warning("reward worker replaced", reason=trouble, pid=worker.process.pid)
        if worker.items:
            self._answer(worker.items.popleft(), *failed(trouble))
        self._waiting.extendleft(reversed(worker.items))
        worker.items.clear()

    def _start_failed(self, trouble: str) -> None:
        now = time.monotonic()
        if now < self._start_at:  # of a round that has been counted
            return
        self._failed_starts += 1
        if self._failed_starts == _STARTS:
            raise TaskError(
                f"task {self._config.name}: {trouble} while it loaded the task, {_STARTS} times in a row; "
                "see its output above"
            )
        pause = 2.0 ** (self._failed_starts - 1)
        self._start_at = now + pause
        log.warning("reward worker did not start", reason=trouble, again_in_seconds=pause)

    def _kill(self, worker: _Worker) -> None:
        """End a worker and what it started, unless that has left the worker's session."""
        pid = worker.process.pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if sys.platform == "linux":
            kill_sessions({pid})
        self._guard.discard(pid)  # before `wait`, after which the number may be another's
        worker.process.wait()
        worker.channel.close()

    def _answer(self, item: Item, reward: Reward, error: str | None) -> None:
        self.latency_seconds = time.monotonic() - item.submitted_at
        self.errors += error is not None
        self._answers.append(Scored(item.ticket, item.text, reward, error))


def _fields(item: Item) -> list[Any]:
    return [item.prompt.key, item.prompt.text, item.prompt.answer, item.text, item.finished]


def _flush(worker: _Worker) -> None:
    """Send what the worker takes. It cannot answer what it has not got: its time runs from the last byte on."""
    with contextlib.suppress(BlockingIOError, ConnectionError):
        while worker.outbox:
            del worker.outbox[: worker.channel.send(worker.outbox)]
            worker.progress_at = time.monotonic()
