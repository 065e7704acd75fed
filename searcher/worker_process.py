"""A worker that computes rewards: a Python module in a process of its own, spoken to in msgpack over a socket pair.

`WorkerProcess` is the searcher's side, `Connection` the worker's. The searcher never blocks on a worker: what it sends
waits in memory until the worker takes it, and what came is asked for. No pickle, and no fork of a process with threads.
"""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgpack

from tba.common.guard import SessionGuard, kill_sessions
from tba.common.process import PARENT_VARIABLE, die_with_parent, signal_name

_CHUNK_BYTES = 1 << 18
_ANSWER_BYTES = 1 << 24  # most that a worker may send at once
_REQUEST_BYTES = 1 << 30
LONGEST_PAUSE_SECONDS = 60.0


class WorkerProcess:
    """`python -m MODULE FD`, whose first message is `settings`. It dies with the thread that started it."""

    def __init__(
        self, module: str, settings: Any, guard: SessionGuard, environment: Mapping[str, str] | None = None
    ) -> None:
        self._guard = guard
        self.channel, theirs = socket.socketpair()
        with theirs:
            # A session of its own: Ctrl-C is for the searcher, and what a reward started can be ended with it.
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, **(environment or {}), PARENT_VARIABLE: str(os.getpid())},
            )
        self.pid = self._process.pid
        guard.add(self.pid)
        self.channel.setblocking(False)
        self._outbox = bytearray()
        self._unpacker: Any = msgpack.Unpacker(max_buffer_size=_ANSWER_BYTES)
        self.progress_at = time.monotonic()  # the start, the last answer, or the last byte that it took
        self.send(settings)  # it loads while the engine starts, which may take minutes

    @property
    def silent_seconds(self) -> float:
        """For how long it has neither answered nor taken anything."""
        return time.monotonic() - self.progress_at

    def send(self, message: Any) -> None:
        """Queue a message."""
        self._outbox += msgpack.packb(message)
        self.progress_at = time.monotonic()
        self.flush()

    def flush(self) -> None:
        """Send what it takes. It cannot answer what it has not got: its time runs from the last byte on."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._outbox:
                del self._outbox[: self.channel.send(self._outbox)]
                self.progress_at = time.monotonic()

    def receive(self) -> Iterator[Any]:
        """What has come by now."""
        with contextlib.suppress(BlockingIOError, ConnectionError):  # a death is seen by its exit code
            while chunk := self.channel.recv(_CHUNK_BYTES):
                self._unpacker.feed(chunk)
        for message in self._unpacker:
            self.progress_at = time.monotonic()
            yield message

    def death(self) -> str | None:
        """How it ended; None while it runs."""
        if (code := self._process.poll()) is None:
            return None
        return (
            f"the worker was killed by {signal_name(-code)}" if code < 0 else f"the worker died with exit code {code}"
        )

    def kill(self) -> None:
        """End it and what it started, unless that has left its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if sys.platform == "linux":
            kill_sessions({self.pid})
        self._guard.discard(self.pid)  # before `wait`, after which the number may be another's
        self._process.wait()
        self.channel.close()


def pause_after(failures: int) -> float:
    """Seconds before the next start after so many failures in a row: 1, 2, 4, 8, ..."""
    return float(min(2.0 ** min(failures - 1, 60), LONGEST_PAUSE_SECONDS))


class Connection:
    """The worker's side: iterate over the searcher's messages, until it closes the socket."""

    def __init__(self) -> None:
        die_with_parent()
        self._channel = socket.socket(fileno=int(sys.argv[1]))
        self._channel.set_inheritable(False)  # a program that a reward starts must not answer
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if sys.platform == "linux":
            with open("/proc/self/oom_score_adj", "w") as file:  # of all processes, this one is to go first
                file.write("1000")
        self._messages = self._read()

    def __iter__(self) -> Iterator[Any]:
        return self._messages

    def send(self, message: Any) -> None:
        """Answer."""
        self._channel.sendall(msgpack.packb(message))

    def _read(self) -> Iterator[Any]:
        unpacker = msgpack.Unpacker(max_buffer_size=_REQUEST_BYTES)
        while chunk := self._channel.recv(_CHUNK_BYTES):
            unpacker.feed(chunk)
            yield from unpacker
