"""One trajectory with everything that is known of it, and the newest ones as they come."""

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tba.buffer.origin import SERVED_LAST
from tba.buffer.reader import open_reader
from tba.common.errors import UsageError
from tba.common.trajectory import ARRAY_KINDS

_POLL_SECONDS = 0.5
_STEPS = "SELECT step, slot, staleness, trained_at FROM consumption WHERE trajectory = ? ORDER BY step, slot"
_REFERENCES = "SELECT reference, logprob FROM reference_logprobs WHERE trajectory = ? ORDER BY reference"
TAIL_COLUMNS = (
    "id",
    "received_at_text",
    "prompt",
    "reward",
    "policy_version",
    "stop_reason",
    "response_tokens",
    "searcher",
    "error",
    "text",
)


def describe(path: Path, trajectory: int, decode: Callable[[list[int]], str] | None) -> dict[str, Any]:
    """A trajectory: its row, prompt and response as text where there is one, its tokens, and its training.

    `decode` turns token ids into text. Raises UsageError if there is no such trajectory.
    """
    with open_reader(path) as connection:
        row = _row(connection, "SELECT * FROM trajectories WHERE id = ?", trajectory)
        if row is None:
            newest = connection.execute("SELECT MAX(id) FROM trajectory_rows").fetchone()[0]
            known = f"ids go up to {newest}" if newest else "the buffer is empty"
            raise UsageError(f"{path} has no trajectory {trajectory}: {known}")
        for name in ("reward_parts", "metadata"):
            row[name] = json.loads(row[name])
        steps = _rows(connection, _STEPS, trajectory)
        references = dict(connection.execute(_REFERENCES, (trajectory,)).fetchall())
        arrays = payload(connection, trajectory)
    return {**row, **_tokens(arrays, decode), "trained_by": steps, "reference_logprobs": references}


def recorded_model(path: Path, trajectory: int) -> str:
    """`model.path` of the run of a trajectory, as its server recorded it; empty if it is not known."""
    model = "SELECT json_extract(s.config, '$.model.path') AS model"
    starts = "FROM starts s JOIN trajectory_rows t ON t.run = s.run WHERE t.id = ?"
    sql = f"{model} {starts} {SERVED_LAST} LIMIT 1"
    with open_reader(path) as connection:
        row = _row(connection, sql, trajectory)
    return (row["model"] or "") if row else ""


def payload(connection: sqlite3.Connection, trajectory: int) -> dict[str, Any] | None:
    """The arrays of a trajectory by kind; None if it was compacted."""
    names = ", ".join(kind.name for kind in ARRAY_KINDS)
    blobs = connection.execute(f"SELECT {names} FROM payloads WHERE trajectory = ?", (trajectory,)).fetchone()  # noqa: S608
    return None if blobs is None else arrays_of_blobs(blobs)


def arrays_of_blobs(blobs: tuple[bytes, ...]) -> dict[str, Any]:
    """Blobs in the order of ARRAY_KINDS as arrays."""
    return {
        kind.name: np.frombuffer(blob, kind.dtype).reshape((-1,) if kind.width == 1 else (-1, kind.width))
        for kind, blob in zip(ARRAY_KINDS, blobs, strict=True)
    }


def _tokens(arrays: dict[str, Any] | None, decode: Callable[[list[int]], str] | None) -> dict[str, Any]:
    if arrays is None:
        return {"prompt_text": None, "response_text": None, **dict.fromkeys(kind.name for kind in ARRAY_KINDS)}
    lists = {name: array.tolist() for name, array in arrays.items()}
    return {
        "prompt_text": decode(lists["prompt_ids"]) if decode else None,
        "response_text": decode(lists["response_ids"]) if decode else None,
        **lists,
    }


def newest(path: Path, lines: int) -> list[dict[str, Any]]:
    """The newest trajectories, oldest first."""
    columns = ", ".join(TAIL_COLUMNS)
    with open_reader(path) as connection:
        sql = f"SELECT {columns} FROM trajectories ORDER BY id DESC LIMIT ?"  # noqa: S608
        return _rows(connection, sql, lines)[::-1]


def follow(path: Path, after: int, sleep: Callable[[float], None] = time.sleep) -> Iterator[dict[str, Any]]:
    """Trajectories with a larger id, for ever, as they are committed. One writer hands out ids in order."""
    columns = ", ".join(TAIL_COLUMNS)
    sql = f"SELECT {columns} FROM trajectories WHERE id > ? ORDER BY id"  # noqa: S608
    with open_reader(path) as connection:
        while True:
            for row in _rows(connection, sql, after):
                after = row["id"]
                yield row
            sleep(_POLL_SECONDS)


def _row(connection: sqlite3.Connection, sql: str, *values: Any) -> dict[str, Any] | None:
    rows = _rows(connection, sql, *values)
    return rows[0] if rows else None


def _rows(connection: sqlite3.Connection, sql: str, *values: Any) -> list[dict[str, Any]]:
    cursor = connection.execute(sql, values)
    headings = [column[0] for column in cursor.description]
    return [dict(zip(headings, row, strict=True)) for row in cursor]
