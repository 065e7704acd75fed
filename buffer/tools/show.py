"""Read one trajectory with its tokens and training history, and follow the newest ones."""

import sqlite3
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tba.buffer.store.archives import Archives
from tba.buffer.store.reader import open_reader, read_maps
from tba.buffer.store.starts import last_start
from tba.buffer.store.storage_errors import stored_list, stored_object
from tba.buffer.store.tables.trajectories import PAYLOAD_COLUMNS, PAYLOADS
from tba.common.errors import MissingExtra, StorageError, UsageError
from tba.common.wire.trajectory import ARRAY_KINDS, LOG_RATIO_DTYPE, QUANTITIES

_POLL_SECONDS = 0.5
_TRAINED_COLUMNS = ("step", "slot", "staleness", *QUANTITIES, "skipped", "trained_at")
_STEPS = f"SELECT {', '.join(_TRAINED_COLUMNS)} FROM consumption WHERE trajectory = ? ORDER BY step, slot"  # noqa: S608
_REFERENCES = "SELECT reference, logprob FROM reference_logprobs WHERE trajectory = ? ORDER BY reference"
_RESCORED = "SELECT version, logprob FROM rescored_logprobs WHERE trajectory = ? ORDER BY version"
_TURNS = "SELECT turns FROM trajectory_rows WHERE id = ?"
_RATIOS = """SELECT b.step, c.slot, c.token_log_ratios FROM consumption_rows c JOIN batches b ON b.id = c.batch
    WHERE c.trajectory = ? AND c.token_log_ratios IS NOT NULL"""
_PAYLOAD = f"SELECT {PAYLOAD_COLUMNS} FROM {PAYLOADS} WHERE y.trajectory = ?"  # noqa: S608
_SHOWN = "id, received_at_text, prompt, reward, policy_version, stop_reason, response_tokens, searcher, error, text"
TAIL_COLUMNS = _SHOWN.split(", ")
_TAIL = f"SELECT {_SHOWN} FROM trajectories"  # noqa: S608


