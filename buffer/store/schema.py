"""The schema of the buffer database: one, for new databases. A database of another version is refused.

`docs/database.md` describes the tables column by column. Foreign keys are declared, so that a reader such as Datasette
follows them, and not enforced: the writer has checked each reference against its memory before it inserts a row, and
`tba buffer check` runs `PRAGMA foreign_key_check`. Each is one column wide, because Datasette follows no others.
"""

import contextlib
import functools
import re
import sqlite3
from pathlib import Path

from tba.buffer.store.views import VIEWS
from tba.common.errors import StorageError

# Increment it with each change of a table, an index or a view. It is stored with "tba" as the file's application id.
VERSION = 17
_APPLICATION = int.from_bytes(b"tba") << 8
# What ANALYZE and Litestream make, without expressions that could compute anything.
_OF_TOOLS = re.compile(r"CREATE TABLE (?:sqlite_stat\d|_litestream_(?:seq|lock)) ?\([^()]*\)")
_TABLES = """
-- What `tba buffer prune` has deleted still counts for `buffer.samples_per_insert`: `pruned` and `pruned_slots`.
CREATE TABLE runs (id INTEGER PRIMARY KEY, uuid TEXT NOT NULL, name TEXT NOT NULL, created_at REAL NOT NULL,
    seed INTEGER NOT NULL, task TEXT, fingerprint TEXT, prompts INTEGER, finished_step INTEGER,
    pruned INTEGER NOT NULL DEFAULT 0, pruned_slots INTEGER NOT NULL DEFAULT 0) STRICT;
CREATE UNIQUE INDEX idx_runs_name ON runs (name);
CREATE TABLE starts (id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES runs (id), started_at REAL NOT NULL,
    config TEXT NOT NULL, software TEXT NOT NULL, origins TEXT) STRICT;
CREATE TABLE senders (id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES runs (id), sender TEXT NOT NULL,
    role TEXT NOT NULL, host TEXT, pid INTEGER, trajectories INTEGER NOT NULL DEFAULT 0,
    errors INTEGER NOT NULL DEFAULT 0, response_tokens INTEGER NOT NULL DEFAULT 0, reward_sum REAL NOT NULL DEFAULT 0.0,
    first_received_at REAL, last_received_at REAL) STRICT;
CREATE UNIQUE INDEX idx_senders_sender ON senders (sender);
CREATE TABLE prompts (id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES runs (id), position INTEGER,
    key TEXT NOT NULL, text TEXT, answer TEXT) STRICT;
CREATE UNIQUE INDEX idx_prompts_run_key ON prompts (run, key);
CREATE UNIQUE INDEX idx_prompts_run_position ON prompts (run, position);
CREATE TABLE visits (id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES runs (id), epoch INTEGER NOT NULL,
    place INTEGER NOT NULL, prompt INTEGER NOT NULL REFERENCES prompts (id), sender INTEGER REFERENCES senders (id),
    leased_at REAL NOT NULL, done_at REAL) STRICT;
CREATE UNIQUE INDEX idx_visits_run_epoch_place ON visits (run, epoch, place);
CREATE INDEX visits_open ON visits (run) WHERE done_at IS NULL;
-- Metadata and payloads are separate tables, so that a query over rewards does not read token blobs.
CREATE TABLE trajectory_rows (id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES runs (id),
    prompt INTEGER NOT NULL REFERENCES prompts (id), visit INTEGER REFERENCES visits (id),
    sender INTEGER NOT NULL REFERENCES senders (id), sequence INTEGER NOT NULL, policy_version INTEGER NOT NULL,
    reward REAL NOT NULL, reward_parts TEXT NOT NULL, stop_reason TEXT NOT NULL, prompt_tokens INTEGER NOT NULL,
    response_tokens INTEGER NOT NULL, dedup_hash INTEGER NOT NULL, sampling TEXT NOT NULL, created_at REAL NOT NULL,
    received_at REAL NOT NULL, generation_seconds REAL NOT NULL, text TEXT, error TEXT, error_kind TEXT,
    turns TEXT NOT NULL, metadata TEXT NOT NULL, payload_bytes INTEGER NOT NULL, compacted_at REAL,
    archive INTEGER REFERENCES archives (id)) STRICT;
CREATE INDEX idx_trajectories_run_reward ON trajectory_rows (run, reward);
CREATE INDEX idx_trajectories_run_received_at ON trajectory_rows (run, received_at);
CREATE INDEX idx_trajectories_prompt_policy_version ON trajectory_rows (prompt, policy_version);
CREATE UNIQUE INDEX idx_trajectories_sender_sequence ON trajectory_rows (sender, sequence);
CREATE INDEX trajectories_episodes ON trajectory_rows (run) WHERE turns != '[]';
CREATE TABLE payloads (trajectory INTEGER PRIMARY KEY REFERENCES trajectory_rows (id), prompt_ids BLOB NOT NULL,
    response_ids BLOB NOT NULL, logprobs BLOB NOT NULL, version_runs BLOB NOT NULL, loss_mask BLOB NOT NULL,
    segments BLOB NOT NULL) STRICT;
-- Only of responses that top-p, top-k or min-p cut, and until their tokens are dropped.
CREATE TABLE kept_tokens (trajectory INTEGER PRIMARY KEY REFERENCES trajectory_rows (id), kept BLOB NOT NULL) STRICT;
-- Files of `tba buffer archive`. Until one is complete, tokens of its trajectories may still be here, too.
CREATE TABLE archives (id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES runs (id), url TEXT NOT NULL,
    archived_at REAL NOT NULL, complete INTEGER NOT NULL) STRICT;
CREATE UNIQUE INDEX idx_archives_url ON archives (url);
CREATE TABLE snapshots (run INTEGER NOT NULL REFERENCES runs (id), version INTEGER NOT NULL, step INTEGER NOT NULL,
    path TEXT NOT NULL, manifest_sha256 TEXT NOT NULL, bytes INTEGER NOT NULL, announced_at REAL NOT NULL,
    address TEXT, PRIMARY KEY (run, version)) STRICT;
-- A batch never changes, so what its rows say about it is stored with it: a view that read them would take
-- milliseconds for each batch. `newest_trajectory` is a bound, not a reference: that trajectory may be pruned.
CREATE TABLE batches (id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES runs (id), step INTEGER NOT NULL,
    prompts INTEGER NOT NULL, samples INTEGER NOT NULL, handed_out_at REAL NOT NULL, trained_at REAL, metrics TEXT,
    newest_trajectory INTEGER, recency_window INTEGER NOT NULL DEFAULT 0, recency_groups INTEGER NOT NULL DEFAULT 0,
    recency_missed INTEGER NOT NULL DEFAULT 0, trajectories INTEGER, min_staleness INTEGER, mean_staleness REAL,
    max_staleness INTEGER, mean_age_seconds REAL, max_age_seconds REAL, mean_reward REAL, UNIQUE (run, step)) STRICT;
CREATE TABLE consumption_rows (batch INTEGER NOT NULL REFERENCES batches (id), slot INTEGER NOT NULL,
    trajectory INTEGER NOT NULL REFERENCES trajectory_rows (id), staleness INTEGER NOT NULL, logprob REAL,
    log_ratio REAL, advantage REAL, weight REAL, mismatch REAL, skipped INTEGER, token_log_ratios BLOB,
    PRIMARY KEY (batch, slot)) STRICT;
CREATE INDEX idx_consumption_trajectory ON consumption_rows (trajectory);
CREATE TABLE reference_logprobs (trajectory INTEGER NOT NULL REFERENCES trajectory_rows (id), reference TEXT NOT NULL,
    logprob REAL NOT NULL, PRIMARY KEY (trajectory, reference)) STRICT;
CREATE TABLE rescored_logprobs (trajectory INTEGER NOT NULL REFERENCES trajectory_rows (id), version INTEGER NOT NULL,
    logprob REAL NOT NULL, sampled_logprob REAL, max_difference REAL, logprobs BLOB,
    PRIMARY KEY (trajectory, version)) STRICT;
CREATE TABLE evaluation_rows (id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES runs (id),
    version INTEGER NOT NULL, step INTEGER NOT NULL, prompts INTEGER NOT NULL, prompt_set TEXT NOT NULL,
    settings TEXT NOT NULL, evaluated_at REAL NOT NULL, seconds REAL NOT NULL, metrics TEXT NOT NULL,
    intervals TEXT NOT NULL, not_measured TEXT, UNIQUE (run, version, prompt_set, settings)) STRICT;
CREATE TABLE held_out_rows (evaluation INTEGER NOT NULL REFERENCES evaluation_rows (id),
    run INTEGER NOT NULL REFERENCES runs (id), prompt TEXT NOT NULL, prompt_text TEXT NOT NULL, answer TEXT NOT NULL,
    response TEXT NOT NULL, reward REAL NOT NULL, reward_parts TEXT NOT NULL, error TEXT,
    PRIMARY KEY (evaluation, prompt)) STRICT, WITHOUT ROWID;
CREATE TABLE curriculum_rows (run INTEGER NOT NULL REFERENCES runs (id),
    epoch INTEGER NOT NULL, prompt INTEGER NOT NULL REFERENCES prompts (id), decision TEXT NOT NULL,
    passed INTEGER NOT NULL, answers INTEGER NOT NULL, PRIMARY KEY (run, epoch, prompt)) STRICT, WITHOUT ROWID;
"""


