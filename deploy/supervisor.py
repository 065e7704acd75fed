"""Supervision of child processes: they are started, restarted after a failure, and never left behind.

    waiting ──► running ──► ended         (exit code 0, unless its restart policy is ALWAYS)
       ▲           │
       └── backoff ┴──► ended             (an exit code in NO_RESTART, or the policy NEVER)

Every child leads a session of its own. Ctrl-C therefore reaches only the supervisor, which ends the children in order.
Three mechanisms ensure that no process is left behind:
- a child ends when the supervisor is killed (PR_SET_PDEATHSIG, `tba.common.system.process`);
- when a child ends, its session is killed, and so are descendants that have left the session: the supervisor is their
  subreaper, so that orphans become its children;
- when the supervisor is killed, `orphan_guard` kills the sessions. Only a process that has left its child's session
  survives that; under systemd the control group catches it.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Self

from tba.common.config import LaunchSection
from tba.common.errors import BufferUnavailable, Refused
from tba.common.log import get_logger
from tba.common.system.background import backoff
from tba.common.system.orphan_guard import SessionGuard, session_of
from tba.common.system.process import (
    EXTENSION,
    KV_CACHE_NOTICE,
    PARENT_VARIABLE,
    NotifySocket,
    adopt_orphans,
    child_pids,
    extend_start,
    starting_on,
)
from tba.common.wire import fields, messages
from tba.common.wire.client import BufferClient
from tba.deploy.child import NO_RESTART, Child, Relay, ending

log = get_logger(__name__)

_POLL_SECONDS = 0.1
# The delay before a restart doubles with each failure in a row, up to a minute. The count of failures is reset when a
# child has run for ten minutes.
RESTART_DELAY_SECONDS = 1.0
_LONGEST_DELAY_SECONDS = 60.0
_STABLE_SECONDS = 600.0
_LAST_LINES_SECONDS = 2.0
_ORPHANS_SECONDS = 5.0
_REAP_SECONDS = 0.005
_REPORT_SECONDS = 1.0


class Supervisor:
    """Runs children and restarts those that fail. A context manager for one thread: no child outlives it."""

    def __init__(self, children: Sequence[Child], launch: LaunchSection) -> None:
        self.children = list(children)
        self._launch = launch
        self._guard = SessionGuard()
        # Child processes that were there before the supervisor.
        self._foreign: frozenset[int] = frozenset()
        # Whether the buffer was told about a child that fails or loads its model.
        self._reported = False
        self._notices = {child.name: NotifySocket() for child in children}

    def __enter__(self) -> Self:
        self._foreign = frozenset(child_pids())
        adopt_orphans()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(self.children)
        for notices in self._notices.values():
            notices.close()
        self._guard.close()

    def poll(self) -> None:
        """Start children that are due and process those that have ended. Call it several times a second."""
        self._guard.ensure_running()
        self._reap_orphans()
        for child in self.children:
            if child.process is not None:
                self._receive_notices(child)
                self._check_running(child)
            # An engine that starts, or is about to, measures the free memory of its GPU.
            elif child.due and all(one.ready or one.ended or self.broken(one) for one in child.behind):
                self._start(child)

    def rounds(self, until: Callable[[], object]) -> Iterator[None]:
        """Poll, and yield for the caller's part of the round, until the condition holds."""
        while not until():
            self.poll()
            yield
            time.sleep(_POLL_SECONDS)

    def broken(self, child: Child) -> bool:
        """Return whether a child has failed more than `launch.max_restarts` times in a row."""
        return child.failures > self._launch.max_restarts

    def failed(self) -> Child | None:
        """Return a child whose failure ends everything: a restart cannot help it, or all of its kind are broken."""
        for child in self.children:
            if not child.is_essential:
                continue
            peers = [other for other in self.children if other.kind == child.kind]
            if child.exit_code in NO_RESTART or (
                self.broken(child) and all(self.broken(other) or other.ended for other in peers)
            ):
                return child
        return None

    def troubles(self) -> list[str]:
        """Return a sentence for each child that has failed and does not do its work."""
        return [trouble for child in self.children if (trouble := child.trouble(self._launch.max_restarts))]

    def report_troubles(self, client: BufferClient) -> None:
        """Tell the buffer about children that fail or load their model, for everybody who asks for the run's state."""
        troubles = self.troubles()
        started = [child for child in self.children if child.kind != "buffer" and child.process is not None]
        loading = {child.kind: 1.0 for child in started if not child.ready}
        if not (troubles or loading or self._reported):
            return
        reason = "; ".join(f"on {socket.gethostname()}: {trouble}" for trouble in troubles)[: fields.MAX_REASON]
        activity = "failing" if troubles else "watching"
        beat = messages.Heartbeat(activity=activity, reason=reason, weights_version=None, metrics=loading)
        with contextlib.suppress(BufferUnavailable, Refused):
            client.call(beat, messages.Done, deadline_seconds=_REPORT_SECONDS)
            self._reported = bool(troubles or loading)

    def stop(self, children: Sequence[Child], *, drain_seconds: float) -> None:
        """Send SIGTERM, wait for the children to drain, then kill what is left of their sessions."""
        for child in children:
            if child.pid is not None:
                os.kill(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + drain_seconds
        while any(child.running for child in children) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        for child in children:
            if child.running:
                log.warning("child killed: it did not end in time", child=child.name, pid=child.pid)
        self.kill(children)

    def kill(self, children: Sequence[Child]) -> None:
        for child in children:
            if child.process is not None:
                child.exit_code = self._collect(child)
            elif child.exit_code is None:
                # It was waiting for a restart.
                child.exit_code = 0

    def _start(self, child: Child) -> None:
        notices = self._notices[child.name]
        command = [sys.executable, "-m", "tba", *child.take_arguments()]
        environment = {**os.environ, **child.environment, PARENT_VARIABLE: str(os.getpid())}
        # Only the supervisor reports to systemd.
        environment["NOTIFY_SOCKET"] = notices.address
        # Discard notices of the previous process.
        notices.receive()
        with child.open_log() as output, starting_on(child.cores):
            child.process = subprocess.Popen(  # noqa: S603
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output or subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._guard.add(child.process.pid)
        if child.process.stdout is not None:
            child.relay = Relay(child.process.stdout, child.name, self.children.index(child))
        child.starts += 1
        child.ready = False
        child.started_at = time.monotonic()
        log.info("child started", child=child.name, pid=child.process.pid, start=child.starts)

    def _receive_notices(self, child: Child) -> None:
        child.notices = self._notices[child.name].receive()
        child.ready |= "READY=1" in child.notices
        for notice in child.notices:
            if notice.startswith(KV_CACHE_NOTICE):
                child.kv_cache_gib = notice.removeprefix(KV_CACHE_NOTICE)
            elif notice.startswith(EXTENSION):
                extend_start()

    def _check_running(self, child: Child) -> None:
        """Process the end of a child's process, if it has ended."""
        assert child.process is not None
        if time.monotonic() - child.started_at > _STABLE_SECONDS:
            child.failures = 0
        if child.running:
            return
        # Those that it sent just before it ended.
        self._receive_notices(child)
        code = child.last_code = self._collect(child)
        child.failures += code != 0
        child.last_words = child.quoted_error() if code else ""
        if not child.restarts_after(code):
            child.exit_code = code
            log.info("child ended", child=child.name, exit_code=code)
            return
        delay = backoff(child.failures, RESTART_DELAY_SECONDS, _LONGEST_DELAY_SECONDS)
        child.start_at = time.monotonic() + delay
        # Code 0 is not a failure: a searcher leaves a finished run.
        log_end = log.warning if code else log.info
        # What a process wrote before a signal ended it need not be the reason.
        words = f"it {ending(code)}; its last line: {child.last_words}" if code < 0 else child.last_words
        reason = {"reason": words} if code else {}
        log_end("child ended, and starts again", child=child.name, exit_code=code, **reason, in_seconds=delay)

    def _collect(self, child: Child) -> int:
        """Kill a child and its descendants, wait for them, and return the child's exit code.

        The session is killed before `wait` frees its id, which another process could then get. The guard forgets it
        last.
        """
        assert child.process is not None
        pid = child.process.pid
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        code = child.process.wait()
        child.process, child.ready = None, False
        self._reap_orphans(kill=True)
        self._guard.discard(pid)
        if child.relay is not None:
            child.relay.finish(_LAST_LINES_SECONDS)
        return code

    def _reap_orphans(self, *, kill: bool = False) -> None:
        """Collect exit codes of adopted processes; `kill` ends those outside every running child's session.

        A killed process leaves its children here, so this repeats; the deadline is for one that hangs in a driver.
        """
        living = {child.pid for child in self.children if child.pid}
        known = living | self._foreign | ({self._guard.pid} if self._guard.pid else set())
        deadline = time.monotonic() + _ORPHANS_SECONDS
        while orphans := child_pids() - known:
            doomed = {pid for pid in orphans if kill and session_of(pid) not in living}
            for pid in doomed:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            for pid in orphans:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            if not doomed or time.monotonic() > deadline:
                return
            time.sleep(_REAP_SECONDS)