def describe(path: Path, trajectory: int, decode: Callable[[list[int]], str] | None) -> dict[str, Any]:
    """Return a trajectory: its row, prompt and response as text and tokens, and the steps that trained on it.

    Of an episode, `turns` are its turns, and `pieces` its response cut where sampled tokens begin and end. `decode`
    converts token ids to text, if given. `log_ratios` are those of each token by the step that reported them.
    `no_tokens` says why tokens are missing: dropped, or in an archive that cannot be read; None if they are there.
    Raises UsageError if there is no such trajectory.
    """
    with open_reader(path) as connection:
        found = read_maps(connection, "SELECT * FROM trajectories WHERE id = ?", trajectory)
        if not found:
            newest = connection.execute("SELECT MAX(id) FROM trajectory_rows").fetchone()[0]
            known = f"ids go up to {newest}" if newest else "the buffer is empty"
            raise UsageError(f"{path} has no trajectory {trajectory}: {known}")
        (row,) = found
        for name in ("reward_parts", "metadata"):
            row[name] = stored_object(row[name])
        row["turns"] = stored_list(connection.execute(_TURNS, (trajectory,)).fetchone()[0])
        steps = read_maps(connection, _STEPS, trajectory)
        references = dict(connection.execute(_REFERENCES, (trajectory,)).fetchall())
        rescored = dict(connection.execute(_RESCORED, (trajectory,)).fetchall())
        blobs = connection.execute(_PAYLOAD, (trajectory,)).fetchone()
        ratios = read_log_ratios(connection, trajectory)
    row["no_tokens"] = "Its tokens were dropped by `tba buffer prune --tokens`." if blobs is None else None
    if blobs is None and row["archive"] is not None:
        try:
            blobs, ratios = Archives().read(trajectory, row["archive"])
            row["no_tokens"] = None
        except (StorageError, MissingExtra, UsageError) as error:
            row["no_tokens"] = f"Its tokens cannot be read: {error}."
    # Of several slots of a batch, the first.
    row["log_ratios"] = {
        step: np.frombuffer(blob[: len(blob) // 2 * 2], LOG_RATIO_DTYPE).tolist()
        for (step, _), blob in sorted(ratios.items(), reverse=True)
    }
    tokens = _tokens(blobs, decode)
    if row["turns"]:
        tokens["pieces"] = _pieces(tokens, {turn.get("start") for turn in row["turns"]}, decode)
    if row["prompt_text"] is not None:
        del tokens["prompt_text"]
    return {**row, **tokens, "trained_by": steps, "reference_logprobs": references, "rescored": rescored}


def read_log_ratios(connection: sqlite3.Connection, trajectory: int) -> dict[tuple[int, int], bytes]:
    """Return the log-ratios of the tokens of a trajectory that the database has, by (step, slot)."""
    return {(step, slot): blob for step, slot, blob in connection.execute(_RATIOS, (trajectory,))}


def recorded_model(path: Path, trajectory: int) -> str:
    """Return `model.path` of a trajectory's run, as its server recorded it; empty if it is not known."""
    with open_reader(path) as connection:
        run = connection.execute("SELECT run FROM trajectory_rows WHERE id = ?", (trajectory,)).fetchone()
        return str(last_start(connection, *(run or (None,))).settings_here().get("model.path") or "")


def arrays_of_blobs(blobs: tuple[bytes, ...]) -> dict[str, Any]:
    """Convert blobs in the order of ARRAY_KINDS to arrays by kind. Raises StorageError for blobs of other lengths."""
    try:
        return {
            kind.name: np.frombuffer(blob, kind.dtype).reshape((-1,) if kind.width == 1 else (-1, kind.width))
            for kind, blob in zip(ARRAY_KINDS, blobs, strict=True)
        }
    except (ValueError, TypeError) as error:
        raise StorageError(f"the tokens of a trajectory in the database are malformed: {error}") from error


def _tokens(blobs: tuple[bytes, ...] | None, decode: Callable[[list[int]], str] | None) -> dict[str, Any]:
    # Its tokens were dropped.
    if blobs is None:
        return {"prompt_text": None, "response_text": None, **dict.fromkeys(kind.name for kind in ARRAY_KINDS)}
    lists = {name: array.tolist() for name, array in arrays_of_blobs(blobs).items()}
    return {
        "prompt_text": decode(lists["prompt_ids"]) if decode else None,
        "response_text": decode(lists["response_ids"]) if decode else None,
        **lists,
    }


def _pieces(
    tokens: dict[str, Any], starts: set[Any], decode: Callable[[list[int]], str] | None
) -> list[dict[str, Any]]:
    """Return the pieces of an episode whose turns start at `starts`, in order; none if its tokens were dropped."""
    ids, mask = tokens["response_ids"] or [], tokens["loss_mask"] or [1] * len(tokens["response_ids"] or [])
    segments = set(tokens["segments"] or [])
    known = starts | segments | {0}
    cuts = [n for n in range(len(ids)) if n in known or bool(mask[n]) != bool(mask[n - 1])]
    return [
        {
            "start": start,
            "tokens": end - start,
            "sampled": bool(mask[start]),
            "new_context": start in segments,
            "text": decode(ids[start:end]) if decode else None,
        }
        for start, end in pairwise([*cuts, len(ids)])
    ]


def newest(path: Path, lines: int) -> list[dict[str, Any]]:
    """Return the newest trajectories, oldest first."""
    with open_reader(path) as connection:
        return read_maps(connection, f"{_TAIL} ORDER BY id DESC LIMIT ?", lines)[::-1]


def follow(path: Path, after: int) -> Iterator[dict[str, Any]]:
    """Yield trajectories with a larger id as they are committed, which is the order of their ids, indefinitely."""
    with open_reader(path) as connection:
        while True:
            for row in read_maps(connection, f"{_TAIL} WHERE id > ? ORDER BY id", after):
                after = row["id"]
                yield row
            time.sleep(_POLL_SECONDS)
