"""The schema of the buffer database, as sqlite-utils migrations.

A migration and its record commit in one transaction. Released migrations are never edited: a later release adds one.
`docs/database.md` describes the tables column by column.
"""

import functools
import re
import sqlite3
from pathlib import Path

from sqlite_utils import Database
from sqlite_utils.migrations import Migrations

from tba.buffer.store import views
from tba.buffer.store.references_migration import declare_references
from tba.common.errors import StorageError

migrations = Migrations("tba")

# What sqlite-utils and SQLite make for themselves, without expressions that could compute anything.
_BOOKKEEPING = re.compile(
    r"CREATE (?:TABLE|(?:UNIQUE )?INDEX) \W?(?:idx_)?_sqlite_migrations[^(]*\([^()]*\)"
    r"|CREATE TABLE sqlite_stat\d\([^()]*\)"
)

_TABLES = """
CREATE TABLE runs (id INTEGER PRIMARY KEY, uuid TEXT NOT NULL, name TEXT NOT NULL, created_at REAL NOT NULL,
    seed INTEGER NOT NULL, task TEXT, fingerprint TEXT, prompts INTEGER, finished_step INTEGER) STRICT;
CREATE UNIQUE INDEX idx_runs_name ON runs (name);
CREATE TABLE starts (id INTEGER PRIMARY KEY, run INTEGER, started_at REAL, config TEXT, software TEXT) STRICT;
CREATE TABLE senders (id INTEGER PRIMARY KEY, run INTEGER, sender TEXT, role TEXT, host TEXT, pid INTEGER);
CREATE UNIQUE INDEX idx_senders_sender ON senders (sender);

CREATE TABLE prompts (id INTEGER PRIMARY KEY, run INTEGER, position INTEGER, key TEXT) STRICT;
CREATE UNIQUE INDEX idx_prompts_run_key ON prompts (run, key);
CREATE UNIQUE INDEX idx_prompts_run_position ON prompts (run, position);
CREATE TABLE visits (id INTEGER PRIMARY KEY, run INTEGER, epoch INTEGER, place INTEGER, prompt INTEGER, sender TEXT,
    leased_at REAL, done_at REAL) STRICT;
CREATE UNIQUE INDEX idx_visits_run_epoch_place ON visits (run, epoch, place);
CREATE INDEX visits_open ON visits (run) WHERE done_at IS NULL;

-- Metadata and payloads are separate tables, so that a query over rewards does not read token blobs.
CREATE TABLE trajectory_rows (id INTEGER PRIMARY KEY, run INTEGER NOT NULL, prompt INTEGER NOT NULL, visit INTEGER,
    sender INTEGER NOT NULL, sequence INTEGER NOT NULL, policy_version INTEGER NOT NULL, reward REAL NOT NULL,
    reward_parts TEXT, stop_reason TEXT, prompt_tokens INTEGER, response_tokens INTEGER, dedup_hash INTEGER,
    sampling TEXT, created_at REAL, received_at REAL NOT NULL, generation_seconds REAL, text TEXT, error TEXT,
    metadata TEXT, payload_bytes INTEGER, compacted_at REAL) STRICT;
CREATE INDEX idx_trajectories_run_reward ON trajectory_rows (run, reward);
CREATE INDEX idx_trajectories_run_received_at ON trajectory_rows (run, received_at);
CREATE INDEX idx_trajectories_prompt_policy_version ON trajectory_rows (prompt, policy_version);
CREATE UNIQUE INDEX idx_trajectories_sender_sequence ON trajectory_rows (sender, sequence);
CREATE TABLE payloads (trajectory INTEGER PRIMARY KEY, prompt_ids BLOB, response_ids BLOB, logprobs BLOB,
    version_runs BLOB, loss_mask BLOB) STRICT;

CREATE TABLE snapshots (run INTEGER, version INTEGER, step INTEGER, path TEXT, manifest_sha256 TEXT, bytes INTEGER,
    announced_at REAL, address TEXT, PRIMARY KEY (run, version)) STRICT;
CREATE TABLE batches (run INTEGER, step INTEGER, prompts INTEGER, samples INTEGER, handed_out_at REAL, trained_at REAL,
    metrics TEXT, newest_trajectory INTEGER, recency_window INTEGER NOT NULL DEFAULT 0,
    recency_groups INTEGER NOT NULL DEFAULT 0, recency_missed INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (run, step)) STRICT;
CREATE TABLE consumption_rows (run INTEGER, step INTEGER, slot INTEGER, trajectory INTEGER, staleness INTEGER,
    PRIMARY KEY (run, step, slot)) STRICT;
CREATE INDEX idx_consumption_trajectory ON consumption_rows (trajectory);
CREATE TABLE reference_logprobs (trajectory INTEGER, reference TEXT, logprob REAL,
    PRIMARY KEY (trajectory, reference)) STRICT;
"""

