"""Child processes: started, watched, restarted after a failure, and never left behind.

    waiting ──► running ──► done          (exit code 0, unless it is to run always)
       ▲           │
       └── backoff ┴──► hopeless          (78 or 2: restarting cannot help)

Every child is the leader of a session of its own, so that Ctrl-C reaches only the supervisor, which then ends them
in order. Three things see to it that nothing is left behind:
- a child ends when the supervisor is killed (PR_SET_PDEATHSIG, `tba.common.process`);
- when a child ends, its session is killed, and so is what had left that session: the supervisor is the subreaper,
  so orphans become its own children;
- when the supervisor is killed, `tba.common.guard` kills the sessions. Only a process that has left its child's
  session survives that; under systemd the control group catches it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

from tba.common.config import LaunchSection
from tba.common.cores import Core, starting_on
from tba.common.errors import EXIT_BROKEN, EXIT_CONFIG, EXIT_USAGE, ConfigError
from tba.common.guard import SessionGuard, session_of
from tba.common.log import get_logger
from tba.common.process import PARENT_VARIABLE, NotifySocket, adopt_orphans, child_pids
from tba.deploy.relay import Relay

log = get_logger(__name__)

HOPELESS = (EXIT_CONFIG, EXIT_USAGE, EXIT_BROKEN)
_POLL_SECONDS = 0.1
_LAST_LINES_SECONDS = 2.0
_ORPHANS_SECONDS = 5.0
_REAP_SECONDS = 0.005
_TAIL_LINES = 15


@dataclass(slots=True)
class Child:
    """One `tba` process. `after_first` are arguments that only a restart gets, such as --resume.

    Its output goes to `log_file`, or line by line where ours goes if that is None.
    """

    name: str
    kind: str  # children of one kind can stand in for each other
    arguments: Sequence[str]
    log_file: Path | None
    after_first: Sequence[str] = ()
    always: bool = False  # also start it again when it ended with exit code 0
    once: bool = False  # never start it again
    after: "Child | None" = None  # it starts, and starts again, only while that one is ready
    environment: dict[str, str] = field(default_factory=dict)
    cores: Sequence[Core] | None = None  # None: those of the supervisor
    process: subprocess.Popen[bytes] | None = None
    relay: Relay | None = None
    ready: bool = False  # it has said so since its last start
    starts: int = 0
    failures: int = 0  # in a row; forgotten when it has run well for a while
    last_code: int | None = None  # of its last end
    started_at: float = 0.0  # monotonic
    start_at: float = 0.0  # monotonic; when a restart is due
    exit_code: int | None = None  # of the last end; None while it runs or waits for a restart

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self.process.pid if self.process else None

    @property
    def ended(self) -> bool:
        """It is not running and will not be started again."""
        return self.exit_code is not None

    @property
    def due(self) -> bool:
        """It may start now, if it does not run."""
        return not self.ended and (self.after is None or self.after.ready) and time.monotonic() >= self.start_at

    def log_tail(self) -> str:
        """The last lines that it wrote."""
        if self.relay is not None:
            return "\n".join(self.relay.tail)
        if self.log_file is not None:
            with contextlib.suppress(OSError), self.log_file.open(encoding="utf-8", errors="replace") as file:
                return "".join(deque(file, _TAIL_LINES)).rstrip()
        return ""


class Supervisor:
    """Runs children and restarts those that fail. Used by one thread, as a context: none outlives it."""

    def __init__(self, children: Sequence[Child], launch: LaunchSection) -> None:
        self.children = list(children)
        self._launch = launch
        self._guard = SessionGuard()
        self._not_ours: frozenset[int] = frozenset()  # children that were there before
        self._notices = {child.name: NotifySocket() for child in children}

    def __enter__(self) -> Self:
        self._not_ours = frozenset(child_pids())
        adopt_orphans()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(self.children)
        for notices in self._notices.values():
            notices.close()
        self._guard.close()

    def tend(self) -> None:
        """Start what is due, notice what has ended. Call it often."""
        self._guard.keep()
        self._reap_orphans()
        for child in self.children:
            if child.process is not None:
                child.ready |= "READY=1" in self._notices[child.name].receive()
                self._notice_end(child)
            elif child.due:
                self._start(child)

    def broken(self, child: Child) -> bool:
        """It has failed too often in a row."""
        return child.failures > self._launch.max_restarts

    def failed(self) -> Child | None:
        """A child whose end is the end of all: no restart can help it, or it is broken and so are all like it."""
        for child in self.children:
            peers = [other for other in self.children if other.kind == child.kind]
            if child.exit_code in HOPELESS or (
                self.broken(child) and all(self.broken(other) or other.ended for other in peers)
            ):
                return child
        return None

    def stop(self, children: Sequence[Child], *, drain_seconds: float) -> None:
        """SIGTERM, time to drain, then SIGKILL to the whole session."""
        for child in children:
            if _running(child):
                assert child.process is not None
                child.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + drain_seconds
        while any(_running(child) for child in children) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        for child in filter(_running, children):
            log.warning("child killed: it did not end in time", child=child.name, pid=child.pid)
        self.kill(children)

    def kill(self, children: Sequence[Child]) -> None:
        """End children and their own children now."""
        for child in children:
            if child.process is not None:
                child.exit_code = self._bury(child)
            elif child.exit_code is None:
                child.exit_code = 0  # it was waiting for a restart that nobody needs now

    def _start(self, child: Child) -> None:
        command = [sys.executable, "-m", "tba", *child.arguments, *(child.after_first if child.starts else ())]
        environment = {**os.environ, **child.environment, PARENT_VARIABLE: str(os.getpid())}
        environment["NOTIFY_SOCKET"] = self._notices[child.name].address  # what systemd hears is ours to tell
        self._notices[child.name].receive()  # the last words of the one before
        with _output_of(child) as output, starting_on(child.cores):
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

    def _notice_end(self, child: Child) -> None:
        assert child.process is not None
        if child.process.poll() is None:
            self._forget_failures(child)
            return
        self._forget_failures(child)
        code = child.last_code = self._bury(child)
        child.failures += code != 0
        if child.once or code in HOPELESS or (code == 0 and not child.always):
            child.exit_code = code
            log.info("child ended", child=child.name, exit_code=code)
            return
        delay = backoff(self._launch, child.failures)
        child.start_at = time.monotonic() + delay
        say = log.warning if code else log.info  # a searcher that leaves a finished run is no trouble
        say("child ended, and starts again", child=child.name, exit_code=code, in_seconds=delay)

    def _forget_failures(self, child: Child) -> None:
        if time.monotonic() - child.started_at > self._launch.stable_seconds:
            child.failures = 0

    def _bury(self, child: Child) -> int:
        """Kill a child and all that it started; its exit code."""
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
        """Take the exit codes of adopted processes; `kill` those that are in no running child's session."""
        living = {child.pid for child in self.children if child.pid}
        known = living | self._not_ours | ({self._guard.pid} if self._guard.pid else set())
        deadline = time.monotonic() + _ORPHANS_SECONDS  # one that hangs in a driver does not die before that returns
        while orphans := child_pids() - known:
            # What a doomed one has started becomes ours when it ends, so again until there is none.
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


def backoff(launch: LaunchSection, failures: int) -> float:
    """Seconds before the next start after so many failures in a row."""
    doublings = min(max(failures - 1, 0), 60)
    return min(launch.restart_delay_seconds * 2.0**doublings, launch.restart_delay_max_seconds)


def _output_of(child: Child) -> contextlib.AbstractContextManager[IO[bytes] | None]:
    if child.log_file is None:
        return contextlib.nullcontext()
    try:
        child.log_file.parent.mkdir(parents=True, exist_ok=True)
        return child.log_file.open("ab")
    except OSError as error:
        raise ConfigError(f"run.dir: {child.log_file} cannot be written: {error.strerror}") from error


def _running(child: Child) -> bool:
    return child.process is not None and child.process.poll() is None
