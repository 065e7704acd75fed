"""A worker process that computes rewards: a Python module, connected by a socket pair that carries msgpack messages.

`WorkerProcess` is the searcher's side, `Connection` the worker's. The searcher never blocks on a worker: outgoing
messages wait in memory until the worker reads them, and incoming ones are polled. Pickle is not used, since a worker
runs code that is not ours; fork is not used, since the searcher has threads.
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

from tba.common.system.orphan_guard import SessionGuard, kill_sessions
from tba.common.system.process import PARENT_VARIABLE, die_with_parent, signal_name

_CHUNK_BYTES = 1 << 18
# The limits of one side's unread messages.
_REPLY_BYTES = 1 << 24
_REQUEST_BYTES = 1 << 30


class WorkerProcess:
    """`python -m MODULE FD`. Its first message is `settings`; it dies with the thread that started it."""

    def __init__(self, module: str, settings: Any, guard: SessionGuard, environment: Mapping[str, str]) -> None:
        self._guard = guard
        self.channel, theirs = socket.socketpair()
        with theirs:
            # In its own session: Ctrl-C is for the searcher alone, and the programs that a reward starts can be ended
            # with the worker.
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, **environment, PARENT_VARIABLE: str(os.getpid())},
            )
        self.pid = self._process.pid
        guard.add(self.pid)
        self.channel.setblocking(False)
        self._outbox = bytearray()
        self._unpacker: Any = msgpack.Unpacker(max_buffer_size=_REPLY_BYTES)
        # Monotonic: the start, the last message received, or the last byte that the worker has read.
        self.progress_at = time.monotonic()
        # Sent now, so that the worker loads while the engine starts, which may take minutes.
        self.send(settings)

    @property
    def silent_seconds(self) -> float:
        """How long the worker has neither replied nor read anything."""
        return time.monotonic() - self.progress_at

    def send(self, message: Any) -> None:
        """Queue a message."""
        self._outbox += msgpack.packb(message)
        self.progress_at = time.monotonic()
        self.flush()

    def flush(self) -> None:
        """Send as much as fits in the socket's buffer.

        Counts as progress: the worker cannot reply to what it has not received, so its time runs from the last byte.
        """
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._outbox:
                del self._outbox[: self.channel.send(self._outbox)]
                self.progress_at = time.monotonic()

    def receive(self) -> Iterator[Any]:
        """The messages that have arrived."""
        # A dead worker is detected by its exit code, not here.
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while chunk := self.channel.recv(_CHUNK_BYTES):
                self._unpacker.feed(chunk)
        for message in self._unpacker:
            self.progress_at = time.monotonic()
            yield message

    def death(self) -> str | None:
        """How the process ended; None while it runs."""
        if (code := self._process.poll()) is None:
            return None
        return (
            f"the worker was killed by {signal_name(-code)}" if code < 0 else f"the worker died with exit code {code}"
        )

    def kill(self) -> None:
        """Kill the worker and the programs it started, except those that made a session of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if sys.platform == "linux":
            kill_sessions({self.pid})
        # Before `wait`: after it the number may belong to another process.
        self._guard.discard(self.pid)
        self._process.wait()
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
        self.messages = self._read()

    def send(self, message: Any) -> None:
        """Send a message to the searcher."""
        self._channel.sendall(msgpack.packb(message))

    def _read(self) -> Iterator[Any]:
        unpacker = msgpack.Unpacker(max_buffer_size=_REQUEST_BYTES)
        while chunk := self._channel.recv(_CHUNK_BYTES):
            unpacker.feed(chunk)
            yield from unpacker
