"""Time travel: the buffer of a recorded run as it was at a step, for a trainer without a server or searchers.

    the recorded run's file (read only) ──► index, tokens ──┐
    the offline run's own file ◄── batches, reports ────────┴──► the trainer, by the messages of the server

Invariant: the recorded file is never written to. The offline run records its batches and reports in a file of its own,
whose rows refer to trajectories of the recorded file. It attaches that file, so that its trajectories replace those of
the own one in every query.
"""

import functools
import sqlite3
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import typer
from msgspec import structs

from tba.buffer.service.run_state import AsOf
from tba.buffer.service.service import BufferService
from tba.buffer.store.database import DatabaseFile
from tba.buffer.store.reader import open_reader
from tba.buffer.store.starts import OFFLINE, OfflineSource, choose_run, record_of, recorded_source, refuse_other_runs
from tba.buffer.store.storage_errors import storage_errors
from tba.buffer.store.store import Store
from tba.buffer.store.tables.batches import SUMMARY
from tba.buffer.store.tables.runs import Run
from tba.common import run_files
from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.errors import ConfigError, StorageError, UsageError, quantity
from tba.common.log import get_logger
from tba.common.system.process import software
from tba.common.wire import fields, messages
from tba.common.wire.codec import MAX_FRAME_BYTES, RequestHeader