_EVALUATION_ROWS = """
CREATE TABLE evaluation_rows (id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES runs (id),
    version INTEGER NOT NULL, step INTEGER NOT NULL, prompts INTEGER NOT NULL, prompt_set TEXT NOT NULL,
    settings TEXT NOT NULL, evaluated_at REAL NOT NULL, seconds REAL NOT NULL, metrics TEXT NOT NULL,
    intervals TEXT NOT NULL, UNIQUE (run, version, prompt_set, settings)) STRICT
"""

_HELD_OUT_ROWS = """
CREATE TABLE held_out_rows (evaluation INTEGER NOT NULL REFERENCES evaluation_rows (id),
    run INTEGER NOT NULL REFERENCES runs (id), prompt TEXT NOT NULL, prompt_text TEXT NOT NULL, answer TEXT NOT NULL,
    response TEXT NOT NULL, reward REAL NOT NULL, reward_parts TEXT NOT NULL, error TEXT,
    PRIMARY KEY (evaluation, prompt)) STRICT, WITHOUT ROWID
"""

_CURRICULUM_ROWS = """
CREATE TABLE curriculum_rows (run INTEGER NOT NULL REFERENCES runs (id),
    epoch INTEGER NOT NULL, prompt INTEGER NOT NULL REFERENCES prompts (id), decision TEXT NOT NULL,
    passed INTEGER NOT NULL, answers INTEGER NOT NULL, PRIMARY KEY (run, epoch, prompt)) STRICT, WITHOUT ROWID
"""


@migrations(name="0001_initial")
def _initial(db: Database) -> None:
    # Not `executescript`, which would commit the migration before its record.
    for statement in _TABLES.strip().removesuffix(";").split(";"):
        db.execute(statement)


@migrations(name="0002_references")
def _references(db: Database) -> None:
    declare_references(db)


@migrations(name="0003_evaluations")
def _evaluations(db: Database) -> None:
    for statement in (_EVALUATION_ROWS, views.EVALUATIONS):
        db.execute(statement)


@migrations(name="0004_waste")
def _waste(db: Database) -> None:
    for statement in (views.LENGTHS, views.WASTE):
        db.execute(statement)


@migrations(name="0005_row_numbers")
def _row_numbers(db: Database) -> None:
    # Old rows stay as they are: a missing column at the end of a row is NULL.
    for column in (
        "logprob REAL",
        "log_ratio REAL",
        "advantage REAL",
        "weight REAL",
        "mismatch REAL",
        "skipped INTEGER",
    ):
        db.execute(f"ALTER TABLE consumption_rows ADD COLUMN {column}")
    db.execute("DROP VIEW consumption")
    db.execute(views.CONSUMPTION_WITH_NUMBERS)


@migrations(name="0006_curriculum")
def _curriculum(db: Database) -> None:
    for statement in (_CURRICULUM_ROWS, views.CURRICULUM):
        db.execute(statement)


@migrations(name="0007_origins")
def _origins(db: Database) -> None:
    db.execute("ALTER TABLE starts ADD COLUMN origins TEXT")


