"""The database file: the only place that knows SQL.

Invariant: nothing is acknowledged before the transaction that holds it has committed. One writer, one
transaction for whatever arrived while the last one committed.
"""

import contextlib
import ctypes
import functools
import json
import os
import shutil
import sqlite3
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from tba.buffer.index import Entry
from tba.buffer.leases import OpenVisit
from tba.buffer.reader import applied_migrations
from tba.buffer.schema import migrate
from tba.buffer.storage_errors import storage_errors
from tba.buffer.write_ahead_log import WriteAheadLog
from tba.common.durable import exclusive_lock
from tba.common.errors import Refused, StorageError, SyncFailed
from tba.common.trajectory import ARRAY_KINDS
from tba.common.wire import AnnounceSnapshot, ReportStep, WeightsRef

_CACHE_KIB = 64 << 10
_ROW_BYTES = 1024  # of a trajectory without its payload, in the log, roughly
_CHECKED_BYTES = 1 << 30  # two or three seconds
TRAJECTORY_COLUMNS = (
    "id",
    "run",
    "prompt",
    "visit",
    "sender",
    "sequence",
    "policy_version",
    "reward",
    "reward_parts",
    "stop_reason",
    "prompt_tokens",
    "response_tokens",
    "dedup_hash",
    "sampling",
    "created_at",
    "received_at",
    "generation_seconds",
    "text",
    "error",
    "metadata",
    "payload_bytes",
)
_PAYLOAD_COLUMNS = ("trajectory", "prompt_ids", "response_ids", "logprobs", "version_runs", "loss_mask")
_CONSUMPTION_COLUMNS = ("run", "step", "slot", "trajectory", "staleness")
# Rows in one INSERT: Python hands the interpreter lock to SQLite once for all of them, not once for each. Few
# sizes, so that the prepared statements stay in the cache.
_INSERT_SIZES = (256, 64, 16, 4, 1)
_SELECT_PAYLOADS = """
SELECT p.prompt_ids, p.response_ids, p.logprobs, p.version_runs, p.loss_mask
FROM json_each(?) asked CROSS JOIN payloads p ON p.trajectory = asked.value
ORDER BY asked.key
"""
_BATCH_COLUMNS = (
    "id",
    "prompt_key",
    "reward",
    "reward_parts",
    "policy_version",
    "staleness",
    "plain_sampling",
    "reference_logprob",
)
_SELECT_BATCH = """
SELECT t.id, p.key, t.reward, t.reward_parts, t.policy_version, c.staleness,
       t.policy_version >= 0 AND json_extract(t.sampling, '$.temperature') = 1
           AND json_extract(t.sampling, '$.top_p') = 1,
       r.logprob
FROM consumption_rows c
JOIN trajectory_rows t ON t.id = c.trajectory
JOIN prompts p ON p.id = t.prompt
LEFT JOIN reference_logprobs r ON r.trajectory = t.id AND r.reference = ?
WHERE c.run = ? AND c.step = ?
ORDER BY c.slot
"""


@dataclass(frozen=True, slots=True)
class Run:
    """The run that this server serves."""

    id: int
    uuid: str
    name: str
    seed: int


