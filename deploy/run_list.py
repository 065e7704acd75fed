"""The state of a run, for every command and page, and the runs below a directory with their results.

starting              `tba run` starts its buffer, or the trainer has not connected yet
running, stalled      a buffer serves it, and it moves or stands still
evaluating, finished  the last step is done, and `tba run` evaluates or does nothing more
stopped, crashed      it ended before the last step, in order or because something failed
"""

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tba.common import run_files
from tba.common.config import Config
from tba.common.config.run import RunSection
from tba.common.errors import TbaError, format_time, quantity
from tba.common.evaluations import read_evaluations
from tba.common.run_status import STARTING, Facts, State, describe, status_of
from tba.common.system.durable import is_locked
from tba.common.wire.messages import Status
from tba.common.wire.socket_files import socket_of
from tba.deploy.run_directory import last_launch, resume_command

_DEFAULT_NAME = RunSection().name
# Directories of a run that hold no other runs.
_OPEN = "a program has the database open"
_OWN = {
    run_files.SNAPSHOTS,
    run_files.CHECKPOINTS,
    run_files.LOGS,
    run_files.SPOOL,
    run_files.WEIGHTS,
    "tensorboard",
    "wandb",
}
_DEPTH = 3
_MOST_DIRECTORIES = 10_000

# How a run that has ended is described, and how it goes on.
_ENDED = {
    "finished": ("is finished", "with more train.steps extends it"),
    "stopped": ("is stopped", "continues it"),
    "crashed": ("has crashed", "continues it"),
}

ReadResults = Callable[[Path], list[dict[str, Any]]]


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
