"""The directory of a run belongs to one `tba run` at a time.

The holder of its lock writes into the lock file which process it is, and later that it is about to end. The next
`tba run` then waits for it.
"""

import contextlib
import os
import shlex
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba.common import run_files
from tba.common.config import Config
from tba.common.config.layers import ENVIRONMENT_PREFIX
from tba.common.errors import LockTaken, RunTaken, UsageError
from tba.common.log import get_logger
from tba.common.run_identity import RunIdentity, refuse_other_run
from tba.common.system.durable import exclusive_lock, open_regular
from tba.common.terminal import own_command
from tba.deploy.child import drain_seconds

log = get_logger(__name__)

# What a line of the lock file begins with.
ENDING, FAILED, EVALUATES = "ending", "failed: ", "evaluates: "
# The time a launcher needs in addition to that of its children, which it ends in three groups one after another.
_MARGIN_SECONDS = 10.0
_POLL_SECONDS = 0.1
# Of a lock file: a holder writes a few lines.
_MOST_BYTES = 1 << 20


def holds_run(config: Config) -> bool:
    """Return whether run.dir holds trained steps. The trainer creates the metrics: an attempt that failed has none."""
    metrics = config.run.dir / run_files.METRICS
    return metrics.exists() and metrics.stat().st_size > 0


def refuse_start(config: Config, results: Sequence[Mapping[str, Any]], *, resume: bool) -> None:
    """Raise UsageError if a run must not start in run.dir, ConfigError if the directory belongs to another run."""
    directory, name = config.run.dir, config.run.name
    found = [RunIdentity(result["run"], result.get("source") or "") for result in results]
    # An offline run is alone in its database wherever that is, as `tba.buffer.store.starts` has it.
    if resume or config.database.parent == directory or any(run.source for run in found):
        refuse_other_run(config.database, found, RunIdentity(name))
    own = next((result for result in results if result["run"] == name), None)
    if own is not None and own["finished"] and (config.train.steps <= own["steps"] or not resume):
        steps = f"{own['steps']} of {own['planned'] or own['steps']} steps"
        raise UsageError(
            f"{directory} holds run {name}, which is finished ({steps}): extend it with --resume and a larger "
            "train.steps, or choose another run.dir; `tba eval --all` and `tba report` evaluate and show it"
        )
    if own is not None and resume and config.train.steps < (own["steps"] or 0):
        raise UsageError(
            f"{directory} holds run {name}, which has made {own['steps']} steps, and train.steps is "
            f"{config.train.steps}: set a larger one"
        )
    if not resume and holds_run(config):
        raise UsageError(f"{directory} already holds a run: add --resume to continue it, or choose another run.dir")
    if resume and not config.database.exists():
        raise UsageError(f"{directory} holds no run to resume: leave out --resume, or set run.dir to that of a run")


@contextlib.contextmanager
def sole_launcher(config: Config) -> Iterator[None]:
    """Hold the run's directory in the block. Raises RunTaken."""
    lock_file = config.run.dir / run_files.LAUNCH_LOCK
    with _lock(lock_file):
        _write_line(lock_file, "wb", f"pid {os.getpid()} on {socket.gethostname()}")
        yield


def mark(config: Config, what: str, sentence: str = "") -> None:
    """Record in the lock file that its holder, this process, is ENDING, has FAILED, or EVALUATES, with a sentence."""
    _write_line(config.run.dir / run_files.LAUNCH_LOCK, "ab", what + sentence.partition("\n")[0])


@dataclass(frozen=True, slots=True)
class Launch:
    """The last `tba run`: its process, whether it is ending, why it gave up, and what it does after the last step."""

    holder: str
    ending: bool
    failure: str
    evaluates: str


def last_launch(directory: Path) -> Launch | None:
    """Return the last `tba run` of a directory, None if its roles were started by hand."""
    try:
        with open_regular(directory / run_files.LAUNCH_LOCK) as file:
            lines = file.read(_MOST_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return None

    def after(start: str) -> str:
        return next((line.removeprefix(start) for line in reversed(lines) if line.startswith(start)), "")

    ending = ENDING in lines
    return Launch(lines[0] if lines else "", ending, after(FAILED), "" if ending else after(EVALUATES))


def resume_command(directory: Path, more: Sequence[str] = (), *, secrets: Iterable[str] = ()) -> str:
    """Return, in backquotes, the command that continues the run of a directory with its recorded settings.

    `more` are settings on top. `secrets` are the keys that it needs again, which no run records.
    """
    variables = " and ".join(f"{ENVIRONMENT_PREFIX}{key.upper().replace('.', '__')}" for key in sorted(secrets))
    again = f" (set {variables} again: a secret is not recorded)" if variables else ""
    return f"`{shlex.join([*own_command(), 'run', str(directory), '--resume', *more])}`{again}"


def await_previous(config: Config, stop: Callable[[], bool], report: Callable[[str], None]) -> None:
    """Wait until no `tba run` holds the directory, or `stop()`. `report` receives one sentence if there is a wait.

    Raises RunTaken if the holder is not about to end, or has not ended within the time that its children may use.
    """
    path = config.run.dir / run_files.LAUNCH_LOCK
    patience = drain_seconds(config, trains=True) + 2 * drain_seconds(config) + _MARGIN_SECONDS
    deadline = 0.0
    # os.path, since Path.exists raises where this user has no access. A later check reports that.
    while os.path.exists(path) and not stop():
        try:
            with _lock(path):
                return
        except RunTaken:
            holder, ending = _holder(path)
            if not ending:
                raise
        if not deadline:
            deadline = time.monotonic() + patience
            report(f"the previous `tba run` ({holder}) is still ending: waiting for it, {patience:.0f} s at most")
        elif time.monotonic() > deadline:
            raise RunTaken(
                f"the previous `tba run` of {config.run.dir} ({holder}) has not ended within {patience:.0f} s: "
                "try again later, or end it"
            )
        time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(exclusive_lock(path, ""))
        except LockTaken:
            use = f"{path.parent} is in use by another `tba run` ({_holder(path)[0]})"
            raise RunTaken(f"{use}: stop that one, or wait until it ends") from None
        yield


def _write_line(path: Path, mode: str, line: str) -> None:
    """Write a line for the next launcher. An error, such as a full disk, must not stop this one: it is logged."""
    try:
        with open_regular(path, mode) as file:
            file.write(f"{line}\n".encode())
    except OSError as error:
        log.warning("the lock file cannot be written", path=path, reason=str(error))


def _holder(path: Path) -> tuple[str, bool]:
    """Return a description of the lock's holder, and whether it is about to end."""
    launch = last_launch(path.parent)
    return (launch.holder if launch else "") or "one that has just started", launch is not None and launch.ending
