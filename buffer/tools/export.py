"""Export trajectories of a buffer file to jsonl or parquet, streamed, with everything that an import needs.

Each line or row is one trajectory. Maps and lists are JSON in jsonl and JSON text in parquet. In the format openenv a
line is an OpenEnv `TrainingTrace` (training_trace.py).
"""

import contextlib
import itertools
import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tba.buffer.store.archives import LOG_RATIOS, Archives
from tba.buffer.store.reader import open_reader
from tba.buffer.store.storage_errors import stored_list, stored_object
from tba.buffer.store.tables.trajectories import PAYLOAD_COLUMNS
from tba.buffer.tools import training_trace
from tba.buffer.tools.backup import check_target, replacing
from tba.buffer.tools.query_process import reading_only
from tba.buffer.tools.show import arrays_of_blobs, read_log_ratios
from tba.common import data_files
from tba.common.errors import UsageError
from tba.common.wire.trajectory import ARRAY_KINDS, LOG_RATIO_DTYPE, MAP_FIELDS, ROW_FIELDS

JSONL, PARQUET, OPENENV = "jsonl", "parquet", "openenv"
FORMATS = {".jsonl": JSONL, ".ndjson": JSONL, ".parquet": PARQUET}
# Rows of a parquet row group: they are in memory at once.
_ROW_GROUP = 1024
_PROGRESS_ROWS = 200
# Called with the activity, the number of rows done, and the total if it is known.
OnProgress = Callable[[str, int, int | None], None]
# Each field of a record that is not an array, with its SQL expression.
_FIELDS = {
    "run": "r.uuid",
    "run_name": "r.name",
    "id": "t.id",
    "prompt_key": "p.key",
    "prompt": "p.text",
    "answer": "p.answer",
    "prompt_tokens": "t.prompt_tokens",
    "response_tokens": "t.response_tokens",
    "epoch": "v.epoch",
    "sender": "s.sender",
    "sequence": "t.sequence",
    "policy_version": "t.policy_version",
    "policy_step": "n.step",
    "received_at": "t.received_at",
    **{name: f"t.{name}" for name in ROW_FIELDS},
}
_FROM_RECORD = f"""
, a.url, {PAYLOAD_COLUMNS}
FROM trajectory_rows t
LEFT JOIN payloads y ON y.trajectory = t.id
LEFT JOIN kept_tokens k ON k.trajectory = t.id
LEFT JOIN archives a ON a.id = t.archive
JOIN runs r ON r.id = t.run
JOIN prompts p ON p.id = t.prompt
JOIN senders s ON s.id = t.sender
LEFT JOIN visits v ON v.id = t.visit
LEFT JOIN snapshots n ON n.run = t.run AND n.version = t.policy_version
WHERE t.id = ?
"""


def export(
    source: Path,
    target: Path,
    *,
    where: str,
    format_: str | None,
    force: bool,
    on_progress: OnProgress = lambda *_: None,
) -> dict[str, Any]:
    """Write the trajectories for which an SQL expression over the view `trajectories` is true.

    `on_progress` gets the rows written so far; how many there are is not known before the end.
    Raises UsageError for a target that may not be written or a wrong expression, MissingExtra if parquet is not
    installed, StorageError if the disk fails.
    """
    format_ = format_of(target, format_)
    check_target(source, target, force=force)
    if format_ == PARQUET:
        # A missing package is told before a large source is read.
        data_files.pyarrow()
    write = _write_parquet if format_ == PARQUET else _write_jsonl
    with open_records(source, where) as (records, matching), replacing(target) as temporary:
        counted = _counted(records, on_progress)
        lines = (trace for record in counted if (trace := training_trace.write(record)) is not None)
        written = write(temporary, lines if format_ == OPENENV else counted)
    size = target.stat().st_size
    return {"file": str(target), "trajectories": written, "without_tokens": matching() - written, "bytes": size}


def _counted(records: Iterator[dict[str, Any]], on_progress: OnProgress) -> Iterator[dict[str, Any]]:
    for count, record in enumerate(records, 1):
        yield record
        if count % _PROGRESS_ROWS == 0:
            on_progress("exporting", count, None)


def format_of(path: Path, given: str | None) -> str:
    """Return the format. Raises UsageError if neither the flag nor the suffix determines it."""
    format_ = given or FORMATS.get(path.suffix)
    if format_ not in (JSONL, PARQUET, OPENENV):
        formats = f"--format {JSONL} or --format {PARQUET}, for traces --format {OPENENV}"
        raise UsageError(f"{given or path}: set {formats}, or end the name with .{JSONL}")
    return format_