log = get_logger(__name__)
M = TypeVar("M", bound=messages.Message)


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A recorded run at a step of its history, by default its end (`at_end`).

    `policy_steps` maps each policy version to its optimiser step. `losses` are those of the steps before;
    `compacted_steps` those before whose batches lost tokens to `tba buffer prune --tokens`, and `compacted` counts
    these trajectories.
    """

    path: Path
    run: int
    run_name: str
    run_uuid: str
    step: int
    at_end: bool
    newest_trajectory: int
    policy_steps: dict[int, int]
    losses: dict[int, float]
    compacted_steps: list[int]
    compacted: int


_LOSSES = "SELECT step, json_extract(metrics, '$.loss') FROM batches WHERE run = ? AND trained_at IS NOT NULL"
_COMPACTED_STEPS = """
SELECT DISTINCT b.step FROM trajectory_rows t JOIN consumption_rows c ON c.trajectory = t.id
JOIN batches b ON b.id = c.batch
WHERE t.run = ? AND t.compacted_at IS NOT NULL AND t.archive IS NULL AND b.run = t.run AND b.step < ? ORDER BY b.step
"""
_COMPACTED = """
SELECT COUNT(*) FROM trajectory_rows
WHERE run = ? AND id <= ? AND error IS NULL AND compacted_at IS NOT NULL AND archive IS NULL
"""


def read_recorded_run(path: Path, *, run: str | None, as_of: int | None) -> RecordedRun:
    """Read a recorded run; `run` None is the only one of the file, `as_of` None its end.

    Raises UsageError for a file, run or step that does not exist, ConfigError for a file that is no buffer.
    """
    try:
        with open_reader(path) as connection:
            recorded = _read(connection, path, run, as_of)
    except StorageError as error:
        raise ConfigError(str(error)) from error
    if recorded.newest_trajectory == 0:
        if (source := recorded_source(path)) is not None:
            raise UsageError(
                f"{path} is the record of a run that was trained offline from {source.file}: name that file"
            )
        raise UsageError(
            f"{path} holds no trajectories of run {recorded.run_name}, or none before step {recorded.step}"
        )
    return recorded


def _read(connection: sqlite3.Connection, path: Path, run: str | None, as_of: int | None) -> RecordedRun:
    rows = connection.execute("SELECT name, id, uuid FROM runs ORDER BY id")
    runs = {name: (id_, uuid) for name, id_, uuid in rows}
    run = choose_run(path, runs, run, "--source-run")
    id_, uuid = runs[run]
    losses = dict(connection.execute(_LOSSES, (id_,)))
    step = max(losses, default=-1) + 1 if as_of is None else as_of
    newest = _newest_at(connection, path, id_, as_of)
    return RecordedRun(
        path=path,
        run=id_,
        run_name=run,
        run_uuid=uuid,
        step=step,
        at_end=as_of is None,
        newest_trajectory=newest,
        policy_steps=dict(connection.execute("SELECT version, step FROM snapshots WHERE run = ?", (id_,))),
        losses={trained: loss for trained, loss in losses.items() if trained < step and loss is not None},
        compacted_steps=[row[0] for row in connection.execute(_COMPACTED_STEPS, (id_, step))],
        compacted=connection.execute(_COMPACTED, (id_, newest)).fetchone()[0],
    )


def _newest_at(connection: sqlite3.Connection, path: Path, run: int, step: int | None) -> int:
    """Return the newest trajectory that existed when the batch of a step was sampled, 0 if there was none."""
    if step is None:
        query = "SELECT COALESCE(MAX(id), 0) FROM trajectory_rows WHERE run = ?"
        return int(connection.execute(query, (run,)).fetchone()[0])
    query = "SELECT COALESCE(newest_trajectory, 0) FROM batches WHERE run = ? AND step = ?"
    row = connection.execute(query, (run, step)).fetchone()
    if row is None:
        # Pruning deletes the first ones.
        ends = "SELECT COALESCE(MIN(step), 0), COALESCE(MAX(step), -1) FROM batches WHERE run = ?"
        first, last = connection.execute(ends, (run,)).fetchone()
        raise UsageError(f"{path} has no batch of step {step}: --as-of can be {first} to {last}")
    return int(row[0])


_COPIED = (
    "step, prompts, samples, handed_out_at, newest_trajectory, recency_window, recency_groups, recency_missed, "
    f"{SUMMARY}"
)


def _overlay(database: DatabaseFile, run: Run, recorded: Path, recorded_run: int, newest: int) -> None:
    """Shadow our prompts, trajectories and archives with those of another database, up to trajectory id `newest`.

    SQLite resolves a name to a temporary view first. Statements that write name other tables, which stay our own.
    """
    # Archived tokens count as present: `Trajectories.payloads` reads them.
    instead = {"run": f"{run.id} AS run", "compacted_at": "IIF(archive IS NULL, compacted_at, NULL) AS compacted_at"}
    with storage_errors(recorded):
        database.execute("ATTACH ? AS recorded", (f"{recorded.absolute().as_uri()}?mode=ro",))
        for table, condition in (
            ("prompts", f"run = {recorded_run}"),
            ("trajectory_rows", f"run = {recorded_run} AND id <= {newest}"),
            ("payloads", f"trajectory <= {newest}"),
            ("kept_tokens", f"trajectory <= {newest}"),
            ("archives", f"run = {recorded_run}"),
        ):
            names = [row[1] for row in database.all(f"PRAGMA recorded.table_info({table})")]
            columns = ", ".join(instead.get(name, name) for name in names)
            database.execute(
                f"CREATE TEMP VIEW {table} AS SELECT {columns} FROM recorded.{table} WHERE {condition}"  # noqa: S608
            )


def _copy_batch(store: Store, run: Run, recorded: RecordedRun, message: messages.SampleBatch) -> None:
    """Record the batch of a step of the recorded run as our own. Raises ConfigError if it lacks one of this shape."""
    database, step = store.database, message.step
    cursor = database.execute(
        f"INSERT INTO batches (run, {_COPIED}) SELECT ?, {_COPIED} FROM recorded.batches "  # noqa: S608
        "WHERE run = ? AND step = ?",
        (run.id, recorded.run, step),
    )
    database.execute(
        "INSERT INTO consumption_rows (batch, slot, trajectory, staleness) "
        "SELECT ?, c.slot, c.trajectory, c.staleness FROM recorded.consumption_rows c "
        "JOIN recorded.batches b ON b.id = c.batch WHERE b.run = ? AND b.step = ?",
        (cursor.lastrowid, recorded.run, step),
    )
    shapes = database.all("SELECT prompts, samples FROM batches WHERE run = ? AND step = ?", run.id, step)
    if not shapes:
        raise ConfigError(f"{recorded.path} has no batch of step {step} to replay")
    prompts, samples = shapes[0]
    if (message.prompts, message.samples) != (prompts, samples):
        raise ConfigError(
            f"step {step} was recorded with {prompts} x {samples} trajectories: a replay needs "
            f"train.prompts_per_step = {prompts} and train.samples_per_prompt = {samples}"
        )


def _as_first_started(config: Config, recorded: RecordedRun, *, replay: bool) -> RecordedRun:
    """Return the recorded run as the offline run in run.dir first saw it, even if it has continued since.

    Raises ConfigError if run.dir belongs to another run, or to an offline run of another source.
    """
    if config.database.resolve() == recorded.path.resolve():
        raise UsageError(f"{recorded.path} is this run's own database: set another run.dir for the offline run")
    if config.run.dir.resolve() == recorded.path.resolve().parent:
        raise UsageError(
            f"{recorded.path} is in run.dir, which a run writes to: set another run.dir for the offline run"
        )
    if replay and recorded.step == 0:
        raise UsageError(f"run {recorded.run_name} in {recorded.path} has no trained steps to replay")
    refuse_other_runs(config, str(recorded.path))
    source = recorded_source(config.database)
    if source is None:
        if any((config.run.dir / name).exists() for name in (run_files.METRICS, run_files.CHECKPOINTS)):
            raise ConfigError(f"{config.run.dir} holds a run that was not trained offline: set another run.dir")
        if replay:
            _refuse_compacted(recorded)
        return recorded
    # A replay may become longer: a recorded batch is the same whenever it is copied.
    as_of = source.as_of if replay or recorded.at_end else recorded.step
    if (recorded.run_uuid, replay, as_of) != (source.uuid, source.replay, source.as_of):
        what = "replays" if source.replay else f"trains as of step {source.as_of} from"
        raise UsageError(
            f"the offline run in {config.run.dir} {what} run {source.run} of {source.file}: pass the same options "
            "again, or set another run.dir"
        )
    return recorded if replay else replace(recorded, step=source.as_of, newest_trajectory=source.newest_trajectory)


def _refuse_compacted(recorded: RecordedRun) -> None:
    """Raise UsageError for a replay that compaction made impossible, instead of failing at the step in question."""
    if not recorded.compacted_steps:
        return
    first, last, count = recorded.compacted_steps[0], recorded.compacted_steps[-1], len(recorded.compacted_steps)
    which = f"step {first}" if count == 1 else f"{count} steps between {first} and {last}"
    way_out = f"--as-of {first} replays the steps before, " if first else ""
    raise UsageError(
        f"{which} of run {recorded.run_name} in {recorded.path} cannot be replayed, since `tba buffer prune --tokens` "
        f"dropped tokens of their batches: {way_out}an earlier backup has them all"
    )


class OfflineBuffer:
    """The buffer of an offline run, for clients in several threads. Raises as `_as_first_started`."""

    def __init__(
        self, config: Config, recorded: RecordedRun, *, replay: bool, origins: Mapping[str, str] | None = None
    ) -> None:
        self._recorded = recorded = _as_first_started(config, recorded, replay=replay)
        self._replay = replay
        self._lock = threading.Lock()
        self._store = Store(config.database, durability=config.buffer.durability)
        source = OfflineSource(
            file=str(recorded.path.resolve()),
            run=recorded.run_name,
            uuid=recorded.run_uuid,
            as_of=recorded.step,
            newest_trajectory=recorded.newest_trajectory,
            replay=replay,
        )
        settings = {**record_of(config), OFFLINE: asdict(source)}
        run = self._store.open_run(
            config.run.name, seed=config.run.seed, config=settings, software=software(), origins=origins
        )
        _overlay(self._store.database, run, recorded.path, recorded.run, recorded.newest_trajectory)
        self._run = run
        self._service = BufferService(
            self._store,
            run,
            config,
            SystemClock(),
            as_of=AsOf(recorded.step, recorded.policy_steps),
            record_batch=functools.partial(_copy_batch, self._store, run, recorded) if replay else None,
        )
        if recorded.compacted and not replay:
            log.warning("compacted trajectories cannot be sampled", trajectories=recorded.compacted)
        file, count = str(recorded.path), self.sampleable_count
        log.info("offline", file=file, run=recorded.run_name, step=recorded.step, trajectories=count)

    @property
    def sampleable_count(self) -> int:
        return self._service.status().sampleable

    def client(self, role: fields.Role, name: str) -> "OfflineClient":
        """Return a client that stands in for a client of a server."""
        return OfflineClient(self, role, name)

    def handle(self, header: RequestHeader, message: messages.Message) -> tuple[messages.Message, list[bytes]]:
        """Return the reply to a request, durably. Raises Refused, or ConfigError if there is no such batch."""
        with self._lock:
            reply = self._service.handle_durably(header, message)
        # A parked request would wait indefinitely: no searcher adds data.
        if reply is None:
            raise ConfigError(f"{self._service.state.pace.waits_for}, and offline there will be no more")
        batch = reply.message
        if isinstance(batch, messages.Batch) and not self._replay:
            # Not sampled by the current weights: staleness 0 refers to the recorded trainer's weights.
            batch = structs.replace(batch, policy_version=[-1] * len(batch.policy_version))
        return batch, reply.frames

    def compare_losses(self) -> tuple[int, float]:
        """Return (number of steps with a loss in both runs, largest difference)."""
        ours = dict(self._store.database.all(_LOSSES, self._run.id))
        both = [step for step in self._recorded.losses if ours.get(step) is not None]
        return len(both), max((abs(ours[step] - self._recorded.losses[step]) for step in both), default=0.0)

    def close(self) -> None:
        self._store.close()


class OfflineClient:
    """Asks an OfflineBuffer with the methods of `tba.common.wire.client.BufferClient`. Replies are immediate."""

    def __init__(self, buffer: OfflineBuffer, role: fields.Role, name: str) -> None:
        self._buffer = buffer
        self._role: fields.Role = role
        self._name = name
        self._ahead: dict[int, messages.Message] = {}

    def call(
        self,
        message: messages.Message,
        expect: type[M],
        *,
        deadline_seconds: float | None = None,  # noqa: ARG002
        stop: Callable[[], bool] = lambda: False,  # noqa: ARG002
    ) -> tuple[M, list[memoryview]]:
        """Return the reply and its frames. Raises Refused."""
        header = RequestHeader(
            v=messages.PROTOCOL_VERSION, type=message.TYPE, id=0, run="", role=self._role, sender=self._name
        )
        reply, frames = self._buffer.handle(header, message)
        assert isinstance(reply, expect)
        assert all(len(frame) <= MAX_FRAME_BYTES for frame in frames)
        return reply, [memoryview(frame) for frame in frames]

    def ask_ahead(self, message: messages.Message) -> int:
        """Keep the request until `collect`, so that it is handled as if it had been sent then."""
        self._ahead[id(message)] = message
        return id(message)

    def collect(self, id_: int, expect: type[M], stop: Callable[[], bool]) -> tuple[M, list[memoryview]]:
        """Return the reply to a request of `ask_ahead`. Raises Refused."""
        return self.call(self._ahead.pop(id_), expect, stop=stop)

    def close(self) -> None:
        """Do nothing: the owner of the buffer closes it."""


def train_offline(
    config: Config,
    recorded: RecordedRun,
    run_trainer: Callable[..., None],
    *,
    replay: bool,
    origins: Mapping[str, str] | None,
) -> None:
    """Run a trainer on a recorded run; with `replay`, on its batches, and then print how far the losses differ.

    `run_trainer` takes `dial`, which connects it to the buffer. `origins` (what set each key) are recorded.
    """
    if replay and recorded.step < config.train.steps:
        steps = quantity(recorded.step, "trained step")
        typer.echo(f"{recorded.path} has {steps} to replay, of train.steps = {config.train.steps}")
    buffer = OfflineBuffer(config, recorded, replay=replay, origins=origins)
    try:
        run_trainer(dial=buffer.client)
        if replay:
            compared, difference = buffer.compare_losses()
            same = "bit for bit the same" if difference == 0.0 else f"largest difference {difference:.3g}"
            sentence = f"replayed {quantity(compared, 'step')}; losses: {same}"
            typer.echo(sentence if compared else "no step whose loss could be compared with the recorded one")
    finally:
        buffer.close()
