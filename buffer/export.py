"""Trajectories out of a buffer file: jsonl or parquet, streamed, with all that an import needs.

One line or row is one trajectory. Maps are JSON objects in jsonl and JSON text in parquet.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tba.buffer.backup import check_target, replacing
from tba.buffer.query import reading_only
from tba.buffer.reader import open_reader
from tba.buffer.show import arrays_of_blobs
from tba.common.errors import MissingExtra, UsageError

JSONL, PARQUET = "jsonl", "parquet"
FORMATS = {".jsonl": JSONL, ".ndjson": JSONL, ".parquet": PARQUET}
MAPS = ("reward_parts", "sampling", "metadata")
_ROW_GROUP = 1024  # rows that parquet keeps in memory
_FIELDS = (
    "run",
    "run_name",
    "id",
    "prompt_key",
    "epoch",
    "sender",
    "sequence",
    "policy_version",
    "policy_step",
    "reward",
    "reward_parts",
    "stop_reason",
    "sampling",
    "created_at",
    "received_at",
    "generation_seconds",
    "text",
    "error",
    "metadata",
)
_RECORD = """
SELECT r.uuid, r.name, t.id, p.key, v.epoch, s.sender, t.sequence, t.policy_version, n.step, t.reward,
       t.reward_parts, t.stop_reason, t.sampling, t.created_at, t.received_at, t.generation_seconds, t.text, t.error,
       t.metadata, y.prompt_ids, y.response_ids, y.logprobs, y.version_runs, y.loss_mask
FROM trajectory_rows t
JOIN payloads y ON y.trajectory = t.id
JOIN runs r ON r.id = t.run
JOIN prompts p ON p.id = t.prompt
JOIN senders s ON s.id = t.sender
LEFT JOIN visits v ON v.id = t.visit
LEFT JOIN snapshots n ON n.run = t.run AND n.version = t.policy_version
WHERE t.id = ?
"""


def export(source: Path, target: Path, *, where: str, format_: str | None, force: bool) -> dict[str, Any]:
    """Write the trajectories for which an SQL expression over the view `trajectories` is true.

    Raises UsageError for a target that may not be written or an expression that is wrong, MissingExtra where
    parquet needs it, StorageError if the disk refuses.
    """
    format_ = format_of(target, format_)
    check_target(source, target, force=force)
    write = _write_jsonl if format_ == JSONL else _parquet_writer()
    with open_records(source, where) as (records, matching), replacing(target) as temporary:
        written = write(temporary, records)
    size = target.stat().st_size
    return {"file": str(target), "trajectories": written, "without_tokens": matching() - written, "bytes": size}


def format_of(path: Path, given: str | None) -> str:
    """`jsonl` or `parquet`. Raises UsageError if neither flag nor suffix says."""
    format_ = given or FORMATS.get(path.suffix)
    if format_ not in (JSONL, PARQUET):
        raise UsageError(f"{given or path}: say --format jsonl or --format parquet, or end the name with .{JSONL}")
    return format_


@contextlib.contextmanager
def open_records(path: Path, where: str = "1") -> Iterator[tuple[Iterator[dict[str, Any]], Callable[[], int]]]:
    """The records of one moment, oldest first, and how many rows have matched so far.

    More rows match than there are records where tokens were compacted away.
    """
    seen = 0

    def records() -> Iterator[dict[str, Any]]:
        nonlocal seen
        for (id_,) in ids:
            seen += 1
            if (row := connection.execute(_RECORD, (id_,)).fetchone()) is not None:
                yield _record(row)

    with open_reader(path) as connection:
        connection.execute("BEGIN")  # one moment, however long it takes
        with reading_only(connection):
            ids = connection.execute(f"SELECT id FROM trajectories WHERE ({where}\n) ORDER BY id")  # noqa: S608
            yield records(), lambda: seen


def _record(row: tuple[Any, ...]) -> dict[str, Any]:
    record = dict(zip(_FIELDS, row[: len(_FIELDS)], strict=True))
    for name in MAPS:
        record[name] = json.loads(record[name])
    arrays = arrays_of_blobs(row[len(_FIELDS) :])
    return record | {name: array.tolist() for name, array in arrays.items()}


def _write_jsonl(path: Path, records: Iterator[dict[str, Any]]) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for count, record in enumerate(records, 1):  # noqa: B007
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return count


def _parquet_writer() -> Callable[[Path, Iterator[dict[str, Any]]], int]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise MissingExtra("pyarrow", "parquet") from None
    kinds = {
        pa.int64(): ("id", "epoch", "sequence", "policy_version", "policy_step"),
        pa.float64(): ("reward", "created_at", "received_at", "generation_seconds"),
        pa.list_(pa.int32()): ("prompt_ids", "response_ids"),
        pa.list_(pa.float32()): ("logprobs",),
        pa.list_(pa.list_(pa.int32())): ("version_runs",),
        pa.list_(pa.uint8()): ("loss_mask",),
    }
    types = {name: type_ for type_, names in kinds.items() for name in names}
    columns = (*_FIELDS, "prompt_ids", "response_ids", "logprobs", "version_runs", "loss_mask")
    schema = pa.schema([(name, types.get(name, pa.string())) for name in columns])

    def write(path: Path, records: Iterator[dict[str, Any]]) -> int:
        count = 0
        with pq.ParquetWriter(path, schema) as writer:
            while part := list(itertools.islice(records, _ROW_GROUP)):
                rows = [record | {name: json.dumps(record[name]) for name in MAPS} for record in part]
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                count += len(part)
        return count

    return write


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a parquet file; maps become objects again. Raises MissingExtra, or UsageError if it is none."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise MissingExtra("pyarrow", "parquet") from None
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROW_GROUP // 4):
                for row in batch.to_pylist():
                    # An empty cell is an absent key; but an empty reward is not the default reward.
                    yield {
                        name: _parsed(name, value)
                        for name, value in row.items()
                        if value is not None or name == "reward"
                    }
    except (pa.ArrowException, OSError, ValueError) as error:  # also a map that is no JSON
        raise UsageError(f"{path} is not a parquet file that can be read: {str(error).splitlines()[0]}") from error


def _parsed(name: str, value: Any) -> Any:
    return json.loads(value) if name in MAPS and isinstance(value, str) else value


def is_database(path: Path) -> bool:
    """Whether a file is an SQLite database, by its first bytes."""
    with path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\0"
