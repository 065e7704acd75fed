"""Statistics of a buffer file, and what its runs came to, read while its server may be running."""

from pathlib import Path
from typing import Any

from tba.buffer.store.reader import open_reader, read_maps
from tba.buffer.store.starts import last_start
from tba.common import run_files
from tba.common.config.layers import secret_keys

# The trajectories of a batch count as trained on when its step is reported.
_TRAINED = "FROM consumption_rows JOIN batches ON batches.id = batch WHERE run = ? AND trained_at IS NOT NULL"
# A part of a guided response was given.
_PLAIN = "FROM trajectory_rows WHERE run = ? AND error IS NULL AND json_extract(sampling, '$.guided') IS NULL"
_QUERIES = {
    "trajectories": "SELECT COUNT(*) FROM trajectory_rows WHERE run = ?",
    "compacted": "SELECT COUNT(compacted_at) - COUNT(archive) FROM trajectory_rows WHERE run = ?",
    "archived": "SELECT COUNT(archive) FROM trajectory_rows WHERE run = ?",
    "with_error": "SELECT COUNT(error) FROM trajectory_rows WHERE run = ?",
    "response_tokens": "SELECT COALESCE(SUM(response_tokens), 0) FROM trajectory_rows WHERE run = ?",
    "mean_reward": f"SELECT AVG(reward) {_PLAIN}",
    # What the mean is of: with many errors it says little of all trajectories.
    "mean_reward_of": f"SELECT COUNT(*) {_PLAIN}",
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


_RESULTS = """SELECT r.id, r.name AS run, COALESCE(b.step + 1, 0) AS steps,
    json_extract(b.metrics, '$.reward_mean') AS reward, COALESCE(b.trained_at, r.created_at) AS changed_at,
    r.finished_step IS NOT NULL AS finished,
    (SELECT json_extract(config, '$.offline.file') FROM starts WHERE run = r.id ORDER BY id LIMIT 1) AS source
    FROM runs r LEFT JOIN batches b ON b.run = r.id AND b.step = (SELECT step FROM batches WHERE run = r.id
    AND trained_at IS NOT NULL ORDER BY step DESC LIMIT 1) ORDER BY r.id"""


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return name, steps done and planned, last reward, last change and end of each run of a file.

    `address` and `keys` are those of its server, `secrets` the keys of those that it had, `source` is the buffer file
    that an offline run trains from. Times are Unix times. None where nothing is known. Raises UsageError or
    StorageError if the file cannot be read.
    """
    with open_reader(path) as connection:
        results = read_maps(connection, _RESULTS)
        for result in results:
            served = last_start(connection, result.pop("id")).settings_here()
            keys = {"planned": "train.steps", "address": "buffer.address", "keys": "security.keys"}
            result |= {name: served.get(key) for name, key in keys.items()}
            result["secrets"] = [key for key in sorted(secret_keys()) if served.get(key)]
    return results
