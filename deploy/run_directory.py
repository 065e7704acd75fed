"""The directory of a run: it belongs to one `tba run` at a time, and tells the state of the run.

The holder of its lock writes into the lock file which process it is, and later that it is about to end. The next
`tba run` then waits for it. The states are, for every command and page:

    starting              `tba run` starts its buffer, or the trainer has not connected yet
    running, stalled      a buffer serves it, and it moves or stands still
    evaluating, finished  the last step is done, and `tba run` evaluates or does nothing more
    stopped, crashed      it ended before the last step, in order or because something failed
"""

import contextlib
import itertools
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
from tba.common.config.run import RunSection
from tba.common.errors import LockTaken, RunTaken, TbaError, UsageError, format_time, quantity
from tba.common.evaluations import read_evaluations
from tba.common.log import get_logger
from tba.common.run_identity import RunIdentity, refuse_other_run
from tba.common.run_status import STARTING, Facts, State, describe, status_of
from tba.common.system.durable import exclusive_lock, is_locked, open_regular
from tba.common.terminal import own_command
from tba.common.wire.messages import Status
from tba.common.wire.socket_files import socket_of
from tba.deploy.child import drain_seconds

log = get_logger(__name__)

# What a line of the lock file begins with.
ENDING, FAILED, EVALUATES = "ending", "failed: ", "evaluates: "
# The time a launcher needs in addition to that of its children, which it ends in three groups one after another.
_MARGIN_SECONDS = 10.0
_POLL_SECONDS = 0.1
# Of a lock file: a holder writes a few lines.
_MOST_BYTES = 1 << 20
_DEFAULT_NAME = RunSection().name
_OPEN = "a program has the database open"
# Directories of a run that hold no other runs.
_OWN = {run_files.SNAPSHOTS, run_files.CHECKPOINTS, run_files.LOGS, run_files.SPOOL, run_files.WEIGHTS}
_OWN |= {"tensorboard", "wandb"}
_DEPTH = 3
_MOST_DIRECTORIES = 10_000

# How a run that has ended is described, and how it goes on.
_ENDED = {
    "finished": ("is finished", "with more train.steps extends it"),
    "stopped": ("is stopped", "continues it"),
    "crashed": ("has crashed", "continues it"),
}

ReadResults = Callable[[Path], list[dict[str, Any]]]


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


def list_runs(directory: Path, read_results: ReadResults) -> list[dict[str, Any]]:
    """Return a row for each run in `directory` or up to three levels below, the last changed first.

    `read_results` reads the runs of a database. A database that cannot be read is a row with the state `unreadable`.
    """
    rows = [row for folder in _folders(directory) for row in _rows(folder, read_results)]
    return sorted(rows, key=lambda row: row["changed"], reverse=True)


def local_state(config: Config, read_results: ReadResults, status: Status | None = None) -> dict[str, Any] | None:
    """Return the row of the configured run, with a sentence on how to go on; None if there is nothing of it here.

    `status` is what its server says, None if none answers.
    """
    rows = _rows(config.run.dir, read_results, status)
    name = config.run.name if status is None else status.run_name
    row = next((row for row in rows if row["run"] == name or (status is None and len(rows) == 1)), None)
    if row is None or row["state"] not in _ENDED or status is not None:
        return row and row | {"explanation": row["why"]}
    figures = [f"{name} {row[name]:.3g}" for name in ("reward", "accuracy") if row[name] is not None]
    result = ", ".join([f"{row['steps']} steps", *figures])
    state, end = _ENDED[row["state"]]
    why = f" ({row['why']})" if row["state"] == "crashed" else ""
    use = _OPEN if is_locked(run_files.database_lock(config.database)) else "nothing serves it any more"
    sentence = f"run {row['run']} in {row['directory']} {state}{why}, and {use}: {result}"
    return row | {"explanation": f"{sentence}; {_how_to_go_on(config.run.dir, row, end)}"}


def _how_to_go_on(directory: Path, row: dict[str, Any], end: str) -> str:
    """Return the command that continues a run. The source of an offline run is the buffer that it trains from."""
    if row["source"] is not None:
        return f"`tba train --offline --buffer {row['source']} --resume` {end}"
    if is_locked(directory / run_files.TRAINER_LOCK):
        return "its trainer waits for the buffer: `tba buffer serve` with the same configuration continues it"
    more = ["--set", f"train.steps={2 * row['planned']}"] if row["state"] == "finished" and row["planned"] else []
    return f"{resume_command(directory, more, secrets=row['secrets'])} {'extends it' if more else end}"


