"""One supervised `tba` process: how to start it, when to restart it, why it failed, and how long it takes to end."""

import contextlib
import enum
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tba.common.config import Config
from tba.common.errors import EXIT_BROKEN, EXIT_CONFIG, EXIT_USAGE, ConfigError, TbaError, quantity
from tba.common.log import json_wanted
from tba.common.system.background import Background
from tba.common.system.devices import CPU
from tba.common.system.durable import open_regular
from tba.common.system.process import signal_name
from tba.deploy.doctor import CHECKPOINT_BYTES, count_parameters

# Exit codes after which a restart cannot help.
NO_RESTART = (EXIT_CONFIG, EXIT_USAGE, EXIT_BROKEN)
_ERROR_PREFIX = "error: "
# The last line of a traceback.
_RAISED = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b")
_TAIL_BYTES = 64 << 10
_QUOTED_CHARACTERS = 500
# What a child needs besides a checkpoint: a searcher delivers, the buffer commits.
_DRAIN_SECONDS = 20.0
# Writing, fsync and sha256 after one another on an NVMe disk of 2 GB/s.
_BYTES_PER_SECOND = 0.5e9
# The checkpoint in progress is finished before the last one begins.
_CHECKPOINTS = 2
# For a model whose files are not on this machine.
_UNKNOWN_DRAIN_SECONDS = 600.0
# ANSI codes of the name's colour.
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
# Longer lines are cut into pieces of this size, so that memory stays bounded.
_MAX_LINE_BYTES = 64 << 10
TAIL_LINES = 15
# Held while a line is written, so that lines of several children never mix.
_writing = threading.Lock()


class RestartPolicy(enum.Enum):
    """When a child that has ended is started again. None of them restarts it after a code in `NO_RESTART`."""

    NEVER = enum.auto()
    ON_FAILURE = enum.auto()
    ALWAYS = enum.auto()


class Relay:
    """Reads one child's output on a thread, so that a terminal that is paused (Ctrl-S) stops no supervisor."""

    def __init__(self, pipe: IO[bytes], name: str, number: int) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._pipe = pipe
        self._name = name
        self._json = json_wanted()
        colour = _COLOURS[number % len(_COLOURS)] if sys.stderr.isatty() else None
        self._prefix = f"\033[{colour}m{name} |\033[0m " if colour else f"{name} | "
        self._thread = Background(f"relay-{name}", self._copy)
        self._thread.start()

    def finish(self, timeout_seconds: float) -> None:
        """Wait for the last lines of a child that has ended."""
        self._thread.join(timeout_seconds)

    def _copy(self) -> None:
        with self._pipe:
            while line := self._pipe.readline(_MAX_LINE_BYTES):
                text = line.decode(errors="replace").rstrip("\r\n")
                self.tail.append(text)
                _write(self._as_json(text) if self._json else self._prefix + text)

    def _as_json(self, text: str) -> str:
        """Return a JSON line of tba unchanged, since it names its GPU; other output becomes the field `line`."""
        if text.startswith("{"):
            with contextlib.suppress(ValueError):
                json.loads(text)
                return text
        return json.dumps({"level": "info", "gpu": self._name, "event": "output", "line": text})


def _write(line: str) -> None:
    data = f"{line}\n".encode(errors="replace")
    with _writing:
        try:
            # A pipe may accept only a part.
            while data:
                data = data[os.write(sys.stderr.fileno(), data) :]
        except OSError:
            # The reader is gone. Lines are dropped, so that children never block on their output.
            return


