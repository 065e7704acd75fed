"""A recorded run at one step: what its buffer held when the batch of that step was sampled.

An offline run attaches its database read-only, so that its trajectories replace those of the own one in every query.
"""

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from tba.buffer.store.database import DatabaseFile
from tba.buffer.store.reader import open_reader
from tba.buffer.store.starts import choose_run, recorded_source
from tba.buffer.store.storage_errors import storage_errors
from tba.buffer.store.tables.batches import SUMMARY
from tba.buffer.store.tables.runs import Run
from tba.common.errors import ConfigError, StorageError, UsageError


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A recorded run at a step of its history, by default its end (`at_end`).

    `policy_steps` maps each policy version to its optimiser step. `losses` are those of the steps before;
    `compacted_steps` those before whose batches lost tokens to `tba buffer prune --tokens`, and `compacted` counts
    these trajectories.
    """

    path: Path
    run: int
    run_name: str
    run_uuid: str
    step: int
    at_end: bool
    newest_trajectory: int
    policy_steps: dict[int, int]
    losses: dict[int, float]
    compacted_steps: list[int]
    compacted: int


_LOSSES = "SELECT step, json_extract(metrics, '$.loss') FROM batches WHERE run = ? AND trained_at IS NOT NULL"
_COMPACTED_STEPS = """
SELECT DISTINCT b.step FROM trajectory_rows t JOIN consumption_rows c ON c.trajectory = t.id
JOIN batches b ON b.id = c.batch
WHERE t.run = ? AND t.compacted_at IS NOT NULL AND t.archive IS NULL AND b.run = t.run AND b.step < ? ORDER BY b.step
"""
_COMPACTED = """
SELECT COUNT(*) FROM trajectory_rows
WHERE run = ? AND id <= ? AND error IS NULL AND compacted_at IS NOT NULL AND archive IS NULL
"""


def read_recorded_run(path: Path, *, run: str | None, as_of: int | None) -> RecordedRun:
    """Read a recorded run; `run` None is the only one of the file, `as_of` None its end.

    Raises UsageError for a file, run or step that does not exist, ConfigError for a file that is no buffer.
    """
    try:
        with open_reader(path) as connection:
            recorded = _read(connection, path, run, as_of)
    except StorageError as error:
        raise ConfigError(str(error)) from error
    if recorded.newest_trajectory == 0:
        if (source := recorded_source(path)) is not None:
            raise UsageError(
                f"{path} is the record of a run that was trained offline from {source.file}: name that file"
            )
        raise UsageError(
            f"{path} holds no trajectories of run {recorded.run_name}, or none before step {recorded.step}"
        )
    return recorded


def _read(connection: sqlite3.Connection, path: Path, run: str | None, as_of: int | None) -> RecordedRun:
    rows = connection.execute("SELECT name, id, uuid FROM runs ORDER BY id")
    runs = {name: (id_, uuid) for name, id_, uuid in rows}
    run = choose_run(path, runs, run, "--source-run")
    id_, uuid = runs[run]
    losses = dict(connection.execute(_LOSSES, (id_,)))
    step = max(losses, default=-1) + 1 if as_of is None else as_of
    newest = _newest_at(connection, path, id_, as_of)
    return RecordedRun(
        path=path,
        run=id_,
        run_name=run,
        run_uuid=uuid,
        step=step,
        at_end=as_of is None,
        newest_trajectory=newest,
        policy_steps=dict(connection.execute("SELECT version, step FROM snapshots WHERE run = ?", (id_,))),
        losses={trained: loss for trained, loss in losses.items() if trained < step and loss is not None},
        compacted_steps=[row[0] for row in connection.execute(_COMPACTED_STEPS, (id_, step))],
        compacted=connection.execute(_COMPACTED, (id_, newest)).fetchone()[0],
    )


def _newest_at(connection: sqlite3.Connection, path: Path, run: int, step: int | None) -> int:
    """Return the newest trajectory that existed when the batch of a step was sampled, 0 if there was none."""
    if step is None:
        query = "SELECT COALESCE(MAX(id), 0) FROM trajectory_rows WHERE run = ?"
        return int(connection.execute(query, (run,)).fetchone()[0])
    query = "SELECT COALESCE(newest_trajectory, 0) FROM batches WHERE run = ? AND step = ?"
    row = connection.execute(query, (run, step)).fetchone()
    if row is None:
        # Pruning deletes the first ones.
        ends = "SELECT COALESCE(MIN(step), 0), COALESCE(MAX(step), -1) FROM batches WHERE run = ?"
        first, last = connection.execute(ends, (run,)).fetchone()
        raise UsageError(f"{path} has no batch of step {step}: --as-of can be {first} to {last}")
    return int(row[0])


_COPIED = (
    "step, prompts, samples, handed_out_at, newest_trajectory, recency_window, recency_groups, recency_missed, "
    f"{SUMMARY}"
)


def overlay(database: DatabaseFile, run: Run, recorded: Path, recorded_run: int, newest: int) -> None:
    """Shadow our prompts, trajectories and archives with those of another database, up to trajectory id `newest`.

    SQLite resolves a name to a temporary view first. Statements that write name other tables, which stay our own.
    """
    # Archived tokens count as present: `Trajectories.payloads` reads them.
    instead = {"run": f"{run.id} AS run", "compacted_at": "IIF(archive IS NULL, compacted_at, NULL) AS compacted_at"}
    with storage_errors(recorded):
        database.execute("ATTACH ? AS recorded", (f"{recorded.absolute().as_uri()}?mode=ro",))
        for table, condition in (
            ("prompts", f"run = {recorded_run}"),
            ("trajectory_rows", f"run = {recorded_run} AND id <= {newest}"),
            ("payloads", f"trajectory <= {newest}"),
            ("kept_tokens", f"trajectory <= {newest}"),
            ("archives", f"run = {recorded_run}"),
        ):
            names = [row[1] for row in database.all(f"PRAGMA recorded.table_info({table})")]
            columns = ", ".join(instead.get(name, name) for name in names)
            database.execute(
                f"CREATE TEMP VIEW {table} AS SELECT {columns} FROM recorded.{table} WHERE {condition}"  # noqa: S608
            )


def copy_batch(database: DatabaseFile, run: Run, step: int, recorded_run: int) -> tuple[int, int] | None:
    """Record the batch of a step of the recorded run as our own. Returns its (prompts, samples), None without one."""
    cursor = database.execute(
        f"INSERT INTO batches (run, {_COPIED}) SELECT ?, {_COPIED} FROM recorded.batches "  # noqa: S608
        "WHERE run = ? AND step = ?",
        (run.id, recorded_run, step),
    )
    database.execute(
        "INSERT INTO consumption_rows (batch, slot, trajectory, staleness) "
        "SELECT ?, c.slot, c.trajectory, c.staleness FROM recorded.consumption_rows c "
        "JOIN recorded.batches b ON b.id = c.batch WHERE b.run = ? AND b.step = ?",
        (cursor.lastrowid, recorded_run, step),
    )
    shapes = database.all("SELECT prompts, samples FROM batches WHERE run = ? AND step = ?", run.id, step)
    return shapes[0] if shapes else None
