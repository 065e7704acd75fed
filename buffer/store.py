"""The database file: the only place that knows SQL.

Invariant: nothing is acknowledged before the transaction that holds it has committed. One writer, one
transaction for whatever arrived while the last one committed.
"""

import contextlib
import json
import sqlite3
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from tba.buffer.index import Entry
from tba.buffer.leases import OpenVisit
from tba.buffer.schema import migrate
from tba.common.durable import exclusive_lock
from tba.common.errors import Refused, StorageError
from tba.common.trajectory import ARRAY_KINDS
from tba.common.wire import AnnounceSnapshot, ReportStep, WeightsRef

_SYNCHRONOUS = {"power": "FULL", "process": "NORMAL"}
_STORAGE_CODES = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_NOMEM,
    }
)
_INSERT_TRAJECTORY = """
INSERT INTO trajectory_rows (run, prompt, visit, sender, sequence, policy_version, reward, reward_parts, stop_reason,
    prompt_tokens, response_tokens, dedup_hash, sampling, created_at, received_at, generation_seconds, text, error,
    metadata)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (sender, sequence) DO NOTHING
"""
_INSERT_PAYLOAD = """
INSERT INTO payloads (trajectory, prompt_ids, response_ids, logprobs, version_runs, loss_mask)
VALUES (?, ?, ?, ?, ?, ?)
"""
_SELECT_PAYLOAD = """
SELECT prompt_ids, response_ids, logprobs, version_runs, loss_mask FROM payloads WHERE trajectory = ?
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
        self._resources = contextlib.ExitStack()
        self._resources.enter_context(exclusive_lock(path.with_name(path.name + ".lock"), taken))
        with _storage_errors(path):
            self._connection = sqlite3.connect(path, isolation_level=None)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute(f"PRAGMA synchronous = {_SYNCHRONOUS[durability]}")
            self._connection.execute("PRAGMA busy_timeout = 10000")
            self._connection.execute("PRAGMA foreign_keys = ON")
            migrate(Database(self._connection))

    def close(self) -> None:
        """Close the file; what was committed stays."""
        self._connection.close()
        self._resources.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit at the end, or nothing at all. Raises StorageError if the disk refuses."""
        with _storage_errors(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
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
        self._connection.executemany(
            "UPDATE visits SET done_at = ? WHERE id = ? AND done_at IS NULL", [(now, visit) for visit in visits]
        )

    # ------------------------------------------------------------ trajectories

    def put(self, row: tuple[Any, ...], payload: Sequence[memoryview]) -> int | None:
        """Insert a trajectory with its payload. Returns its id, None if (sender, sequence) is there already."""
        cursor = self._connection.execute(_INSERT_TRAJECTORY, row)
        if cursor.rowcount == 0:
            return None
        self._connection.execute(_INSERT_PAYLOAD, (cursor.lastrowid, *payload))
        return cursor.lastrowid

    def entries(self, run: Run, steps: dict[int, int]) -> Iterator[Entry]:
        """All sampleable trajectories, oldest first, for the index. `steps` maps versions to steps."""
        rows = self._connection.execute(
            "SELECT t.id, t.prompt, t.policy_version, t.reward, t.dedup_hash, EXISTS ("
            "    SELECT 1 FROM consumption_rows c JOIN batches b ON b.run = c.run AND b.step = c.step"
            "    WHERE c.trajectory = t.id AND b.trained_at IS NOT NULL) "
            "FROM trajectory_rows t WHERE t.run = ? AND t.error IS NULL AND t.compacted_at IS NULL ORDER BY t.id",
            (run.id,),
        )
        for id_, prompt, version, reward, dedup_hash, trained in rows:
            yield Entry(id_, prompt, steps.get(version, 0), reward, dedup_hash, bool(trained))

    def counts(self, run: Run) -> tuple[int, int]:
        """(trajectories, of these with an error)."""
        return self._one("SELECT COUNT(*), COUNT(error) FROM trajectory_rows WHERE run = ?", run.id)

    # ------------------------------------------------------------ batches

    def has_batch(self, run: Run, step: int) -> bool:
        """Whether the batch of a step is recorded."""
        return bool(self._all("SELECT 1 FROM batches WHERE run = ? AND step = ?", run.id, step))

    def record_batch(self, run: Run, step: int, groups: Sequence[Sequence[Entry]], now: float) -> None:
        """Record what a step trains on, before it is handed out."""
        self._connection.execute(
            "INSERT INTO batches (run, step, prompts, samples, handed_out_at) VALUES (?, ?, ?, ?, ?)",
            (run.id, step, len(groups), len(groups[0]), now),
        )
        slots = [entry for group in groups for entry in group]
        self._connection.executemany(
            "INSERT INTO consumption_rows (run, step, slot, trajectory, staleness) VALUES (?, ?, ?, ?, ?)",
            [(run.id, step, slot, entry.id, step - entry.step) for slot, entry in enumerate(slots)],
        )

    def batch_rows(self, run: Run, step: int, reference: str) -> dict[str, list[Any]]:
        """The recorded batch of a step as columns, in slot order."""
        rows = self._all(_SELECT_BATCH, reference, run.id, step)
        return dict(zip(_BATCH_COLUMNS, map(list, zip(*rows, strict=True)), strict=True))

    def payloads(self, trajectories: Sequence[int]) -> list[tuple[bytes, ...]]:
        """The blobs of trajectories, in the order asked, one per array kind. Raises Refused if one was compacted."""
        return [self._payload(id_) for id_ in trajectories]

    def _payload(self, trajectory: int) -> tuple[bytes, ...]:
        blobs: tuple[bytes, ...] | None = self._connection.execute(_SELECT_PAYLOAD, (trajectory,)).fetchone()
        if blobs is None:
            raise Refused(
                "compacted",
                f"the tokens of trajectory {trajectory} are gone: `tba buffer compact` dropped them, so the batches "
                "that used it cannot be repeated; resume from a newer checkpoint",
            )
        return blobs

    def report(self, run: Run, message: ReportStep, now: float) -> None:
        """The optimiser step was made. A second report of a step changes nothing but the metrics."""
        self._connection.execute(
            "UPDATE batches SET trained_at = COALESCE(trained_at, ?), metrics = ? WHERE run = ? AND step = ?",
            (now, json.dumps(message.metrics), run.id, message.step),
        )
        self._connection.executemany(
            "INSERT INTO reference_logprobs (trajectory, reference, logprob) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
            [
                (trajectory, message.reference, logprob)
                for trajectory, logprob in zip(message.trajectory_ids, message.reference_logprobs, strict=True)
            ],
        )

    def batch_trajectories(self, run: Run, step: int) -> list[int]:
        """Ids of the trajectories in a recorded batch."""
        return [
            row[0]
            for row in self._all("SELECT trajectory FROM consumption_rows WHERE run = ? AND step = ?", run.id, step)
        ]

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
            "INSERT INTO snapshots (run, version, step, path, manifest_sha256, bytes, announced_at) "
            "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (run.id, ref.version, ref.step, ref.path, ref.manifest_sha256, message.bytes, now),
        )

    def snapshots(self, run: Run) -> list[WeightsRef]:
        """All announced snapshots, oldest first."""
        rows = self._all(
            "SELECT version, step, path, manifest_sha256 FROM snapshots WHERE run = ? ORDER BY version", run.id
        )
        return [WeightsRef(version=v, step=s, path=p, manifest_sha256=h) for v, s, p, h in rows]

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
        with _storage_errors(self.path):
            self._connection.execute("VACUUM")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def database_bytes(self) -> int:
        """Size of the database with its write-ahead log."""
        wal = self.path.with_name(self.path.name + "-wal")
        return self.path.stat().st_size + (wal.stat().st_size if wal.exists() else 0)

    def _one(self, query: str, *values: Any) -> tuple[Any, ...]:
        row: tuple[Any, ...] = self._connection.execute(query, values).fetchone()
        return row

    def _all(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._connection.execute(query, values).fetchall()


@contextlib.contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        # What is not the disk's fault is a bug of ours, and must not be tried again for ever.
        if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF not in _STORAGE_CODES:
            raise
        raise StorageError(f"{path}: {error}") from error
    except OSError as error:
        raise StorageError(f"{path}: {error}") from error