def _folders(directory: Path) -> Iterator[Path]:
    """Yield a directory and those below it, without links and without the directories that belong to a run."""
    for folder, below, _ in itertools.islice(os.walk(directory), _MOST_DIRECTORIES):
        yield Path(folder)
        is_deepest = len(Path(folder).relative_to(directory).parts) == _DEPTH
        below[:] = [] if is_deepest else sorted(set(below) - _OWN)


def _rows(folder: Path, read_results: ReadResults, status: Status | None = None) -> list[dict[str, Any]]:
    database, young = folder / run_files.DATABASE, {"run": folder.name, "changed_at": time.time()}
    if not database.is_file():
        return [_row(folder, young, *STARTING)] if is_locked(folder / run_files.LAUNCH_LOCK) else []
    try:
        results = read_results(database)
    except TbaError as error:
        return [_row(folder, young | {"changed_at": database.stat().st_mtime}, "unreadable", str(error))]
    return [
        _row(folder, result, *state_of(database, result, status or served_status(database, result)))
        for result in results
    ]


def served_status(database: Path, result: Mapping[str, Any]) -> Status | None:
    """Return what the server at a result's `address` says, None if none answers.

    Asked only while it holds the lock: a file of other origin must not choose where this machine connects to.
    """
    address = result.get("address")
    # The recorded run.dir may be relative to another directory.
    address = f"ipc://{socket_of(database.parent)}" if address == "auto" else address
    if not address or not is_locked(run_files.database_lock(database)):
        return None
    return status_of(result["run"], address, result.get("keys"))


def _row(folder: Path, result: dict[str, Any], state: str, why: str) -> dict[str, Any]:
    steps, planned = result.get("steps"), result.get("planned")
    last = (read_evaluations(folder, result["run"]) or [{}])[-1]
    unknown = f"last evaluation not measured: {last['not_measured']}" if last.get("not_measured") else ""
    return {
        # With the default name, every run would be called the same.
        "name": folder.resolve().name if result["run"] == _DEFAULT_NAME else result["run"],
        "run": result["run"],
        "state": state,
        "steps": f"{steps}/{planned}" if planned else steps,
        "reward": result.get("reward"),
        "accuracy": last.get("accuracy"),
        "changed": f"{changed} UTC" if (changed := format_time(result["changed_at"])) else "",
        "planned": planned,
        "source": result.get("source"),
        "secrets": result.get("secrets", []),
        "directory": str(folder),
        "why": "; ".join(filter(None, [why, unknown])),
    }


def state_of(database: Path, result: Mapping[str, Any], status: Status | None) -> State:
    """Return the state of a run from `finished`, `steps` and what its server says. The sentence may be ""."""
    is_launched = is_locked(database.parent / run_files.LAUNCH_LOCK)
    launch = last_launch(database.parent) if is_launched else None
    if launch is not None and launch.evaluates:
        return State("evaluating", f"finished after {quantity(result['steps'], 'step')}; {launch.evaluates}")
    if status is not None:
        return describe(Facts(status))
    is_open = is_locked(run_files.database_lock(database))
    if is_open and not result["finished"]:
        return State(
            "running", "the buffer does not answer: it starts, is busy, or another program has the database open"
        )
    if launch is not None:
        return State("finished", "`tba run` is ending") if launch.ending and result["finished"] else STARTING
    return (
        State("finished", _OPEN if is_open else "") if result["finished"] else _interrupted(database, result["steps"])
    )


def _interrupted(database: Path, steps: int) -> State:
    launch = last_launch(database.parent)
    if launch is not None and launch.failure:
        return State("crashed", launch.failure)
    unended = launch is not None and not launch.ending
    if launch is not None and unended and launch.holder.partition(" on ")[2] not in ("", socket.gethostname()):
        # Locks of other machines are not visible.
        return State("running", f"or killed, on another machine: {launch.holder}")
    # A buffer that ends in order leaves no log.
    log = run_files.write_ahead_log(database)
    if log.exists() and log.stat().st_size:
        who = "the buffer was killed" + ("" if launch is not None else ", unless it serves on another machine")
        who = "`tba run` and its buffer were killed" if unended else who
        return State("crashed", f"{who}: nothing acknowledged is lost, and --resume continues")
    if unended:
        return State("crashed", "`tba run` was killed")
    return State("stopped", "continue it with --resume" if steps else "")
