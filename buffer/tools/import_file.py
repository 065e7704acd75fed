"""Import trajectories and demonstrations into a run, through the same code as a searcher's put.

    file ──► every row is read and checked ──► messages of 64 rows ──► the running server, or a service in this process

A row is identified by its origin: the run it was exported from and its id there, else the hash of the file and the row
number; of a file of lines that has grown, the hash of what an earlier import had of it. The origin determines the
sender, the id the sequence number. Therefore an import may be repeated, also after a failure and in another format, and
adds only what is missing. Rows that the importing run made itself are left out.
"""

import functools
import hashlib
import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba.buffer.store.reader import open_reader
from tba.buffer.tools import training_trace
from tba.buffer.tools.export import OPENENV, PARQUET, OnProgress, format_of, open_records, read_parquet
from tba.buffer.tools.import_row import Parser
from tba.buffer.tools.import_target import ImportTarget
from tba.buffer.tools.tokenizer import Tokenizer
from tba.common.config import Config
from tba.common.config.layers import is_database
from tba.common.data_files import json_lines
from tba.common.errors import BufferFault, StorageError, UsageError, quantity
from tba.common.system.durable import sha256_of
from tba.common.weights.model_files import model_here, vocabulary_size
from tba.common.wire import messages
from tba.common.wire.trajectory import Trajectory, pack

# Limits of one message. A row whose text is longer is sent alone.
_ROWS = 64
_TOKENS = 1 << 20
_CHARACTERS = 1 << 20


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row of a file: its origin, its number there, its content, its location for error messages, and the warnings."""

    origin: str
    sequence: int
    fields: Any
    where: str
    warnings: Sequence[str] = ()


def import_file(
    source: Path,
    target: ImportTarget,
    config: Config,
    format_: str | None,
    *,
    on_progress: OnProgress,
) -> dict[str, Any]:
    """Import a file. Returns the number of its rows, of new ones, of those that the run already had, and of warnings.

    Raises UsageError for an invalid row before anything is imported; BufferFault or StorageError if the buffer fails,
    with the number of rows imported until then.
    """
    model = model_here(config.model.path)
    vocabulary = vocabulary_size(model) if model is not None else None
    parser = Parser(target.run, functools.cache(lambda: Tokenizer(config.model.path)), vocabulary)
    with open_reader(config.database) as reader:
        senders = {sender for (sender,) in reader.execute("SELECT sender FROM senders")}
    read = functools.partial(read_rows, source, config, format_, target.run, senders)
    rows, warnings = _check(read(), parser, on_progress)
    counts = {"rows": rows, "new": 0, "there_already": 0}

    def parsed() -> Iterator[tuple[SourceRow, Trajectory]]:
        for row in read():
            if _is_own(reader, row.fields, target.run):
                counts["there_already"] += 1
            else:
                yield row, parser.parse(row.fields, row.where)

    try:
        with open_reader(config.database) as reader:
            for origin, first, part in _messages(parsed()):
                columns, frames = pack(part)
                message = messages.PutTrajectories(first_sequence=first, rows=messages.Rows(**columns))
                ack = target.put(_sender(target.run, origin), message, frames)
                counts["new"] += ack.stored
                counts["there_already"] += ack.duplicates
                on_progress("importing", counts["new"] + counts["there_already"], rows)
    except (BufferFault, StorageError) as error:
        done = f"{counts['new'] + counts['there_already']} of {quantity(rows, 'row is', 'rows are')} imported"
        error.args = (f"{error}; {done}, and running the import again is safe",)
        raise
    return {**counts, "warnings": dict(warnings)}


def _check(rows: Iterable[SourceRow], parser: Parser, on_progress: OnProgress) -> tuple[int, Counter[str]]:
    """Parse every row. Returns the number of rows and warnings. Raises UsageError for a wrong row, or a second copy."""
    count = 0
    warnings: Counter[str] = Counter()
    seen: defaultdict[str, set[int]] = defaultdict(set)
    for count, row in enumerate(rows, 1):
        parser.parse(row.fields, row.where)
        warnings.update(row.warnings)
        if row.sequence in seen[row.origin]:
            raise UsageError(
                f"{row.where}: trajectory {row.sequence} of {row.origin} occurs earlier in the file: include every "
                "trajectory once, and leave out `run` and `id` where one was made into several"
            )
        seen[row.origin].add(row.sequence)
        if count % _ROWS == 0:
            on_progress("checking", count, None)
    return count, warnings


def _is_own(reader: sqlite3.Connection, fields: dict[str, Any], run: str) -> bool:
    """Whether the importing run made a row itself and still has it."""
    if fields.get("run") != run:
        return False
    query = """SELECT 1 FROM trajectory_rows t JOIN senders s ON s.id = t.sender JOIN runs r ON r.id = t.run
               WHERE s.sender = ? AND t.sequence = ? AND r.uuid = ?"""
    return reader.execute(query, (fields.get("sender"), fields.get("sequence"), run)).fetchone() is not None


def _sender(run: str, origin: str) -> str:
    """Return the sender of an origin's rows. The run is part of it: each run of a database has its own imports."""
    return f"import.{hashlib.sha256(f'{run} {origin}'.encode()).hexdigest()[:16]}"