class Store:
    """One open database and one run in it. Not thread-safe.

    Raises ConfigError if another server has the file, StorageError if it is not a usable database.
    """

    def __init__(self, path: Path, *, durability: str) -> None:
        self.path = path
        taken = f"another buffer server has {path} open: stop it, or set buffer.database"
        self._new_rows: list[Sequence[Any]] = []  # of this transaction, not yet written
        self._new_payloads: list[Sequence[Any]] = []
        self._new_references: list[tuple[int, str, float]] = []
        self._unlogged = 0  # bytes that this transaction will have put into the log, roughly
        self._next_id: int | None = None
        self._resources = contextlib.ExitStack()
        try:
            with storage_errors(path):
                self._resources.enter_context(exclusive_lock(path.with_name(path.name + ".lock"), taken))
                self._open(durable=durability == "power")
        except SyncFailed:
            leave_open(self._resources)
            raise
        except BaseException:
            self._resources.close()
            raise

    def _open(self, *, durable: bool) -> None:
        # Closed last: SQLite's locks are the process's, and go with any descriptor of the file.
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        self._resources.callback(os.close, file)
        # Opened by one thread and used by another, never by two at a time.
        self._connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, uri=True)
        self._resources.callback(self._connection.close)
        self._refuse_damaged()
        self._refuse_foreign()
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")  # `WriteAheadLog.sync` makes it more
        self._connection.execute("PRAGMA busy_timeout = 10000")  # milliseconds, for a lock of another program
        self._connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        self._connection.execute("PRAGMA wal_autocheckpoint = 0")  # `WriteAheadLog.copy` does it
        migrate(Database(self._connection))
        # This writes, and so makes the log.
        self._connection.execute(f"PRAGMA user_version = {_identity(self.path.stat())}")
        self.log = self._resources.enter_context(WriteAheadLog(self.path, file, durable=durable))

    def _refuse_damaged(self) -> None:
        """Raise StorageError for a file that was copied while a server wrote to it: its parts are of different times.

        The database knows which file it is, so that a large one is read through only when it is new here.
        """
        file = self.path.stat()
        is_known = self._one("PRAGMA user_version")[0] == _identity(file)
        if is_known and file.st_size > _CHECKED_BYTES:
            return
        found = self._one("PRAGMA integrity_check(1)")[0]  # quick_check misses one such copy in ten
        if found != "ok":
            raise StorageError(
                f"{self.path} is damaged ({' '.join(found.split())}): was it copied while a server wrote to it? "
                "`tba buffer backup` makes copies that are whole"
            )

    def _refuse_foreign(self) -> None:
        """Raise StorageError for the database of another program, before anything is written to it."""
        tables = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
        names = {name for (name,) in self._all(tables)} - {"_sqlite_migrations"}
        if names and not applied_migrations(self._connection):
            raise StorageError(
                f"{self.path} is the database of another program, with tables such as {min(names)}: choose another "
                "file name for buffer.database"
            )

    def close(self) -> None:
        """Close the file; what was committed stays.

        After a failed sync it is left open until the process ends, and the lock held: SQLite copies the log when the
        last connection closes, and would delete it.
        """
        if self.log.failure is None:
            self._resources.close()
        else:
            self.log.leave()
            leave_open(self._resources)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit at the end, or nothing at all. Raises StorageError if the disk refuses."""
        with self.log.unless_failed():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.flush()
                self._connection.execute("COMMIT")
                self.log.written, self._unlogged = self.log.written + self._unlogged, 0
            except BaseException:
                self._new_rows, self._new_payloads, self._new_references, self._next_id = [], [], [], None
                self._unlogged = 0
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    # ------------------------------------------------------------ runs, senders, prompts

    def open_run(self, name: str, *, seed: int, config: dict[str, Any], software: dict[str, str]) -> Run:
        """The run of this name, made if it is not there; and a record of this start.

        A run keeps the seed that it was made with: the order of its prompts follows from it.
        """
        now = time.time()
        with self.transaction():
            self._connection.execute(
                "INSERT INTO runs (uuid, name, created_at, seed) VALUES (?, ?, ?, ?) ON CONFLICT (name) DO NOTHING",
                (uuid.uuid4().hex, name, now, seed),
            )
            run = Run(*self._one("SELECT id, uuid, name, seed FROM runs WHERE name = ?", name))
            self._connection.execute(
                "INSERT INTO starts (run, started_at, config, software) VALUES (?, ?, ?, ?)",
                (run.id, now, json.dumps(config), json.dumps(software)),
            )
        return run

    def sender_id(self, run: Run, sender: str, role: str) -> int:
        """The number of a sender, made if it is new."""
        self._connection.execute(
            "INSERT INTO senders (run, sender, role) VALUES (?, ?, ?) ON CONFLICT (sender) DO NOTHING",
            (run.id, sender, role),
        )
        return int(self._one("SELECT id FROM senders WHERE sender = ?", sender)[0])

    def describe_sender(self, sender: str, host: str, pid: int) -> None:
        """Where a sender runs."""
        self._connection.execute("UPDATE senders SET host = ?, pid = ? WHERE sender = ?", (host, pid, sender))

    def trainers(self, run: Run) -> list[tuple[str, str]]:
        """(sender, host) of the trainers that were let in, oldest first."""
        query = "SELECT sender, COALESCE(host, '') FROM senders WHERE run = ? AND role = 'trainer' ORDER BY id"
        return self._all(query, run.id)

    def task_of(self, run: Run) -> tuple[str | None, str | None, int]:
        """(task, fingerprint, number of prompts) of a run; None before the first registration."""
        task, fingerprint, prompts = self._one("SELECT task, fingerprint, prompts FROM runs WHERE id = ?", run.id)
        return task, fingerprint, prompts or 0

    def register_task(self, run: Run, task: str, fingerprint: str, prompts: int) -> None:
        """Say what the run's prompts are."""
        self._connection.execute(
            "UPDATE runs SET task = ?, fingerprint = ?, prompts = ? WHERE id = ?", (task, fingerprint, prompts, run.id)
        )

    def add_prompts(self, run: Run, offset: int, keys: Sequence[str]) -> None:
        """Prompt keys at positions from `offset` on; those that are there stay, an imported one gets its position."""
        self._connection.executemany(
            "INSERT INTO prompts (run, position, key) VALUES (?, ?, ?) "
            "ON CONFLICT (run, key) DO UPDATE SET position = excluded.position WHERE prompts.position IS NULL "
            "ON CONFLICT DO NOTHING",
            [(run.id, offset + place, key) for place, key in enumerate(keys)],
        )

    def add_imported_prompts(self, run: Run, keys: Sequence[str]) -> dict[str, int]:
        """Ids of prompts by key. Those that the task does not have are made without a position: never leased."""
        ids = {}
        for key in keys:
            self._connection.execute(
                "INSERT INTO prompts (run, key) VALUES (?, ?) ON CONFLICT DO NOTHING", (run.id, key)
            )
            ids[key] = int(self._one("SELECT id FROM prompts WHERE run = ? AND key = ?", run.id, key)[0])
        return ids

    def prompt_ids(self, run: Run) -> dict[str, int]:
        """Ids of the task's prompts by key, in the order of the data set. Imported ones have no place in it."""
        query = "SELECT key, id FROM prompts WHERE run = ? AND position IS NOT NULL ORDER BY position"
        return dict(self._all(query, run.id))

    # ------------------------------------------------------------ visits

    def newest_place(self, run: Run) -> tuple[int, int]:
        """(epoch, place after the last visit) to continue from."""
        row = self._all(
            "SELECT epoch, MAX(place) + 1 FROM visits WHERE run = ? GROUP BY epoch ORDER BY epoch DESC LIMIT 1", run.id
        )
        return row[0] if row else (0, 0)

    def open_visits(self, run: Run) -> list[OpenVisit]:
        """Visits that were handed out and have not come back."""
        rows = self._all("SELECT id, epoch, prompt, sender FROM visits WHERE run = ? AND done_at IS NULL", run.id)
        return [OpenVisit(*row) for row in rows]

    def add_visit(self, run: Run, epoch: int, place: int, prompt: int, sender: str, now: float) -> int:
        """Record a new lease. Returns its id."""
        cursor = self._connection.execute(
            "INSERT INTO visits (run, epoch, place, prompt, sender, leased_at) VALUES (?, ?, ?, ?, ?, ?)",
            (run.id, epoch, place, prompt, sender, now),
        )
        return int(cursor.lastrowid or 0)

    def lease_again(self, visit: int, sender: str, now: float) -> None:
        """Give an open visit to another sender."""
        self._connection.execute("UPDATE visits SET sender = ?, leased_at = ? WHERE id = ?", (sender, now, visit))

    def close_visits(self, visits: Sequence[int], now: float) -> None:
        """The trajectories of these visits are in this transaction."""
        self._connection.execute(
            "UPDATE visits SET done_at = ? WHERE id IN (SELECT value FROM json_each(?)) AND done_at IS NULL",
            (now, json.dumps(visits)),
        )

    # ------------------------------------------------------------ trajectories

    def new_ids(self, count: int) -> range:
        """Ids for so many new trajectories. They only grow: nothing is ever deleted."""
        if self._next_id is None:
            self._next_id = int(self._one("SELECT COALESCE(MAX(id), 0) + 1 FROM trajectory_rows")[0])
        first, self._next_id = self._next_id, self._next_id + count
        return range(first, self._next_id)

    def add_trajectories(self, rows: Sequence[Sequence[Any]], payloads: Sequence[Sequence[memoryview]]) -> None:
        """Add rows (see `TRAJECTORY_COLUMNS`) with their payloads; they are written with the transaction's end."""
        self._new_rows.extend(rows)
        self._new_payloads.extend((row[0], *payload) for row, payload in zip(rows, payloads, strict=True))

    def add_references(self, rows: Sequence[tuple[int, str, float]]) -> None:
        """Add (trajectory, reference, log-probability); they are written after the trajectories."""
        self._new_references.extend(rows)

    def flush(self) -> None:
        """Write what was added, so that queries of this transaction see it."""
        self._insert("OR ROLLBACK", "trajectory_rows", TRAJECTORY_COLUMNS, self._new_rows)
        self._insert("OR ROLLBACK", "payloads", _PAYLOAD_COLUMNS, self._new_payloads)
        self._unlogged += sum(row[-1] + _ROW_BYTES for row in self._new_rows)
        self._insert_references(self._new_references)
        self._new_rows, self._new_payloads, self._new_references = [], [], []

    def _insert_references(self, rows: Sequence[tuple[int, str, float]]) -> None:
        self._insert("OR IGNORE", "reference_logprobs", ("trajectory", "reference", "logprob"), rows)

    def _insert(self, conflict: str, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Insert many rows at once.

        What SQLite does by itself in a conflict, ABORT, undoes one statement: for that it would copy every page that
        the statement touches, as many bytes as it writes. A transaction here holds whole or not at all anyway.
        """
        start = 0
        for size in _INSERT_SIZES:
            while len(rows) - start >= size:
                statement = _insert_statement(table, tuple(columns), size, conflict)
                self._connection.execute(statement, list(chain.from_iterable(rows[start : start + size])))
                start += size

    def sequence_ranges(self, sender: int) -> list[tuple[int, int]]:
        """The half-open ranges of sequence numbers that are there from a sender."""
        query = """
        SELECT MIN(sequence), MAX(sequence) + 1
        FROM (SELECT sequence, sequence - ROW_NUMBER() OVER (ORDER BY sequence) AS island
              FROM trajectory_rows WHERE sender = ?)
        GROUP BY island"""
        return self._all(query, sender)

    def entries(self, run: Run, steps: dict[int, int]) -> Iterator[Entry]:
        """All sampleable trajectories, oldest first, for the index. `steps` maps versions to steps."""
        query = (
            "SELECT t.id, t.prompt, t.policy_version, t.reward, t.dedup_hash, COALESCE(t.payload_bytes, 0), "
            "EXISTS (SELECT 1 FROM consumption_rows c WHERE c.trajectory = t.id) "
            "FROM trajectory_rows t WHERE t.run = ? AND t.error IS NULL AND t.compacted_at IS NULL ORDER BY t.id"
        )
        with storage_errors(self.path):
            for id_, prompt, version, reward, dedup_hash, size, taken in self._connection.execute(query, (run.id,)):
                yield Entry(id_, prompt, steps.get(version, 0), reward, dedup_hash, bool(taken), size)

    def counts(self, run: Run) -> tuple[int, int]:
        """(trajectories, of these with an error)."""
        return self._one("SELECT COUNT(*), COUNT(error) FROM trajectory_rows WHERE run = ?", run.id)

    # ------------------------------------------------------------ batches

    def has_batch(self, run: Run, step: int) -> bool:
        """Whether the batch of a step is recorded."""
        return bool(self._all("SELECT 1 FROM batches WHERE run = ? AND step = ?", run.id, step))

    def record_batch(
        self, run: Run, step: int, groups: Sequence[Sequence[Entry]], now: float, *, stale_from: int
    ) -> None:
        """Record what a step trains on, before it is handed out. Staleness counts from the step `stale_from`."""
        self.flush()
        self._connection.execute(
            "INSERT INTO batches (run, step, prompts, samples, handed_out_at, newest_trajectory) "
            "VALUES (?, ?, ?, ?, ?, (SELECT MAX(id) FROM trajectory_rows))",
            (run.id, step, len(groups), len(groups[0]), now),
        )
        slots = [entry for group in groups for entry in group]
        rows = [(run.id, step, slot, entry.id, stale_from - entry.step) for slot, entry in enumerate(slots)]
        self._insert("OR ROLLBACK", "consumption_rows", _CONSUMPTION_COLUMNS, rows)

    def overlay(self, run: Run, past: Path, past_run: int, newest: int) -> None:
        """See the trajectories and prompts of a run in another database in place of our own, up to an id.

        The other database is attached read-only. A temporary view goes before a table of its name, so every query
        here reads it; what is recorded goes into our own tables.
        """
        with storage_errors(past):
            self._connection.execute("ATTACH ? AS past", (f"{past.absolute().as_uri()}?mode=ro",))
            for table, condition in (
                ("prompts", f"run = {past_run}"),
                ("trajectory_rows", f"run = {past_run} AND id <= {newest}"),
                ("payloads", f"trajectory <= {newest}"),
            ):
                names = [row[1] for row in self._all(f"PRAGMA past.table_info({table})")]
                columns = ", ".join(f"{run.id} AS run" if name == "run" else name for name in names)
                self._connection.execute(
                    f"CREATE TEMP VIEW {table} AS SELECT {columns} FROM past.{table} WHERE {condition}"  # noqa: S608
                )

    def copy_past_batch(self, run: Run, step: int, past_run: int) -> tuple[int, int] | None:
        """Record the batch that the run of `overlay` had at a step as our own.

        Returns (prompts, samples) of it, None if there is none.
        """
        self._connection.execute(
            "INSERT INTO batches (run, step, prompts, samples, handed_out_at, newest_trajectory) "
            "SELECT ?, step, prompts, samples, handed_out_at, newest_trajectory FROM past.batches "
            "WHERE run = ? AND step = ?",
            (run.id, past_run, step),
        )
        self._connection.execute(
            "INSERT INTO consumption_rows (run, step, slot, trajectory, staleness) "
            "SELECT ?, step, slot, trajectory, staleness FROM past.consumption_rows WHERE run = ? AND step = ?",
            (run.id, past_run, step),
        )
        shapes = self._all("SELECT prompts, samples FROM batches WHERE run = ? AND step = ?", run.id, step)
        return shapes[0] if shapes else None

    def losses(self, run: Run) -> dict[int, float]:
        """The loss of each step that was reported with one."""
        query = """SELECT step, json_extract(metrics, '$.loss') FROM batches
                   WHERE run = ? AND trained_at IS NOT NULL AND json_extract(metrics, '$.loss') IS NOT NULL"""
        return dict(self._all(query, run.id))

    def batch_rows(self, run: Run, step: int, reference: str) -> dict[str, list[Any]]:
        """The recorded batch of a step as columns, in slot order."""
        rows = self._all(_SELECT_BATCH, reference, run.id, step)
        return dict(zip(_BATCH_COLUMNS, map(list, zip(*rows, strict=True)), strict=True))

    def payloads(self, trajectories: Sequence[int]) -> list[tuple[bytes, ...]]:
        """The blobs of trajectories, in the order asked, one per array kind. Raises Refused if one was compacted."""
        self.flush()
        found = self._all(_SELECT_PAYLOADS, json.dumps(trajectories))
        if len(found) < len(trajectories):
            raise Refused(
                "compacted",
                f"the tokens of {len(trajectories) - len(found)} trajectories of this batch are gone: `tba buffer "
                "compact` dropped them, so it cannot be repeated; resume from a newer checkpoint",
            )
        return found

    def tokens(self, trajectories: Sequence[int]) -> tuple[int, int]:
        """(prompt tokens, response tokens) of these trajectories, each counted as often as it is named."""
        self.flush()
        query = """SELECT COALESCE(SUM(t.prompt_tokens), 0), COALESCE(SUM(t.response_tokens), 0)
                   FROM json_each(?) asked CROSS JOIN trajectory_rows t ON t.id = asked.value"""
        return self._one(query, json.dumps(trajectories))

    def report(self, run: Run, message: ReportStep, now: float) -> None:
        """The optimiser step was made. A second report of a step changes nothing but the metrics."""
        self._connection.execute(
            "UPDATE batches SET trained_at = COALESCE(trained_at, ?), metrics = ? WHERE run = ? AND step = ?",
            (now, json.dumps(message.metrics), run.id, message.step),
        )
        rows = [
            (trajectory, message.reference, logprob)
            for trajectory, logprob in zip(message.trajectory_ids, message.reference_logprobs, strict=True)
        ]
        self._insert_references(rows)

    def steps_done(self, run: Run) -> int:
        """Optimiser steps that were reported."""
        query = "SELECT COALESCE(MAX(step) + 1, 0) FROM batches WHERE run = ? AND trained_at IS NOT NULL"
        return int(self._one(query, run.id)[0])

    def recorded_steps(self, run: Run) -> int:
        """Steps whose batch is recorded, trained on or not."""
        return int(self._one("SELECT COALESCE(MAX(step) + 1, 0) FROM batches WHERE run = ?", run.id)[0])

    def consumed(self, run: Run) -> int:
        """Slots of all recorded batches."""
        return int(self._one("SELECT COUNT(*) FROM consumption_rows WHERE run = ?", run.id)[0])

    def finish(self, run: Run, step: int | None) -> None:
        """The trainer made its last step, or (None) goes on after it had."""
        self._connection.execute("UPDATE runs SET finished_step = ? WHERE id = ?", (step, run.id))

    def finished_step(self, run: Run) -> int | None:
        """The last step, if the trainer is done."""
        step: int | None = self._one("SELECT finished_step FROM runs WHERE id = ?", run.id)[0]
        return step

    # ------------------------------------------------------------ snapshots

    def add_snapshot(self, run: Run, message: AnnounceSnapshot, now: float) -> None:
        """Record an announced snapshot; a version that is there stays."""
        ref = message.weights
        self._connection.execute(
            "INSERT INTO snapshots (run, version, step, path, manifest_sha256, bytes, announced_at, address) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (run.id, ref.version, ref.step, ref.path, ref.manifest_sha256, message.bytes, now, ref.address or None),
        )

    def snapshots(self, run: Run) -> list[WeightsRef]:
        """All announced snapshots, oldest first."""
        rows = self._all(
            "SELECT version, step, path, manifest_sha256, coalesce(address, '') FROM snapshots WHERE run = ? "
            "ORDER BY version",
            run.id,
        )
        return [WeightsRef(version=v, step=s, path=p, manifest_sha256=h, address=a) for v, s, p, h, a in rows]

    # ------------------------------------------------------------ compaction

    def runs(self) -> list[Run]:
        """All runs in the file."""
        return [Run(*row) for row in self._all("SELECT id, uuid, name, seed FROM runs ORDER BY id")]

    def payload_sizes(self, run: Run) -> Iterator[tuple[int, int]]:
        """(trajectory, bytes of its payload) for all that have one, oldest first."""
        size = " + ".join(f"LENGTH(y.{kind.name})" for kind in ARRAY_KINDS)
        tables = "FROM trajectory_rows t JOIN payloads y ON y.trajectory = t.id"
        yield from self._connection.execute(
            f"SELECT t.id, {size} {tables} WHERE t.run = ? ORDER BY t.id",
            (run.id,),
        )

    def trajectories_of_batches(self, run: Run, *, since_step: int) -> set[int]:
        """Trajectories of batches that are not trained on yet, and of those from a step on."""
        query = (
            "SELECT DISTINCT c.trajectory FROM batches b JOIN consumption_rows c ON c.run = b.run AND c.step = b.step"
            " WHERE b.run = ? AND (b.step >= ? OR b.trained_at IS NULL)"
        )
        return {row[0] for row in self._all(query, run.id, since_step)}

    def drop_payloads(self, trajectories: Sequence[int], now: float) -> None:
        """Delete tokens; the rows say when."""
        ids = [(id_,) for id_ in trajectories]
        self._connection.executemany("DELETE FROM payloads WHERE trajectory = ?", ids)
        dropped = [(now, id_) for id_ in trajectories]
        self._connection.executemany("UPDATE trajectory_rows SET compacted_at = ? WHERE id = ?", dropped)

    def shrink(self) -> None:
        """Give free pages back to the file system. Raises StorageError if the disk refuses."""
        with self.log.unless_failed():
            self._connection.execute("VACUUM")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def database_bytes(self) -> int:
        """Size of the database with its write-ahead log."""
        wal = self.path.with_name(self.path.name + "-wal")
        return self.path.stat().st_size + (wal.stat().st_size if wal.exists() else 0)

    def free_bytes(self) -> int:
        """Free space of the disk that holds the database."""
        with storage_errors(self.path):
            return shutil.disk_usage(self.path.parent).free

    def _one(self, query: str, *values: Any) -> tuple[Any, ...]:
        with storage_errors(self.path):
            row: tuple[Any, ...] = self._connection.execute(query, values).fetchone()
        return row

    def _all(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with storage_errors(self.path):
            return self._connection.execute(query, values).fetchall()


def leave_open(resources: contextlib.ExitStack) -> None:
    """Never close these, not even when the interpreter ends, which closes all that it can still reach or count."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(resources))


def _identity(file: os.stat_result) -> int:
    """A number that a copy of the file does not have, as large as SQLite has room for."""
    return file.st_ino & 0x7FFFFFFF


@functools.cache
def _insert_statement(table: str, columns: tuple[str, ...], rows: int, conflict: str) -> str:
    row = f"({', '.join('?' * len(columns))})"
    return f"INSERT {conflict} INTO {table} ({', '.join(columns)}) VALUES {', '.join([row] * rows)}"  # noqa: S608
