"""The names of files and directories in run.dir, and next to a database. `tba sft` uses some of them in OUT.work."""

from pathlib import Path

DATABASE = "buffer.sqlite"
METRICS = "metrics.jsonl"
EVALUATIONS = "eval.jsonl"
SNAPSHOTS = "snapshots"
CHECKPOINTS = "checkpoints"
# The newest checkpoints that are kept.
KEEP_CHECKPOINTS = 2
SPOOL = "spool"
LOGS = "logs"
# Of snapshots that fit into no memory.
WEIGHTS = "weights"
# `tba run` holds the first, the trainer the second.
LAUNCH_LOCK = "launcher.lock"
TRAINER_LOCK = "trainer.lock"


def database_lock(database: Path) -> Path:
    """Return the file that a server holds locked while it has the database open, next to the file behind links."""
    return _next_to(database, ".lock")


def write_ahead_log(database: Path) -> Path:
    """Return SQLite's log of commits that are not in the database yet."""
    return _next_to(database, "-wal")


def _next_to(database: Path, ending: str) -> Path:
    file = database.resolve()
    return file.with_name(file.name + ending)
