"""A supervised pool of reward workers.

    submit ──► waiting ──► a batch to an idle worker ──► results ──► poll
                  ▲                  │
                  └─── requeued ◄────┴ died or timed out: the items it was working on fail

The searcher never waits for a worker. One that dies or exceeds its time is replaced immediately; one that fails before
it is ready, as when memory is short, is started again with backoff. Whether failed starts end the searcher is for the
owner to decide, from `refusal`, `failed_starts` and `last_error`.

Messages of a worker: `["ready"]` once it has loaded, or a sentence why not: `["refused", sentence]` if it never will,
`["failed", sentence]` if another start may succeed. Then `["begin", tickets]` before it works on these items, and
`["results", [[ticket, value, error], ...]]`. Each `begin` replaces the one before it, and results end it. A worker that
does not send `begin` works on the first item without a result. So the items that a worker died of are known. `begin`
may add what it does for each of them, for messages, and how long it may be silent. A worker that ends itself after a
`begin` without tickets fails none of its items.

An episode stays with the worker that it was first sent to: only that one gets its calls, until `release`. If that
worker is replaced, the next call may go to any, with all that is needed to repeat the episode.

A worker is a Python module, connected by a socket pair that carries msgpack messages: `Worker` is the searcher's
side, `Connection` the worker's. Outgoing messages wait in memory until the worker reads them, and incoming ones are
polled. Pickle is not used, since a worker runs code that is not ours; fork is not used, since the searcher has threads.
"""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from tba.common.log import get_logger
from tba.common.system.background import backoff
from tba.common.system.orphan_guard import SessionGuard, kill_sessions
from tba.common.system.process import PARENT_VARIABLE, die_with_parent, signal_name
from tba.searcher.scoring.scoring import Item, timed_out

log = get_logger(__name__)

# Time limit of a worker's start.
LOAD_SECONDS = 600.0
_FIRST_PAUSE_SECONDS = 1.0
_MAX_PAUSE_SECONDS = 60.0
_CHUNK_BYTES = 1 << 18
# The limits of one side's unread messages.
_REPLY_BYTES = 1 << 24
_REQUEST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """What a pool runs, and its limits.

    A worker runs `module` and receives `settings` first. It must be ready within `load_seconds`, and while it has
    items it must send a message every `work_seconds`. It has at most `batch` items at a time, and gets more when it has
    done all of them, or with `refills` some. An idle one waits up to `gather_seconds` for that many. While no worker is
    ready, items fail that wait longer than `max_wait_seconds`, if that is set. `name` is for log messages.
    """

    name: str
    module: str
    settings: Any
    workers: int
    batch: int
    load_seconds: float
    work_seconds: float
    refills: bool = False
    gather_seconds: float = 0.0
    max_wait_seconds: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


class Worker:
    """`python -m MODULE FD`, and its items without a result. It dies with the thread that started it."""

    def __init__(self, settings: PoolSettings, guard: SessionGuard) -> None:
        self._guard = guard
        self.channel, theirs = socket.socketpair()
        with theirs:
            # In its own session: Ctrl-C is for the searcher alone, and programs of a reward are ended with the worker.
            self.process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", settings.module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, **settings.environment, PARENT_VARIABLE: str(os.getpid())},
            )
        guard.add(self.process.pid)
        self.channel.setblocking(False)
        self._outbox = bytearray()
        self._unpacker: Any = msgpack.Unpacker(max_buffer_size=_REPLY_BYTES)
        # Monotonic: the start, the last message received, or the last byte that the worker has read.
        self.progress_at = time.monotonic()
        self.ready = False
        # In order of their submission.
        self.items: dict[int, Item] = {}
        # What it does by ticket, and how long it may be silent meanwhile, if it says so.
        self.running: dict[int, str] | None = None
        self.silence: float | None = None
        # The episodes that it holds, and calls of them that are not yet sent.
        self.episodes: set[int] = set()
        self.calls: deque[Item] = deque()
        # Its last words, if it could not load.
        self.sentence = ""
        self.malformed = False
        # Sent now, so that the worker loads while the engine starts, which may take minutes.
        self.send(settings.settings)

    def send(self, message: Any) -> None:
        self._outbox += msgpack.packb(message)
        self.progress_at = time.monotonic()
        self.flush()

    def flush(self) -> None:
        """Send what fits the socket. It is progress: the worker's time runs from the last byte that it has received."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._outbox:
                del self._outbox[: self.channel.send(self._outbox)]
                self.progress_at = time.monotonic()

    def receive(self) -> Iterator[Any]:
        # A dead worker is detected by its exit code, not here.
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while chunk := self.channel.recv(_CHUNK_BYTES):
                self._unpacker.feed(chunk)
        for message in self._unpacker:
            self.progress_at = time.monotonic()
            yield message

    def death(self) -> str | None:
        """How the process ended; None while it runs."""
        if (code := self.process.poll()) is None:
            return None
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"died with exit code {code}"
        return f"the worker {how}"

    def kill(self) -> None:
        """Kill the worker and the programs it started, except those that made a session of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if sys.platform == "linux":
            kill_sessions({self.process.pid})
        # Before `wait`: after it the number may belong to another process.
        self._guard.discard(self.process.pid)
        self.process.wait()
        self.channel.close()


