"""Trajectories and demonstrations into a run, through the very same code as a searcher's put.

    file ──► all of it is read and checked ──► messages of 64 rows ──► the running server, or a service in process

A row is known by where it came from: the run that it was exported from and its id there, else the file's content and
its number in it. The sender is named after the first, the sequence is the second. So an import may be repeated, after
a failure too, as jsonl, parquet or database, and adds only what is not there. What this very run has, it has as its
own rows: those are left out.
"""

import contextlib
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tba.buffer.export import JSONL, format_of, is_database, open_records, read_parquet
from tba.buffer.imported import Parser
from tba.buffer.reader import open_reader
from tba.buffer.received import SequenceRanges
from tba.buffer.texts import Tokenizer
from tba.common import wire
from tba.common.config import Config
from tba.common.durable import sha256_of
from tba.common.errors import BufferFault, StorageError, UsageError
from tba.common.quantity import quantity
from tba.common.trajectory import Trajectory, pack

_ROWS = 64
_TOKENS = 1 << 20  # in one message
_CHARACTERS = 1 << 20  # of texts and metadata, in one message, unless one row has more
Tell = Callable[[str, int, int | None], None]


class Sink(Protocol):
    """Where rows go: `run` is the uuid of the run that takes them."""

    run: str

    def put(self, sender: str, message: wire.PutTrajectories, frames: list[bytes]) -> wire.PutAck: ...


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row as the file has it: where it came from, its number there, and where it stands for error messages."""

    origin: str
    sequence: int
    fields: Any
    where: str


def import_file(
    source: Path, sink: Sink, config: Config, format_: str | None = None, *, tell: Tell = lambda *_: None
) -> dict[str, int]:
    """Import a file. Returns how many rows it has, how many were new and how many were there already.

    `tell` hears what is being done, with how many rows, and of how many in all if that is known.
    Raises UsageError if a line is wrong, before anything is imported; BufferFault or StorageError if the buffer
    does not take it, with the number of rows that it has taken.
    """
    parser = Parser(sink.run, _once(lambda: Tokenizer(config.model.path)))
    rows = _check(read_rows(source, config, format_), parser, tell)
    counts = {"rows": rows, "new": 0, "there_already": 0}

    def parsed() -> Iterator[tuple[SourceRow, Trajectory]]:
        for row in read_rows(source, config, format_):
            if has(row.fields):
                counts["there_already"] += 1
            else:
                yield row, parser.parse(row.fields, row.where)

    try:
        with _own_rows(config.database, sink.run) as has:
            for origin, first, part in _messages(parsed()):
                columns, frames = pack(part)
                message = wire.PutTrajectories(first_sequence=first, rows=wire.Rows.model_validate(columns))
                ack = sink.put(_sender(origin, sink.run), message, frames)
                counts["new"] += ack.stored
                counts["there_already"] += ack.duplicates
                tell("importing", counts["new"] + counts["there_already"], rows)
    except (BufferFault, StorageError) as error:
        taken = f"{counts['new'] + counts['there_already']} of {quantity(rows, 'row is', 'rows are')} imported"
        error.args = (f"{error}; {taken}, and running the import again is safe",)
        raise
    return counts


def _check(rows: Iterable[SourceRow], parser: Parser, tell: Tell) -> int:
    """Parse every row. Returns how many there are. Raises UsageError for a wrong one, or one that is there twice."""
    count = 0
    seen: defaultdict[str, SequenceRanges] = defaultdict(SequenceRanges)
    for count, row in enumerate(rows, 1):
        parser.parse(row.fields, row.where)
        if not seen[row.origin].missing(row.sequence, 1):
            raise UsageError(
                f"{row.where}: trajectory {row.sequence} of {row.origin} stands in the file before: give every "
                "trajectory once, and leave out `run` and `id` where one was made into several"
            )
        seen[row.origin].add(row.sequence, 1)
        if count % _ROWS == 0:
            tell("checking", count, None)
    return count


def _sender(origin: str, run: str) -> str:
    """Who an import is sent as. A database may hold several runs, and each has its own imports."""
    return f"import.{hashlib.sha256(f'{run} {origin}'.encode()).hexdigest()[:16]}"


@contextlib.contextmanager
def _own_rows(database: Path, run: str) -> Iterator[Callable[[Any], bool]]:
    """Whether a row of a file is one that the importing run made itself, and still has."""
    query = """SELECT 1 FROM trajectory_rows t JOIN senders s ON s.id = t.sender JOIN runs r ON r.id = t.run
               WHERE s.sender = ? AND t.sequence = ? AND r.uuid = ?"""
    with open_reader(database) as connection:

        def has(fields: dict[str, Any]) -> bool:
            if fields.get("run") != run:
                return False
            where = (fields.get("sender"), fields.get("sequence"), run)
            return connection.execute(query, where).fetchone() is not None

        yield has


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
    content = f"file {sha256_of(source)}"
    lines: Iterable[tuple[int, Any]] = _json_lines(source) if format_ == JSONL else enumerate(read_parquet(source), 1)
    word = "line" if format_ == JSONL else "row"
    for sequence, (number, fields) in enumerate(lines):
        where = f"{source} {word} {number}"
        run, id_ = (fields.get("run"), fields.get("id")) if isinstance(fields, dict) else (None, None)
        if isinstance(run, str) and isinstance(id_, int):
            yield SourceRow(_run_origin(run), id_, fields, where)
        else:
            yield SourceRow(content, sequence, fields, where)


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
            yield SourceRow(_run_origin(record["run"]), record["id"], record, f"{source} trajectory {record['id']}")


def _run_origin(run: str) -> str:
    return f"run {run}"


def _messages(rows: Iterable[tuple[SourceRow, Trajectory]]) -> Iterator[tuple[str, int, list[Trajectory]]]:
    """(origin, first sequence, rows): numbers in a message follow each other, and its size is limited."""
    part: list[Trajectory] = []
    first, size = None, 0.0
    for row, trajectory in rows:
        share = _share(trajectory)
        follows = first is not None and (row.origin, row.sequence) == (first.origin, first.sequence + len(part))
        if part and first and (not follows or len(part) == _ROWS or size + share > 1):
            yield first.origin, first.sequence, part
            part, size = [], 0.0
        first = row if not part else first
        part.append(trajectory)
        size += share
    if part and first:
        yield first.origin, first.sequence, part


def _share(trajectory: Trajectory) -> float:
    """What part of a message a row takes."""
    tokens = len(trajectory.prompt_ids) + len(trajectory.response_ids)
    characters = len(trajectory.text or "") + len(json.dumps(trajectory.metadata))
    return max(tokens / _TOKENS, characters / _CHARACTERS)


def _once(make: Callable[[], Tokenizer]) -> Callable[[], Tokenizer]:
    made: list[Tokenizer] = []

    def get() -> Tokenizer:
        if not made:
            made.append(make())
        return made[0]

    return get
