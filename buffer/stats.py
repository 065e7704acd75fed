"""Numbers of a buffer file, read without disturbing its server."""

import sqlite3
from pathlib import Path
from typing import Any

from tba.buffer.reader import open_reader

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
    "trajectories_trained_on": "SELECT COUNT(DISTINCT trajectory) FROM consumption_rows WHERE run = ?",
    "mean_staleness": "SELECT AVG(staleness) FROM consumption_rows WHERE run = ?",
    "max_staleness": "SELECT MAX(staleness) FROM consumption_rows WHERE run = ?",
    "snapshots": "SELECT COUNT(*) FROM snapshots WHERE run = ?",
}


def read_stats(path: Path) -> list[dict[str, Any]]:
    """One map of named numbers per run in the file. Raises UsageError or StorageError if it cannot be read."""
    with open_reader(path) as connection:
        runs = connection.execute("SELECT id, name FROM runs ORDER BY id").fetchall()
        return [_run_stats(connection, path, run, name) for run, name in runs]


def _run_stats(connection: sqlite3.Connection, path: Path, run: int, name: str) -> dict[str, Any]:
    numbers = {label: connection.execute(query, (run,)).fetchone()[0] for label, query in _QUERIES.items()}
    return {"run": name, **numbers, "file_mib": path.stat().st_size / 2**20}