@dataclass(slots=True)
class Child:
    """One `tba` process and the state of its supervision. Times are monotonic, in seconds."""

    name: str
    kind: str
    """Children of one kind can do each other's work."""
    arguments: Sequence[str]
    log_file: Path | None
    """Where its output goes; None copies it line by line to the supervisor's standard error."""
    restart: RestartPolicy = RestartPolicy.ON_FAILURE
    restart_arguments: Sequence[str] = ()
    """Further arguments of every start but the first, such as --resume."""
    is_essential: bool = True
    """Whether its failure for good is that of its supervisor."""
    after: "Child | None" = None
    """It is started, and restarted, only while this other child is ready."""
    gpus: str = CPU
    """The GPUs that it uses, as a setting names them."""
    behind: Sequence["Child"] = ()
    """Engines on its GPUs, which measure the free memory there: each is ready or has given up before it starts."""
    kv_cache_gib: str = ""
    """The size of the KV cache that its engine reported at its last start; the next start has the same."""
    environment: dict[str, str] = field(default_factory=dict)
    cores: Sequence[int] | None = None
    """The CPU cores it may use; None means those of the supervisor."""
    process: subprocess.Popen[bytes] | None = None
    relay: Relay | None = None
    ready: bool = False
    """Whether it has sent READY=1 since its last start."""
    notices: Sequence[str] = ()
    """What it has sent to systemd between the last two polls, such as WATCHDOG=1."""
    starts: int = 0
    failures: int = 0
    """Failures in a row; reset after ten minutes without one."""
    last_code: int | None = None
    """Exit code of its last end, also while it waits for a restart."""
    started_at: float = 0.0
    start_at: float = 0.0
    """When a restart is due."""
    last_words: str = ""
    """The last error in the output of its last process that failed."""
    exit_code: int | None = None
    """Exit code once it has ended and will not be restarted."""

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    @property
    def running(self) -> bool:
        """Whether its process exists and has not ended. Leaves one that has ended to `wait`, with its number."""
        if self.process is None:
            return False
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    @property
    def ended(self) -> bool:
        return self.exit_code is not None

    def take_arguments(self) -> list[str]:
        """Return the arguments of its next start, with the KV cache's size if the last start has reported it."""
        size = [f"--set=search.kv_cache_gib={self.kv_cache_gib}"] if self.kv_cache_gib else []
        self.kv_cache_gib = ""
        return [*self.arguments, *(self.restart_arguments if self.starts else ()), *size]

    @property
    def due(self) -> bool:
        """Whether it may be started now, if it does not run."""
        return not self.ended and (self.after is None or self.after.ready) and time.monotonic() >= self.start_at

    def restarts_after(self, code: int) -> bool:
        """Return whether it is started again after it ended with this exit code."""
        if code in NO_RESTART or self.restart is RestartPolicy.NEVER:
            return False
        return code != 0 or self.restart is RestartPolicy.ALWAYS

    def log_tail(self) -> str:
        if self.relay is not None:
            return "\n".join(self.relay.tail)
        if self.log_file is not None:
            with contextlib.suppress(OSError), open_regular(self.log_file) as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return b"".join(deque(file, TAIL_LINES)).decode(errors="replace").rstrip()
        return ""

    def last_error(self) -> str:
        """Return the last error sentence in its output, empty if there is none."""
        lines = reversed(self.log_tail().splitlines())
        return next((line for line in lines if line.startswith(_ERROR_PREFIX)), "").removeprefix(_ERROR_PREFIX)

    def quoted_error(self) -> str:
        """Return the last error sentence in its output, else the last line of a traceback, else the last line."""
        lines = [line.strip() for line in self.log_tail().splitlines() if line.strip()]
        raised = (line for line in reversed(lines) if _RAISED.match(line))
        return (self.last_error() or next(raised, lines[-1] if lines else "it wrote nothing"))[:_QUOTED_CHARACTERS]

    def trouble(self, max_restarts: int) -> str:
        """Return a sentence if it has failed and does not do its work yet, or again; empty otherwise."""
        broken = self.failures > max_restarts
        if self.ended or not self.failures or (self.process is not None and self.ready and not broken):
            return ""
        starts_in = max(self.start_at - time.monotonic(), 0.0)
        when = "is being restarted" if self.process is not None else f"starts again in {starts_in:.0f} s"
        code = self.last_code or 0
        last = f"it {ending(code)}" if code < 0 else f"last exit code {code}"
        how = f"failed {quantity(self.failures, 'time')}, {last}"
        # What it wrote before a signal ended it is not the reason.
        words = f": {self.last_words}" if code >= 0 else ""
        return f"{self.name} {'broken, ' if broken else ''}{when} ({how}){words}"

    def failure(self) -> TbaError:
        """Return the error of a child that has failed for good, with its exit code where a restart cannot help."""
        code, sentence = self.last_code, self.last_error()
        where = f" of {self.log_file}" if self.log_file else ""
        error = TbaError(f"{self.name} failed with exit code {code}; the end{where}:\n{self.log_tail()}")
        if code in NO_RESTART:
            error = TbaError(f"{self.name}: {sentence}") if sentence else error
            error.exit_code = code
        return error

    def open_log(self) -> contextlib.AbstractContextManager[IO[bytes] | None]:
        """Open the log file to append to it; the context gives None if there is none. Raises ConfigError."""
        if self.log_file is None:
            return contextlib.nullcontext()
        try:
            self.log_file.parent.mkdir(parents=True, exist_ok=True)
            return open_regular(self.log_file, "ab")
        except OSError as error:
            raise ConfigError(f"run.dir: {self.log_file} cannot be written: {error.strerror}") from error


def ending(code: int) -> str:
    """Describe how a process ended: `failed with exit code 1`, or `was ended by SIGKILL`."""
    return f"was ended by {signal_name(-code)}" if code < 0 else f"failed with exit code {code}"


def drain_seconds(config: Config, *, trains: bool = False) -> float:
    """Return `launch.drain_seconds`; with `auto`, a child that `trains` has enough for the checkpoints of its model."""
    if config.launch.drain_seconds != "auto":
        return config.launch.drain_seconds
    # Checkpoints of adapters are small.
    if not trains or config.lora.rank:
        return _DRAIN_SECONDS
    trained = count_parameters(config)
    if trained is None:
        return _UNKNOWN_DRAIN_SECONDS
    return _DRAIN_SECONDS + _CHECKPOINTS * CHECKPOINT_BYTES * trained / _BYTES_PER_SECOND