@contextlib.contextmanager
def open_records(path: Path, where: str = "1") -> Iterator[tuple[Iterator[dict[str, Any]], Callable[[], int]]]:
    """Yield the records of one moment, oldest first, and a function that counts matches so far, compacted ones too."""
    seen = 0
    archives = Archives()

    def records() -> Iterator[dict[str, Any]]:
        nonlocal seen
        for (id_,) in ids:
            seen += 1
            if (record := _record(connection, id_, archives)) is not None:
                yield record | {kind.name: record[kind.name].tolist() for kind in ARRAY_KINDS}

    with open_reader(path) as connection:
        # All rows come from the same snapshot of the database, even if reading takes long.
        connection.execute("BEGIN")
        with reading_only(connection):
            ids = connection.execute(f"SELECT id FROM trajectories WHERE ({where}\n) ORDER BY id")  # noqa: S608
            yield records(), lambda: seen


def _record(connection: sqlite3.Connection, trajectory: int, archives: Archives | None) -> dict[str, Any] | None:
    """Return the fields of a trajectory and its arrays, from the database or its archive; None if they are gone."""
    row = connection.execute(f"SELECT {', '.join(_FIELDS.values())} {_FROM_RECORD}", (trajectory,)).fetchone()
    url, *blobs = row[len(_FIELDS) :]
    if blobs[0] is None:
        if url is None or archives is None:
            return None
        blobs = archives.read(trajectory, url).payload
    record = dict(zip(_FIELDS, row, strict=False))
    for name in MAP_FIELDS:
        record[name] = stored_list(record[name]) if ROW_FIELDS[name] is list else stored_object(record[name])
    return record | arrays_of_blobs(tuple(blobs))


def archive_record(connection: sqlite3.Connection, trajectory: int) -> dict[str, Any] | None:
    """Return a trajectory as a row of `archive_schema`; None if the database does not have its tokens."""
    if (record := _record(connection, trajectory, None)) is None:
        return None
    turns = [turn | {"parts": json.dumps(turn.get("parts", {}))} for turn in record["turns"]]
    # float32 has every number of float16, and more programs read it.
    ratios = [
        {"step": step, "slot": slot, "values": np.frombuffer(blob, LOG_RATIO_DTYPE).astype(np.float32)}
        for (step, slot), blob in read_log_ratios(connection, trajectory).items()
    ]
    maps = {name: json.dumps(record[name]) for name in MAP_FIELDS}
    return record | maps | {"turns": turns, "version_runs": record["version_runs"].tolist(), LOG_RATIOS: ratios}


def _write_jsonl(path: Path, records: Iterator[dict[str, Any]]) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for count, record in enumerate(records, 1):  # noqa: B007
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return count


def _write_parquet(path: Path, records: Iterator[dict[str, Any]]) -> int:
    pa, parquet = data_files.pyarrow()
    schema, count = pa.schema(_columns(pa)), 0
    with parquet.ParquetWriter(path, schema) as writer:
        while part := list(itertools.islice(records, _ROW_GROUP)):
            rows = [record | {name: json.dumps(record[name]) for name in MAP_FIELDS} for record in part]
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
            count += len(part)
    return count


def archive_schema(pa: Any) -> Any:
    """Return the schema of the files of `tba buffer archive`: what an import reads, and more for those who query."""
    turn = {"start": pa.int64(), "tokens": pa.int64(), "seconds": pa.float64(), "environment_seconds": pa.float64()}
    turn |= {"reward": pa.float64(), "parts": pa.string(), "messages": pa.list_(pa.list_(pa.string()))}
    ratios = {"step": pa.int64(), "slot": pa.int64(), "values": pa.list_(pa.float32())}
    lists = {"turns": pa.list_(pa.struct(turn.items())), LOG_RATIOS: pa.list_(pa.struct(ratios.items()))}
    return pa.schema([*(dict(_columns(pa)) | lists).items()])


def _columns(pa: Any) -> list[tuple[str, Any]]:
    integers = ("id", "epoch", "sequence", "policy_version", "policy_step", "prompt_tokens", "response_tokens")
    floats = ("received_at", *(name for name, kind in ROW_FIELDS.items() if kind is float))
    types = dict.fromkeys(integers, pa.int64()) | dict.fromkeys(floats, pa.float64())
    fields = [(name, types.get(name, pa.string())) for name in _FIELDS]
    for kind in ARRAY_KINDS:
        numbers = pa.list_(pa.from_numpy_dtype(np.dtype(kind.dtype)))
        fields.append((kind.name, numbers if kind.width == 1 else pa.list_(numbers)))
    return fields


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a parquet file, with maps parsed. Raises MissingExtra, or UsageError for another file."""
    for row in data_files.read_parquet(path, UsageError):
        turns = row.get("turns")
        texts = [(row, name) for name in MAP_FIELDS]
        # Those of an archive are a list already.
        texts += [(turn, "parts") for turn in turns] if isinstance(turns, list) else []
        for place, name in texts:
            if isinstance(place.get(name), str):
                try:
                    place[name] = json.loads(place[name])
                except ValueError as error:
                    raise UsageError(f"{path} is not a readable parquet file: {error}") from error
        # Of an archive.
        row.pop(LOG_RATIOS, None)
        # A null is an absent key, except for `reward`: its default of 1 must be explicit.
        yield {name: value for name, value in row.items() if value is not None or name == "reward"}