def read_rows(
    source: Path, config: Config, format_: str | None, run: str = "", senders: Collection[str] = ()
) -> Iterator[SourceRow]:
    """Read the rows of a file for a run that has these senders, or of another run's database. Raises UsageError."""
    if not source.is_file():
        raise UsageError(f"{source} does not exist")
    if is_database(source):
        if config.database.exists() and source.samefile(config.database):
            raise UsageError(f"{source} is the database of this run: name another run's")
        return _database_rows(source)
    return _file_rows(source, format_of(source, format_), run, senders)


def _file_rows(source: Path, format_: str, importing: str, senders: Collection[str]) -> Iterator[SourceRow]:
    is_parquet = format_ == PARQUET
    lines = enumerate(read_parquet(source), 1) if is_parquet else json_lines(source, malformed=UsageError)
    # A file of lines may have grown; a Parquet file is another one then.
    origins = [(0, f"file {sha256_of(source)}")] if is_parquet else _origins(source, importing, senders)
    for sequence, (number, value) in enumerate(lines):
        where = f"{source} row {number}" if is_parquet else f"{source}:{number}"
        is_trace = format_ == OPENENV or training_trace.is_trace(value)
        fields, warnings = training_trace.read(value, where, importing) if is_trace else (value, ())
        run, id_ = (fields.get("run"), fields.get("id")) if isinstance(fields, dict) else (None, None)
        if isinstance(run, str) and isinstance(id_, int):
            yield SourceRow(f"run {run}", id_, fields, where, warnings)
        else:
            origin = next(one for last, one in origins if is_parquet or number <= last)
            yield SourceRow(origin, sequence, fields, where, warnings)


def _origins(source: Path, run: str, senders: Collection[str]) -> list[tuple[int, str]]:
    """Return the last line and the origin of each beginning of a file that was imported, and of the file itself."""
    digest, number, found, own = hashlib.sha256(), 0, [], ""
    with source.open("rb") as file:
        for number, line in enumerate(file, 1):
            # The last line may have had no line end then.
            text = line.removesuffix(b"\n")
            for part in (text, line[len(text) :]):
                digest.update(part)
                own = f"file {digest.hexdigest()}"
                if _sender(run, own) in senders:
                    found.append((number, own))
    return [*found, (number, own)]


def _database_rows(source: Path) -> Iterator[SourceRow]:
    with open_records(source) as (records, _):
        for record in records:
            yield SourceRow(f"run {record['run']}", record["id"], record, f"{source} trajectory {record['id']}")


def _messages(rows: Iterable[tuple[SourceRow, Trajectory]]) -> Iterator[tuple[str, int, list[Trajectory]]]:
    """Group rows into messages of one origin within the limits: yield (origin, first sequence number, rows)."""
    part: list[Trajectory] = []
    first, size = None, 0.0
    for row, trajectory in rows:
        fraction = _fraction(trajectory)
        is_next = first is not None and (row.origin, row.sequence) == (first.origin, first.sequence + len(part))
        if part and first and (not is_next or len(part) == _ROWS or size + fraction > 1):
            yield first.origin, first.sequence, part
            part, size = [], 0.0
        first = row if not part else first
        part.append(trajectory)
        size += fraction
    if part and first:
        yield first.origin, first.sequence, part


def _fraction(trajectory: Trajectory) -> float:
    """Return the fraction of a message that a row fills."""
    tokens = len(trajectory.prompt_ids) + len(trajectory.response_ids)
    characters = len(trajectory.text or "") + len(json.dumps([trajectory.metadata, trajectory.turns]))
    return max(tokens / _TOKENS, characters / _CHARACTERS)