class Connection:
    """The worker's side. `messages` yields the searcher's messages until it closes the socket."""

    def __init__(self) -> None:
        die_with_parent()
        self._channel = socket.socket(fileno=int(sys.argv[1]))
        # A program that a reward starts must not reply.
        self._channel.set_inheritable(False)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if sys.platform == "linux":
            # When memory is short the kernel kills workers first.
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
        self._unpacker: Any = msgpack.Unpacker(max_buffer_size=_REQUEST_BYTES)
        self.messages = self._read()

    def send(self, message: Any) -> None:
        """Send a message to the searcher. One that has died is noticed by the next `receive`."""
        with contextlib.suppress(ConnectionError):
            self._channel.sendall(msgpack.packb(message))

    def _read(self) -> Iterator[Any]:
        while (arrived := self.receive()) is not None:
            yield from arrived

    def receive(self) -> list[Any] | None:
        """Wait for something, and return the messages that are complete; None at the end."""
        chunk = b""
        # A searcher that was killed, and had not read every message.
        with contextlib.suppress(ConnectionError):
            chunk = self._channel.recv(_CHUNK_BYTES)
        if not chunk:
            return None
        self._unpacker.feed(chunk)
        return list(self._unpacker)

    def fileno(self) -> int:
        """Return the descriptor that is readable when something has arrived."""
        return self._channel.fileno()


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an item: a value, or a sentence why there is none.

    Without one, `doing` is what the worker did for the item, if it said so, and `late` whether that took too long.
    """

    item: Item
    value: Any
    error: str | None
    doing: str = ""
    late: bool = False


class WorkerPool:
    """Keeps workers running, which die with the thread that starts them: the main one, before the engine."""

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self.workers: list[Worker] = []
        self.timeouts = 0
        # Why a worker will never load; empty while none has said so.
        self.refusal = ""
        # Failed starts in a row. Workers that fail at about the same time count as one.
        self.failed_starts = 0
        # The last failure of a worker.
        self.last_error = ""
        self._waiting: deque[Item] = deque()
        self._results: list[Result] = []
        self._guard = SessionGuard()
        # Monotonic. No worker is started before `_start_at`; none has been ready since `_down_since`.
        self._start_at = 0.0
        self._down_since: float | None = None
        self._start_missing()

    @property
    def channels(self) -> Sequence[socket.socket]:
        """Readable when there may be something to `poll`."""
        return [worker.channel for worker in self.workers]

    @property
    def ready(self) -> bool:
        return any(worker.ready for worker in self.workers)

    def submit(self, item: Item) -> None:
        """Queue an item: a call of an episode for the worker that holds it, if one does."""
        holder = next((one for one in self.workers if item.ticket in one.episodes), None) if item.call else None
        (holder.calls if holder else self._waiting).append(item)

    def release(self, ticket: int) -> None:
        """Forget which worker holds an episode."""
        for worker in self.workers:
            worker.episodes.discard(ticket)

    def poll(self) -> list[Result]:
        """Supervise the workers and return the results that have arrived. Never blocks, except to reap a worker."""
        for worker in list(self.workers):
            worker.flush()
            self._receive(worker)
            if failure := self._failure_of(worker):
                self._replace(worker, failure)
        self._start_missing()
        self.send()
        self._expire()
        results, self._results = self._results, []
        return results

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.workers = []
        self._guard.close()

    def _start_missing(self) -> None:
        what = self.settings
        while len(self.workers) < what.workers and time.monotonic() >= self._start_at:
            self.workers.append(Worker(what, self._guard))

    def _receive(self, worker: Worker) -> None:
        try:
            for kind, *content in worker.receive():
                if kind == "ready":
                    worker.ready = True
                    self.failed_starts, self._down_since = 0, None
                elif kind == "begin":
                    tickets, doing, worker.silence = (*content, None, None)[:3]
                    named = dict(zip(tickets, doing or [""] * len(tickets), strict=True))
                    worker.running = {ticket: named[ticket] for ticket in worker.items if ticket in named}
                elif kind == "results":
                    worker.running, worker.silence = None, None
                    for ticket, *outcome in content[0]:
                        self._results.append(Result(worker.items[ticket], *outcome))
                        del worker.items[ticket]
                else:
                    worker.sentence = content[0]
                    self.refusal = content[0] if kind == "refused" else ""
        # Another program than the worker wrote to its channel: it has the same file descriptors.
        except (LookupError, TypeError, ValueError, msgpack.UnpackException):
            worker.sentence = "what came from the worker is malformed: the reward may write to its file descriptors"
            worker.malformed = True

    def _failure_of(self, worker: Worker) -> str | None:
        """Why a worker must be replaced."""
        if death := worker.death():
            return death
        if worker.malformed:
            return worker.sentence
        limit = worker.silence or self.settings.work_seconds
        silent_seconds = time.monotonic() - worker.progress_at
        if worker.items and silent_seconds > limit:
            return timed_out(limit)
        if not worker.ready and silent_seconds > self.settings.load_seconds:
            return f"the worker was not ready within {self.settings.load_seconds:g} s"
        return None

    def _replace(self, worker: Worker, failure: str) -> None:
        is_late = failure == timed_out(worker.silence or self.settings.work_seconds)
        # Results that it sent before its end count.
        self._receive(worker)
        self.last_error = worker.sentence or failure
        worker.kill()
        self.workers.remove(worker)
        if not worker.ready:
            # The owner of the pool raises a refusal, or continues without a worker, and starts one with a backoff.
            now = time.monotonic()
            # Only the first failure of several workers that were started together counts.
            if now >= self._start_at:
                self.failed_starts += 1
                pause = backoff(self.failed_starts, _FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS)
                self._start_at = now + pause
                log.warning(f"{self.settings.name} did not start", reason=self.last_error, again_in_seconds=pause)
            return
        log.warning(f"{self.settings.name} replaced", reason=self.last_error, pid=worker.process.pid)
        # At least one item fails, so that a batch which kills every worker comes to an end.
        failed = dict.fromkeys(list(worker.items)[:1], "") if worker.running is None else worker.running
        self.timeouts += is_late * len(failed)
        for ticket, doing in failed.items():
            self._results.append(Result(worker.items.pop(ticket), None, self.last_error, doing, is_late))
        self._waiting.extendleft(reversed([*worker.items.values(), *worker.calls]))
        if not self.ready:
            self._down_since = time.monotonic()

    def send(self) -> None:
        """Give idle workers what has been submitted. `poll` does that too."""
        for worker in self.workers:
            room = self.settings.batch - len(worker.items) if self.settings.refills or not worker.items else 0
            if not worker.ready or room <= 0 or not (self._waiting or worker.calls):
                continue
            items = [worker.calls.popleft() for _ in range(min(room, len(worker.calls)))]
            if self._waiting and not items and not worker.items:
                waited = time.monotonic() - self._waiting[0].submitted_at
                if len(self._waiting) < self.settings.batch and waited < self.settings.gather_seconds:
                    return
            # A small backlog is divided among all workers.
            count = min(room - len(items), -(-len(self._waiting) // len(self.workers)))
            items += [self._waiting.popleft() for _ in range(count)]
            # Of a busy worker only what it sends shows that it lives.
            since = worker.progress_at if worker.items else None
            worker.items |= {item.ticket: item for item in items}
            worker.send([item.message(held=item.ticket in worker.episodes) for item in items])
            worker.progress_at = since or worker.progress_at
            worker.episodes.update(item.ticket for item in items if item.call)

    def _expire(self) -> None:
        """Fail items that have waited too long for a worker. The time while there was one does not count."""
        if self._down_since is None or self.settings.max_wait_seconds is None:
            return
        latest = time.monotonic() - self.settings.max_wait_seconds
        while self._waiting and max(self._waiting[0].submitted_at, self._down_since) < latest:
            self._results.append(Result(self._waiting.popleft(), None, f"no worker: {self.last_error}"))
