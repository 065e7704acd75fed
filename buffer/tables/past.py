"""The tables of another database, that of a recorded run, in place of our own. It is only read."""

from pathlib import Path

from tba.buffer.database import DatabaseFile
from tba.buffer.storage_errors import storage_errors
from tba.buffer.tables.runs import Run


def overlay(database: DatabaseFile, run: Run, past: Path, past_run: int, newest: int) -> None:
    """See the trajectories and prompts of a run in another database in place of our own, up to an id.

    The other database is attached read-only. A temporary view goes before a table of its name, so every query
    here reads it; what is recorded goes into our own tables.
    """
    with storage_errors(past):
        database.execute("ATTACH ? AS past", (f"{past.absolute().as_uri()}?mode=ro",))
        for table, condition in (
            ("prompts", f"run = {past_run}"),
            ("trajectory_rows", f"run = {past_run} AND id <= {newest}"),
            ("payloads", f"trajectory <= {newest}"),
        ):
            names = [row[1] for row in database.all(f"PRAGMA past.table_info({table})")]
            columns = ", ".join(f"{run.id} AS run" if name == "run" else name for name in names)
            database.execute(
                f"CREATE TEMP VIEW {table} AS SELECT {columns} FROM past.{table} WHERE {condition}"  # noqa: S608
            )


def copy_batch(database: DatabaseFile, run: Run, step: int, past_run: int) -> tuple[int, int] | None:
    """Record the batch that the run of `overlay` had at a step as our own.

    Returns (prompts, samples) of it, None if there is none.
    """
    database.execute(
        "INSERT INTO batches (run, step, prompts, samples, handed_out_at, newest_trajectory) "
        "SELECT ?, step, prompts, samples, handed_out_at, newest_trajectory FROM past.batches "
        "WHERE run = ? AND step = ?",
        (run.id, past_run, step),
    )
    database.execute(
        "INSERT INTO consumption_rows (run, step, slot, trajectory, staleness) "
        "SELECT ?, step, slot, trajectory, staleness FROM past.consumption_rows WHERE run = ? AND step = ?",
        (run.id, past_run, step),
    )
    shapes = database.all("SELECT prompts, samples FROM batches WHERE run = ? AND step = ?", run.id, step)
    return shapes[0] if shapes else None