def create(connection: sqlite3.Connection) -> None:
    """Make the tables of a new database in one transaction. One that has them stays as it is."""
    connection.execute("BEGIN IMMEDIATE")
    if not _application(connection):
        for statement in (*_TABLES.strip().removesuffix(";").split(";"), *VIEWS):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {_APPLICATION + VERSION}")
    connection.execute("COMMIT")


def is_new(path: Path, connection: sqlite3.Connection) -> bool:
    """Whether a file has no tables yet. Raises StorageError if they are not exactly those of this release.

    A trigger runs with statements of tba, and a view in the place of another one, or of a table, computes anything.
    """
    found, application = _declarations(connection), _application(connection)
    if not (found or application):
        return True
    if application != _APPLICATION + VERSION:
        raise StorageError(f"{path} {_whose(application, found)}")
    expected = _declared()
    # What is foreign first: it may be in the place of what is missing.
    for name in sorted(found.keys() | expected.keys(), key=lambda name: (name in expected, name)):
        if found.get(name) == expected.get(name):
            continue
        if name not in expected:
            problem = f"has the {name}, which tba does not make: drop it if it is yours"
        elif name not in found:
            problem = f"lacks the {name}: use a backup"
        else:
            problem = f"declares the {name} in another way than tba: use a backup"
        raise StorageError(f"{path} {problem}. What is foreign in a database may run whenever tba reads or writes it")
    return False


def _application(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA application_id").fetchone()[0])


def _whose(application: int, found: dict[str, str]) -> str:
    """Return what made a database that is not one of this release."""
    if application >> 8 == _APPLICATION >> 8 or "table _sqlite_migrations" in found:
        return (
            "was made by another build of tba, with a schema that this one does not have: continue the run with that "
            "build, or export its trajectories there and import them into a new run"
        )
    return f"is the database of another program, with the {min(found, default='application id')}: name another file"


@functools.cache
def _declared() -> dict[str, str]:
    """Return the declarations of a new database."""
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as empty:
        create(empty)
        return _declarations(empty)


def _declarations(connection: sqlite3.Connection) -> dict[str, str]:
    """Return the SQL of each table, index, view and trigger, by its kind and name, without quotes of plain names."""
    rows = connection.execute("SELECT type || ' ' || name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    own = {name: sql for name, sql in rows if not _OF_TOOLS.fullmatch(sql)}
    return {name: " ".join(re.sub(r'"(\w+)"', r"\1", sql).split()) for name, sql in own.items()}
