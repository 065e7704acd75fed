"""Child processes: started, watched, restarted after a failure, and never left behind.

    waiting ──► running ──► done          (exit code 0, unless it is to run always)
       ▲           │
       └── backoff ┴──► failed            (78 or 2: restarting cannot help; or too many restarts)

Every child is the leader of a process group of its own, so that Ctrl-C reaches only the launcher, which
then ends them in order. A child also ends when the launcher is killed (`tba.common.process`).
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
from typing import IO

from tba.common.errors import EXIT_CONFIG, EXIT_USAGE, ConfigError
from tba.common.log import get_logger
from tba.common.process import PARENT_VARIABLE

log = get_logger(__name__)

_HOPELESS = (EXIT_CONFIG, EXIT_USAGE)
_POLL_SECONDS = 0.1
_HEALTHY_SECONDS = 600.0
_TAIL_LINES = 15


@dataclass(slots=True)
class Child:
    """One `tba` process. `after_first` are arguments that only a restart gets, such as --resume.

    Its output goes to `log_file`, or where ours goes if that is None.
    """

    name: str
    kind: str  # children of one kind can stand in for each other
    arguments: Sequence[str]
    log_file: Path | None
    after_first: Sequence[str] = ()
    always: bool = False  # also start it again when it ended with exit code 0
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    failures: int = 0  # in a row; forgotten when it has run well for a while
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

    def log_tail(self) -> str:
        """The last lines that it wrote, where there is a file of them."""
        if self.log_file is None:
            return ""
        with contextlib.suppress(OSError), self.log_file.open(encoding="utf-8", errors="replace") as file:
            return "".join(deque(file, _TAIL_LINES))
        return ""


class Supervisor:
    """Runs children and restarts those that fail. Used by one thread."""

    def __init__(self, children: Sequence[Child], *, max_restarts: int, restart_delay: float) -> None:
        self.children = list(children)
        self._max_restarts = max_restarts
        self._restart_delay = restart_delay

    def tend(self) -> None:
        """Start what is due, notice what has ended. Call it often."""
        for child in self.children:
            if child.process is not None:
                self._notice_end(child)
            elif not child.ended and time.monotonic() >= child.start_at:
                self._start(child)

    def failed(self) -> Child | None:
        """A child whose end is the end of all: it ended badly for good, and no other does its work."""
        for child in self.children:
            peers = [other for other in self.children if other.kind == child.kind]
            if child.exit_code in _HOPELESS or (child.exit_code and all(other.exit_code for other in peers)):
                return child
        return None

    def stop(self, children: Sequence[Child], *, drain_seconds: float) -> None:
        """SIGTERM, time to drain, then SIGKILL to the whole process group."""
        for child in children:
            _signal(child, signal.SIGTERM)
        deadline = time.monotonic() + drain_seconds
        while any(_running(child) for child in children) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        self.kill(children)

    def kill(self, children: Sequence[Child]) -> None:
        """End children and their own children now."""
        for child in children:
            if _running(child):
                log.warning("child killed", child=child.name, pid=child.pid)
            _signal_group(child, signal.SIGKILL)
            if child.process is not None:
                child.exit_code = child.process.wait()
                child.process = None
            elif child.exit_code is None:
                child.exit_code = 0  # it was waiting for a restart that nobody needs now

    def _start(self, child: Child) -> None:
        command = [sys.executable, "-m", "tba", *child.arguments, *(child.after_first if child.starts else ())]
        environment = {**os.environ, **child.environment, PARENT_VARIABLE: str(os.getpid())}
        environment.pop("NOTIFY_SOCKET", None)  # readiness is the launcher's to tell
        with _output_of(child) as output:
            child.process = subprocess.Popen(  # noqa: S603
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        child.starts += 1
        child.started_at = time.monotonic()
        log.info("child started", child=child.name, pid=child.process.pid, start=child.starts)

    def _notice_end(self, child: Child) -> None:
        assert child.process is not None
        code = child.process.poll()
        if code is None:
            return
        _signal_group(child, signal.SIGKILL)  # grandchildren, such as the workers of an engine
        child.process = None
        if time.monotonic() - child.started_at > _HEALTHY_SECONDS:
            child.failures = 0
        child.failures += code != 0
        hopeless = code in _HOPELESS or child.failures > self._max_restarts
        if hopeless or (code == 0 and not child.always):
            child.exit_code = code
            log.info("child ended", child=child.name, exit_code=code)
            return
        delay = self._restart_delay * 2 ** max(child.failures - 1, 0)
        child.start_at = time.monotonic() + delay
        say = log.warning if code else log.info  # a searcher that leaves a finished run is no trouble
        say("child ended, and starts again", child=child.name, exit_code=code, in_seconds=delay)


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


def _signal(child: Child, number: int) -> None:
    if child.process is not None and child.process.poll() is None:
        child.process.send_signal(number)


def _signal_group(child: Child, number: int) -> None:
    if child.process is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, number)
