"""Statistics of a buffer file, and what its runs came to, read while its server may be running."""

from pathlib import Path
from typing import Any

from tba.buffer.store.reader import open_reader
from tba.buffer.store.starts import SERVED_FIRST
from tba.common import run_files

# The trajectories of a batch count as trained on when its step is reported.
_TRAINED = "FROM consumption_rows JOIN batches ON batches.id = batch WHERE run = ? AND trained_at IS NOT NULL"
_QUERIES = {
    "trajectories": "SELECT COUNT(*) FROM trajectory_rows WHERE run = ?",
    "compacted": "SELECT COUNT(compacted_at) - COUNT(archive) FROM trajectory_rows WHERE run = ?",
    "archived": "SELECT COUNT(archive) FROM trajectory_rows WHERE run = ?",
    "with_error": "SELECT COUNT(error) FROM trajectory_rows WHERE run = ?",
    "response_tokens": "SELECT COALESCE(SUM(response_tokens), 0) FROM trajectory_rows WHERE run = ?",
    "mean_reward": "SELECT AVG(reward) FROM trajectory_rows WHERE run = ? AND error IS NULL",
    # What the mean is of: with many errors it says little of all trajectories.
    "mean_reward_of": "SELECT COUNT(*) - COUNT(error) FROM trajectory_rows WHERE run = ?",
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
    """Return one map of named numbers per run of the file. Raises UsageError or StorageError if it cannot be read."""
    with open_reader(path) as connection:
        runs = connection.execute("SELECT id, name FROM runs ORDER BY id").fetchall()
        counts = [
            {key: connection.execute(query, (run,)).fetchone()[0] for key, query in _QUERIES.items()} for run, _ in runs
        ]
    # The write-ahead log may hold all of a young database.
    log = run_files.write_ahead_log(path)
    sizes = {"file_mib": path.stat().st_size / 2**20, "wal_mib": log.stat().st_size / 2**20 if log.exists() else 0.0}
    return [{"run": name, **numbers, **sizes} for (_, name), numbers in zip(runs, counts, strict=True)]


_RUNS = "SELECT id, name, created_at, finished_step FROM runs ORDER BY id"
_LAST_STEP = (
    "SELECT step, trained_at, json_extract(metrics, '$.reward_mean') FROM batches WHERE run = ? "
    "AND trained_at IS NOT NULL ORDER BY step DESC LIMIT 1"
)
_SERVED = f"""SELECT config ->> '$.train.steps', config ->> '$.buffer.address', config ->> '$.security.keys'
    FROM starts s WHERE run = ? {SERVED_FIRST} LIMIT 1"""  # noqa: S608
_SOURCE = "SELECT json_extract(config, '$.offline.file') FROM starts WHERE run = ? ORDER BY id LIMIT 1"


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return name, steps done and planned, last reward, last change and end of each run of a file.

    `address` and `keys` are those of its server, `source` is the buffer file that an offline run trains from. Times are
    Unix times. None where nothing is known. Raises UsageError or StorageError if the file cannot be read.
    """
    with open_reader(path) as connection:
        results = []
        for id_, name, created_at, finished_step in connection.execute(_RUNS).fetchall():
            last = connection.execute(_LAST_STEP, (id_,)).fetchone()
            planned, address, keys = connection.execute(_SERVED, (id_,)).fetchone() or (None, None, None)
            source = connection.execute(_SOURCE, (id_,)).fetchone()
            step, changed_at, reward = last or (-1, created_at, None)
            result = {"run": name, "steps": step + 1, "planned": planned, "address": address, "keys": keys}
            result |= {"reward": reward, "changed_at": changed_at, "finished": finished_step is not None}
            results.append(result | {"source": source[0] if source else None})
    return results
