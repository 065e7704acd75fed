"""Import trajectories and demonstrations into a run, through the same code as a searcher's put.

    file ──► every row is read and checked ──► messages of 64 rows ──► the running server, or a service in this process

A line is a trajectory, as `tba buffer export` writes it, or a demonstration: a prompt and a response, as text or token
ids, without log-probabilities. Unknown keys are errors, because a misspelt `reward` would be ignored silently.

A row is identified by its origin: the run it was exported from and its id there, else the hash of the file and the row
number; of a file of lines that has grown, the hash of what an earlier import had of it. The origin determines the
sender, the id the sequence number. Therefore an import may be repeated, also after a failure and in another format, and
adds only what is missing. Rows that the importing run made itself are left out.
"""

import contextlib
import difflib
import functools
import hashlib
import json
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tba.buffer.service.put_columns import to_columns
from tba.buffer.service.service import BufferService
from tba.buffer.store.reader import open_reader
from tba.buffer.store.starts import IMPORT, record_of, refuse_other_runs
from tba.buffer.store.store import Store
from tba.buffer.tools import training_trace
from tba.buffer.tools.export import OPENENV, PARQUET, OnProgress, format_of, open_records, read_parquet
from tba.buffer.tools.tokenizer import Tokenizer
from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.config.layers import is_database
from tba.common.data_files import json_lines, require_unicode
from tba.common.errors import (
    BufferFault,
    BufferUnavailable,
    LockTaken,
    StorageError,
    UsageError,
    WireError,
    problems,
    quantity,
)
from tba.common.run_identity import refuse_other_server
from tba.common.system.durable import sha256_of
from tba.common.system.process import software
from tba.common.weights.model_files import model_here, vocabulary_size
from tba.common.wire import fields, messages
from tba.common.wire.client import BufferClient, make_hello
from tba.common.wire.codec import decode_request, encode_request
from tba.common.wire.keys import buffer_client_keys
from tba.common.wire.messages import GetStatus, Status
from tba.common.wire.trajectory import ROW_FIELDS, STOP_EOS, Trajectory, pack

_REPLY_SECONDS = 60.0
_ROLE: fields.Role = "importer"


class ImportTarget:
    """A run that accepts trajectories. `run` is its uuid; `is_server` says whether another process serves it."""

    def __init__(self, run: str, send: "_Send", *, is_server: bool) -> None:
        self.run = run
        self.is_server = is_server
        self._send = send
        self._sender = ""

    def put(self, sender: str, message: messages.PutTrajectories, frames: list[bytes]) -> messages.PutAck:
        """Commit a put. Raises Refused, BufferUnavailable, WireError or StorageError."""
        if self._sender != sender:
            self._sender = sender
            self.ask(make_hello())
        reply = self.ask(message, frames)
        assert isinstance(reply, messages.PutAck)
        return reply

    def ask(self, message: messages.Message, frames: Sequence[bytes] = ()) -> messages.Message:
        """Return the reply to a request of the sender, or of no one in particular before the first put."""
        return self._send(self._sender, message, frames)


# Sends a request in the name of a sender, and returns the reply.
_Send = Callable[[str, messages.Message, Sequence[bytes]], messages.Message]


@contextlib.contextmanager
def open_target(config: Config, *, named: bool = True) -> Iterator[ImportTarget]:
    """Open the configured run for an import. It must be `named` if the database holds other runs.

    Raises ConfigError, also for the record of an offline run or if the server serves another run, StorageError, or
    BufferFault if a server does not reply.
    """
    refuse_other_runs(config, alone=not named)
    try:
        store = Store(config.database, durability=config.buffer.durability)
    except LockTaken:
        keys = buffer_client_keys(config.security.keys, config.address)
        with contextlib.closing(BufferClient(config.address, role=_ROLE, name="import", keys=keys)) as client:
            # A key that is not admitted, or not in this role, does not change while this waits.
            status = _ask_server(client, "", GetStatus(), stop=lambda: bool(client.obstacle))
            assert isinstance(status, Status)
            refuse_other_server(client.address, status.run_name, config.run.name)
            yield ImportTarget(client.run, functools.partial(_ask_server, client), is_server=True)
    else:
        with contextlib.closing(store):
            settings = {**record_of(config), IMPORT: True}
            run = store.open_run(config.run.name, seed=config.run.seed, config=settings, software=software())
            service = BufferService(store, run, config, SystemClock())
            yield ImportTarget(run.uuid, functools.partial(_ask_service, service), is_server=False)