@migrations(name="0008_token_log_ratios")
def _token_log_ratios(db: Database) -> None:
    db.execute("ALTER TABLE consumption_rows ADD COLUMN token_log_ratios BLOB")


@migrations(name="0009_not_measured")
def _not_measured(db: Database) -> None:
    db.execute("ALTER TABLE evaluation_rows ADD COLUMN not_measured TEXT")
    db.execute("DROP VIEW evaluations")
    db.execute(views.MEASURED_EVALUATIONS)


@migrations(name="0010_held_out")
def _held_out(db: Database) -> None:
    db.execute("ALTER TABLE prompts ADD COLUMN answer TEXT")
    db.execute("DROP VIEW trajectories")
    for statement in (views.TRAJECTORIES_WITH_ANSWERS, _HELD_OUT_ROWS, views.HELD_OUT):
        db.execute(statement)


def migrate(db: Database) -> None:
    """Apply the migrations that a database lacks. Raises StorageError if it has one that this release does not know."""
    check_known(applied_migrations(db.conn))
    migrations.apply(db)


def applied_migrations(connection: sqlite3.Connection) -> set[str]:
    """Return the names of a database's migrations; empty if it is not a buffer database.

    Raises StorageError if their record is not the table that sqlite-utils makes: to read it might compute anything.
    """
    if foreign := [
        name for name, sql in _declarations(connection).items() if migrations.migrations_table in name + sql
    ]:
        raise StorageError(f"the database has the {foreign[0]}, which tba does not make")
    return {migration.name for migration in migrations.applied(Database(connection))}


def schema_names() -> list[str]:
    """Return the names of this release's migrations, oldest first; the last one names the schema."""
    with Database(memory=True) as empty:
        return [migration.name for migration in migrations.pending(empty)]


def check_schema(path: Path, connection: sqlite3.Connection) -> None:
    """Raise StorageError unless tables, indexes, views and triggers are those of the applied migrations, and no more.

    A trigger runs with statements of tba, and a view in the place of another one, or of a table, computes anything.
    """
    names, applied = schema_names(), applied_migrations(connection)
    check_known(applied)
    pending = next((name for name in names if name not in applied), None)
    found, expected = _declarations(connection), _declared(tuple(names), pending)
    # What is foreign first: it may be in the place of what is missing.
    for name in sorted(found.keys() | expected.keys(), key=lambda name: (name in expected, name)):
        # Migration 0002 drops the views of its predecessor, which had others in the course of time.
        if found.get(name) == expected.get(name) or (pending == "0002_references" and name.startswith("view ")):
            continue
        if name not in expected:
            problem = f"has the {name}, which tba does not make: drop it if it is yours"
        elif name not in found:
            problem = f"lacks the {name}: restore a backup"
        else:
            problem = f"declares the {name} in another way than tba: restore a backup"
        raise StorageError(f"{path} {problem}. What is foreign in a database may run whenever tba reads or writes it")


@functools.cache
def _declared(_names: tuple[str, ...], pending: str | None) -> dict[str, str]:
    """Return the declarations of a new database without the migrations from `pending` on."""
    with Database(memory=True) as empty:
        migrations.apply(empty, stop_before=pending)
        return _declarations(empty.conn)


def _declarations(connection: sqlite3.Connection) -> dict[str, str]:
    """Return the SQL of each table, index, view and trigger, by its kind and name, without quotes of plain names."""
    rows = connection.execute("SELECT type || ' ' || name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    own = {name: sql for name, sql in rows if not _BOOKKEEPING.fullmatch(sql)}
    return {name: " ".join(re.sub(r'"(\w+)"', r"\1", sql).split()) for name, sql in own.items()}


def check_known(applied: set[str]) -> None:
    """Raise StorageError if another release of tba has migrated the database to a schema of its own."""
    if unknown := sorted(applied - set(schema_names())):
        raise StorageError(
            f"the database has schema {unknown[-1]}, which this release does not know: use the release of tba that "
            "wrote it, or a newer one"
        )
