"""What the runs of a buffer file came to, for `tba runs`: read in milliseconds, also while the server runs."""

from pathlib import Path
from typing import Any

from tba.buffer.store.reader import open_reader
from tba.buffer.store.starts import SERVED_FIRST

_RUNS = "SELECT id, name, created_at, finished_step FROM runs ORDER BY id"
_LAST_STEP = (
    "SELECT step, trained_at, json_extract(metrics, '$.reward_mean') FROM batches WHERE run = ? "
    "AND trained_at IS NOT NULL ORDER BY step DESC LIMIT 1"
)
_PLANNED = f"SELECT json_extract(config, '$.train.steps') FROM starts s WHERE run = ? {SERVED_FIRST} LIMIT 1"  # noqa: S608

_SOURCE = "SELECT json_extract(config, '$.offline.file') FROM starts WHERE run = ? ORDER BY id LIMIT 1"


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return name, steps done and planned, last reward, last change and end of each run of a file.

    `source` is the buffer file that an offline run trains from. Times are Unix times. None where nothing is known.
    Raises UsageError or StorageError if the file cannot be read.
    """
    with open_reader(path) as connection:
        results = []
        for id_, name, created_at, finished_step in connection.execute(_RUNS).fetchall():
            last = connection.execute(_LAST_STEP, (id_,)).fetchone()
            planned = connection.execute(_PLANNED, (id_,)).fetchone()
            source = connection.execute(_SOURCE, (id_,)).fetchone()
            step, changed_at, reward = last or (-1, created_at, None)
            results.append(
                {
                    "run": name,
                    "steps": step + 1,
                    "planned": planned[0] if planned else None,
                    "reward": reward,
                    "changed_at": changed_at,
                    "finished": finished_step is not None,
                    "source": source[0] if source else None,
                }
            )
    return results