def _ask_service(
    service: BufferService, sender: str, message: messages.Message, frames: Sequence[bytes]
) -> messages.Message:
    run = service.state.run.uuid
    encoded = encode_request(message, id=1, role=_ROLE, sender=sender or _ROLE, run=run, frames=frames)
    # Encoded and decoded, so that a put passes the same checks as one over the network.
    request = decode_request([memoryview(frame) for frame in encoded])
    reply = service.handle_durably(request.header, to_columns(request))
    assert reply is not None
    return reply.message


def _ask_server(
    client: BufferClient,
    sender: str,
    message: messages.Message,
    frames: Sequence[bytes] = (),
    *,
    stop: Callable[[], bool] = lambda: False,
) -> messages.Message:
    client.sender = sender or client.sender
    try:
        return client.call(message, messages.Message, frames=frames, deadline_seconds=_REPLY_SECONDS, stop=stop)[0]
    except BufferUnavailable:
        why = client.obstacle or "another process has the database open, and no server replies at this address"
        raise BufferUnavailable(f"the buffer at {client.address}: {why}") from None


Number = Annotated[int, Field(ge=0, lt=1 << 63)]
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
# It is not known how a demonstration was sampled. With temperature 0 no loss treats it as a sample of the policy, and
# the metadata mark its log-probabilities, which are zeros, as absent.
_DEMONSTRATION_SAMPLING = {"temperature": 0.0, "top_p": 1.0}
_DEMONSTRATION_METADATA = {"logprobs": "absent"}
# A longer prompt is identified by its hash.
_KEY_CHARACTERS = 200
# Limits of one message. A row whose text is longer is sent alone.
_ROWS = 64
_TOKENS = 1 << 20
_CHARACTERS = 1 << 20


