"""Attach the database of a recorded run, read-only, so that its trajectories replace our own in every query."""

from pathlib import Path

from tba.buffer.store.database import DatabaseFile
from tba.buffer.store.storage_errors import storage_errors
from tba.buffer.store.tables.batches import SUMMARY
from tba.buffer.store.tables.runs import Run

_COPIED = (
    "step, prompts, samples, handed_out_at, newest_trajectory, recency_window, recency_groups, recency_missed, "
    f"{SUMMARY}"
)


def overlay(database: DatabaseFile, run: Run, recorded: Path, recorded_run: int, newest: int) -> None:
    """Shadow our prompts and trajectories with those of a run in another database, up to trajectory id `newest`.

    SQLite resolves a table name to a temporary view of that name first, so every query reads the recorded rows.
    Statements that write name other tables, which stay our own.
    """
    with storage_errors(recorded):
        database.execute("ATTACH ? AS recorded", (f"{recorded.absolute().as_uri()}?mode=ro",))
        for table, condition in (
            ("prompts", f"run = {recorded_run}"),
            ("trajectory_rows", f"run = {recorded_run} AND id <= {newest}"),
            ("payloads", f"trajectory <= {newest}"),
        ):
            names = [row[1] for row in database.all(f"PRAGMA recorded.table_info({table})")]
            columns = ", ".join(f"{run.id} AS run" if name == "run" else name for name in names)
            database.execute(
                f"CREATE TEMP VIEW {table} AS SELECT {columns} FROM recorded.{table} WHERE {condition}"  # noqa: S608
            )


def copy_batch(database: DatabaseFile, run: Run, step: int, recorded_run: int) -> tuple[int, int] | None:
    """Record the batch that the run of `overlay` had at a step as our own.

    Returns its (prompts, samples), or None if there is none.
    """
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
