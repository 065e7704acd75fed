"""Numbers of a buffer file, read without disturbing its server."""

import sqlite3
from pathlib import Path
from typing import Any

from tba.buffer.reader import open_reader

# A batch that was handed out is not trained on before its step is reported.
_TRAINED = "FROM consumption_rows JOIN batches USING (run, step) WHERE run = ? AND trained_at IS NOT NULL"
_QUERIES = {
    "trajectories": "SELECT COUNT(*) FROM trajectory_rows WHERE run = ?",
    "compacted": "SELECT COUNT(compacted_at) FROM trajectory_rows WHERE run = ?",
    "with_error": "SELECT COUNT(error) FROM trajectory_rows WHERE run = ?",
    "response_tokens": "SELECT COALESCE(SUM(response_tokens), 0) FROM trajectory_rows WHERE run = ?",
    "mean_reward": "SELECT AVG(reward) FROM trajectory_rows WHERE run = ? AND error IS NULL",
    "prompts": "SELECT COUNT(*) FROM prompts WHERE run = ?",
    "visits_done": "SELECT COUNT(done_at) FROM visits WHERE run = ?",
    "visits_open": "SELECT COUNT(*) - COUNT(done_at) FROM visits WHERE run = ?",
    "epoch": "SELECT COALESCE(MAX(epoch), 0) FROM visits WHERE run = ?",
    "steps_trained": "SELECT COUNT(trained_at) FROM batches WHERE run = ?",
    "trajectories_trained_on": f"SELECT COUNT(DISTINCT trajectory) {_TRAINED}",
    "mean_staleness": f"SELECT AVG(staleness) {_TRAINED}",
    "max_staleness": f"SELECT MAX(staleness) {_TRAINED}",
    "snapshots": "SELECT COUNT(*) FROM snapshots WHERE run = ?",
}


def read_stats(path: Path) -> list[dict[str, Any]]:
    """One map of named numbers per run in the file. Raises UsageError or StorageError if it cannot be read."""
    with open_reader(path) as connection:
        runs = connection.execute("SELECT id, name FROM runs ORDER BY id").fetchall()
        return [_run_stats(connection, path, run, name) for run, name in runs]


def _run_stats(connection: sqlite3.Connection, path: Path, run: int, name: str) -> dict[str, Any]:
    numbers = {label: connection.execute(query, (run,)).fetchone()[0] for label, query in _QUERIES.items()}
    # The write-ahead log beside the file may hold all of a young database.
    log = path.with_name(path.name + "-wal")
    log_bytes = log.stat().st_size if log.exists() else 0
    return {"run": name, **numbers, "file_mib": path.stat().st_size / 2**20, "wal_mib": log_bytes / 2**20}