class Line(BaseModel):
    """The keys of a line. `run` to `response_tokens` describe the origin of an exported trajectory."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    run: str | None = None
    run_name: str | None = None
    id: Number | None = None
    epoch: int | None = None
    sender: str | None = None
    sequence: Number | None = None
    policy_version: int | None = None
    policy_step: int | None = None
    received_at: float | None = None
    answer: str | None = None
    prompt_tokens: Number | None = None
    response_tokens: Number | None = None

    prompt_key: str | None = None
    prompt: str | None = None
    response: str | None = None
    prompt_ids: list[Token] | None = None
    response_ids: list[Token] | None = None
    logprobs: list[float] | None = None
    version_runs: list[list[Token]] | None = None
    loss_mask: list[Annotated[int, Field(ge=0, le=1)]] = []
    reward: float = 1.0
    reward_parts: dict[str, float] = {}
    stop_reason: fields.StopReason = "eos"
    sampling: dict[str, Any] | None = None
    created_at: float | None = None
    generation_seconds: float = 0.0
    text: str | None = None
    error: str | None = None
    metadata: dict[str, Any] = {}
    turns: list[dict[str, Any]] = []
    error_kind: fields.ErrorKind | None = None
    segments: list[Token] = []
    kept: list[Token] = []

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.prompt is None and self.prompt_ids is None:
            raise ValueError("it has neither prompt nor prompt_ids")
        if self.response is None and self.response_ids is None:
            raise ValueError("it has neither response nor response_ids")
        if self.logprobs is not None and self.sampling is None:
            raise ValueError("it has logprobs and no sampling: with which temperature and top_p was it sampled?")
        if self.logprobs is not None and self.version_runs is None:
            raise ValueError("it has logprobs and no version_runs: which policy versions produced its tokens?")
        return self


class Parser:
    """Parses the lines of a file for one run. `tokenizer` is called only if a line has text instead of token ids.

    `vocabulary` is the number of token ids of the run's model, None if that is not known here.
    """

    def __init__(self, run: str, tokenizer: Callable[[], Tokenizer], vocabulary: int | None) -> None:
        self._run = run
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary

    def parse(self, fields: Any, where: str) -> Trajectory:
        """Return a checked trajectory. Raises UsageError with the location `where` and the reason."""
        try:
            line = Line.model_validate(fields)
            trajectory = self._trajectory(line)
            self._check_tokens(trajectory)
            _check_row(trajectory)
        except ValidationError as error:
            raise UsageError(f"{where}: {_sentence(error)}") from error
        # OverflowError: an integer beyond 64 bits.
        except (WireError, ValueError, OverflowError) as error:
            raise UsageError(f"{where}: {error}") from error
        return trajectory

    def _trajectory(self, line: Line) -> Trajectory:
        require_unicode([line.prompt, line.response])
        prompt_ids, response_ids = line.prompt_ids, line.response_ids
        if prompt_ids is None:
            prompt_ids = self._tokenizer().prompt(line.prompt or "")
        if response_ids is None:
            finished = line.stop_reason == STOP_EOS
            response_ids = self._tokenizer().response(line.response or "", line.prompt or "", finished=finished)
        logprobs = [0.0] * len(response_ids) if line.logprobs is None else line.logprobs
        runs = [[0, len(response_ids)]] if line.version_runs is None else line.version_runs
        if not runs or any(len(run) != 2 for run in runs):
            raise ValueError("version_runs must be pairs [version, tokens], at least one")
        return Trajectory(
            prompt_key=_key(line, prompt_ids),
            lease=fields.NO_VISIT,
            prompt_ids=np.asarray(prompt_ids, np.int32),
            response_ids=np.asarray(response_ids, np.int32),
            logprobs=np.asarray(logprobs, np.float32),
            version_runs=np.asarray(runs, np.int32),
            loss_mask=np.asarray(line.loss_mask, np.uint8),
            segments=np.asarray(line.segments, np.int32),
            kept=np.asarray(line.kept, np.int32),
            **self._row_fields(line),
        )

    def _check_tokens(self, trajectory: Trajectory) -> None:
        """Raise ValueError for a token id that the model does not have: the trainer could not make a step with it."""
        # Kept tokens are ids plus 1.
        for name, more in (("prompt_ids", 0), ("response_ids", 0), ("kept", 1)):
            largest = int(getattr(trajectory, name).max(initial=0)) - more
            if self._vocabulary is not None and largest >= self._vocabulary:
                raise ValueError(f"{name} has {largest}, and the run's model has token ids below {self._vocabulary}")

    def _row_fields(self, line: Line) -> dict[str, Any]:
        fields = {name: getattr(line, name) for name in ROW_FIELDS}
        if line.created_at is None:
            fields["created_at"] = time.time()
        # A file that another build exported, or that someone wrote, names no kind.
        if line.error is not None and line.error_kind is None:
            fields["error_kind"] = "imported"
        if line.text is None:
            fields["text"] = line.response
        # Marks a row that no policy of this run has sampled.
        if line.run != self._run and "imported_version" not in line.metadata:
            fields["metadata"] = line.metadata | {"imported_version": line.policy_version}
            if line.run:
                fields["metadata"]["imported_run"] = line.run
        if line.logprobs is None:
            fields["sampling"] = _DEMONSTRATION_SAMPLING
            fields["metadata"] = fields["metadata"] | _DEMONSTRATION_METADATA
        return fields


def _key(line: Line, prompt_ids: list[int]) -> str:
    if line.prompt_key is not None:
        return line.prompt_key
    if line.prompt and len(line.prompt) <= _KEY_CHARACTERS:
        return line.prompt
    source = line.prompt if line.prompt is not None else json.dumps(prompt_ids)
    return f"sha256:{hashlib.sha256(source.encode()).hexdigest()}"


def _check_row(trajectory: Trajectory) -> None:
    """Raise the error that the buffer would raise, so that the user sees the line number."""
    # The database stores neither values that JSON lacks nor text that is not Unicode, such as a lone surrogate.
    texts: list[Any] = [trajectory.prompt_key, trajectory.text, trajectory.error]
    texts += [trajectory.metadata, trajectory.reward_parts, trajectory.turns]
    json.dumps(texts, allow_nan=False)
    require_unicode(texts)
    columns, frames = pack([trajectory])
    message = messages.PutTrajectories(first_sequence=0, rows=messages.Rows(**columns))
    encoded = encode_request(message, id=1, role="importer", sender="import", run="", frames=frames)
    to_columns(decode_request([memoryview(frame) for frame in encoded]))


def _sentence(error: ValidationError) -> str:
    field, reason = problems(error)[0]
    if field and field[0] not in Line.model_fields:
        near = difflib.get_close_matches(field[0], Line.model_fields, 1)
        hint = f"did you mean {near[0]}?" if near else "other data goes into metadata"
        return f"unknown key {field[0]!r}: {hint}"
    return f"{'.'.join(field)}: {reason}" if field else reason


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row of a file: its origin, its number there, its content, its location for error messages, and the warnings."""

    origin: str
    sequence: int
    fields: Any
    where: str
    warnings: Sequence[str] = ()


def import_file(
    source: Path, target: ImportTarget, config: Config, format_: str | None, *, on_progress: OnProgress
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
