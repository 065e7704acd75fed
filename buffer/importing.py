"""Trajectories and demonstrations into a run, through the very same code as a searcher's put.

    file ──► all of it is read and checked ──► messages of 64 rows ──► the running server, or a service in process

A row is known by where it came from: the sender is named after the content, the sequence is the row's number. So
an import may be repeated, after a failure too, and adds only what is not there.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tba.buffer.export import JSONL, format_of, is_database, open_records, read_parquet
from tba.buffer.imported import Parser
from tba.buffer.texts import Tokenizer
from tba.common import wire
from tba.common.config import Config
from tba.common.durable import sha256_of
from tba.common.errors import BufferFault, StorageError, UsageError
from tba.common.trajectory import Trajectory, pack

_ROWS = 64
_TOKENS = 1 << 20  # in one message


class Sink(Protocol):
    """Where rows go: `run` is the uuid of the run that takes them."""

    run: str

    def put(self, sender: str, message: wire.PutTrajectories, frames: list[bytes]) -> wire.PutAck: ...


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row as the file has it: who it is sent as, under which number, and where it stands for error messages."""

    sender: str
    sequence: int
    fields: Any
    where: str


def import_file(source: Path, sink: Sink, config: Config, format_: str | None = None) -> dict[str, int]:
    """Import a file. Returns how many rows it has, how many were new and how many were there already.

    Raises UsageError if a line is wrong, before anything is imported; BufferFault or StorageError if the buffer
    does not take it, with the number of rows that it has taken.
    """
    parser = Parser(sink.run, _once(lambda: Tokenizer(config.model.path)))
    rows = 0
    for row in read_rows(source, config, format_):
        parser.parse(row.fields, row.where)
        rows += 1
    counts = {"rows": rows, "new": 0, "there_already": 0}
    parsed = ((row, parser.parse(row.fields, row.where)) for row in read_rows(source, config, format_))
    try:
        for sender, first, part in _messages(parsed):
            columns, frames = pack(part)
            message = wire.PutTrajectories(first_sequence=first, rows=wire.Rows.model_validate(columns))
            ack = sink.put(sender, message, frames)
            counts["new"] += ack.stored
            counts["there_already"] += ack.duplicates
    except (BufferFault, StorageError) as error:
        taken = counts["new"] + counts["there_already"]
        error.args = (f"{error}; {taken} of {rows} rows are imported, and running the import again is safe",)
        raise
    return counts


def read_rows(source: Path, config: Config, format_: str | None) -> Iterator[SourceRow]:
    """The rows of jsonl, parquet, or the buffer database of another run. Raises UsageError."""
    if not source.is_file():
        raise UsageError(f"{source} does not exist")
    if is_database(source):
        if config.database.exists() and source.samefile(config.database):
            raise UsageError(f"{source} is the database of this run: name another run's")
        return _database_rows(source)
    return _file_rows(source, format_of(source, format_))


def _file_rows(source: Path, format_: str) -> Iterator[SourceRow]:
    sender = f"import.{sha256_of(source)[:16]}"
    lines: Iterable[tuple[int, Any]] = _json_lines(source) if format_ == JSONL else enumerate(read_parquet(source), 1)
    word = "line" if format_ == JSONL else "row"
    for sequence, (number, fields) in enumerate(lines):
        yield SourceRow(sender, sequence, fields, f"{source} {word} {number}")


def _json_lines(source: Path) -> Iterator[tuple[int, Any]]:
    with source.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{source} line {number} is not JSON: {error}") from error


def _database_rows(source: Path) -> Iterator[SourceRow]:
    with open_records(source) as (records, _):
        for record in records:
            # Named after the run and its ids: once more, when that run has gone on, imports only what is new.
            sender = f"import.{hashlib.sha256(record['run'].encode()).hexdigest()[:16]}"
            yield SourceRow(sender, record["id"], record, f"{source} trajectory {record['id']}")


def _messages(rows: Iterable[tuple[SourceRow, Trajectory]]) -> Iterator[tuple[str, int, list[Trajectory]]]:
    """(sender, first sequence, rows): numbers in a message follow each other, and its size is limited."""
    part: list[Trajectory] = []
    first, tokens = None, 0
    for row, trajectory in rows:
        size = len(trajectory.prompt_ids) + len(trajectory.response_ids)
        follows = first is not None and (row.sender, row.sequence) == (first.sender, first.sequence + len(part))
        if part and first and (not follows or len(part) == _ROWS or tokens + size > _TOKENS):
            yield first.sender, first.sequence, part
            part, tokens = [], 0
        first = row if not part else first
        part.append(trajectory)
        tokens += size
    if part and first:
        yield first.sender, first.sequence, part


def _once(make: Callable[[], Tokenizer]) -> Callable[[], Tokenizer]:
    made: list[Tokenizer] = []

    def get() -> Tokenizer:
        if not made:
            made.append(make())
        return made[0]

    return get
