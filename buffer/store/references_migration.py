"""Migration 0002: foreign keys, NOT NULL and STRICT everywhere, the text of prompts, batches with an id of their own.

Foreign keys are declared, so that a reader such as Datasette follows them, and not enforced: the writer has checked
each reference against its memory before it inserts a row, and `tba buffer check` runs `PRAGMA foreign_key_check`.
Each of them is one column wide, because Datasette follows no others.
"""

from sqlite_utils import Database

from tba.buffer.store.views import VIEWS

# Rows have the same bytes under the new declaration, so only the declaration is replaced: a copy of `payloads` would
# need as much free space again as the file has.
_REDECLARED = {
    # What `tba buffer prune` has deleted still counts for `buffer.samples_per_insert`.
    "runs": """(id INTEGER PRIMARY KEY, uuid TEXT NOT NULL, name TEXT NOT NULL, created_at REAL NOT NULL,
    seed INTEGER NOT NULL, task TEXT, fingerprint TEXT, prompts INTEGER, finished_step INTEGER,
    pruned INTEGER NOT NULL DEFAULT 0, pruned_slots INTEGER NOT NULL DEFAULT 0) STRICT""",
    "starts": """(id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES runs (id), started_at REAL NOT NULL,
    config TEXT NOT NULL, software TEXT NOT NULL) STRICT""",
    "prompts": """(id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES runs (id), position INTEGER,
    key TEXT NOT NULL, text TEXT) STRICT""",
    "trajectory_rows": """(id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES runs (id),
    prompt INTEGER NOT NULL REFERENCES prompts (id), visit INTEGER REFERENCES visits (id),
    sender INTEGER NOT NULL REFERENCES senders (id), sequence INTEGER NOT NULL, policy_version INTEGER NOT NULL,
    reward REAL NOT NULL, reward_parts TEXT NOT NULL, stop_reason TEXT NOT NULL, prompt_tokens INTEGER NOT NULL,
    response_tokens INTEGER NOT NULL, dedup_hash INTEGER NOT NULL, sampling TEXT NOT NULL, created_at REAL NOT NULL,
    received_at REAL NOT NULL, generation_seconds REAL NOT NULL, text TEXT, error TEXT, metadata TEXT NOT NULL,
    payload_bytes INTEGER NOT NULL, compacted_at REAL) STRICT""",
    "payloads": """(trajectory INTEGER PRIMARY KEY REFERENCES trajectory_rows (id), prompt_ids BLOB NOT NULL,
    response_ids BLOB NOT NULL, logprobs BLOB NOT NULL, version_runs BLOB NOT NULL, loss_mask BLOB NOT NULL) STRICT""",
    "snapshots": """(run INTEGER NOT NULL REFERENCES runs (id), version INTEGER NOT NULL, step INTEGER NOT NULL,
    path TEXT NOT NULL, manifest_sha256 TEXT NOT NULL, bytes INTEGER NOT NULL, announced_at REAL NOT NULL,
    address TEXT, PRIMARY KEY (run, version)) STRICT""",
    "reference_logprobs": """(trajectory INTEGER NOT NULL REFERENCES trajectory_rows (id), reference TEXT NOT NULL,
    logprob REAL NOT NULL, PRIMARY KEY (trajectory, reference)) STRICT""",
}
# Each table with its columns, and the SELECT that reads them from the old table.
_REBUILT = {
    "senders": (
        """(id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES runs (id), sender TEXT NOT NULL,
    role TEXT NOT NULL, host TEXT, pid INTEGER, trajectories INTEGER NOT NULL DEFAULT 0,
    errors INTEGER NOT NULL DEFAULT 0, response_tokens INTEGER NOT NULL DEFAULT 0, reward_sum REAL NOT NULL DEFAULT 0.0,
    first_received_at REAL, last_received_at REAL) STRICT""",
        "SELECT id, run, sender, role, host, pid, 0, 0, 0, 0.0, NULL, NULL FROM senders",
    ),
    "visits": (
        """(id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES runs (id), epoch INTEGER NOT NULL,
    place INTEGER NOT NULL, prompt INTEGER NOT NULL REFERENCES prompts (id), sender INTEGER REFERENCES senders (id),
    leased_at REAL NOT NULL, done_at REAL) STRICT""",
        "SELECT v.id, v.run, v.epoch, v.place, v.prompt, s.id, v.leased_at, v.done_at"
        " FROM visits v LEFT JOIN senders s ON s.sender = v.sender",
    ),
    # `newest_trajectory` is a bound, not a reference: that trajectory may belong to another run, or be pruned.
    "batches": (
        """(id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES runs (id), step INTEGER NOT NULL,
    prompts INTEGER NOT NULL, samples INTEGER NOT NULL, handed_out_at REAL NOT NULL, trained_at REAL, metrics TEXT,
    newest_trajectory INTEGER, recency_window INTEGER NOT NULL DEFAULT 0, recency_groups INTEGER NOT NULL DEFAULT 0,
    recency_missed INTEGER NOT NULL DEFAULT 0, trajectories INTEGER, min_staleness INTEGER, mean_staleness REAL,
    max_staleness INTEGER, mean_age_seconds REAL, max_age_seconds REAL, mean_reward REAL, UNIQUE (run, step)) STRICT""",
        "SELECT rowid, *, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM batches",
    ),
    "consumption_rows": (
        """(batch INTEGER NOT NULL REFERENCES batches (id), slot INTEGER NOT NULL,
    trajectory INTEGER NOT NULL REFERENCES trajectory_rows (id), staleness INTEGER NOT NULL,
    PRIMARY KEY (batch, slot)) STRICT""",
        "SELECT b.id, c.slot, c.trajectory, c.staleness"
        " FROM consumption_rows c JOIN batches b ON b.run = c.run AND b.step = c.step ORDER BY c.rowid",
    ),
}
# A batch never changes, so what its rows say about it is stored with it: a view that read them would take milliseconds
# for each batch.
SUMMARY = "trajectories, min_staleness, mean_staleness, max_staleness, mean_age_seconds, max_age_seconds, mean_reward"
SUMMARISE_BATCHES = f"""
UPDATE batches SET ({SUMMARY}) =
    (SELECT COUNT(DISTINCT c.trajectory), MIN(c.staleness), AVG(c.staleness), MAX(c.staleness),
            AVG(handed_out_at - t.received_at), MAX(handed_out_at - t.received_at), AVG(t.reward)
     FROM consumption_rows c LEFT JOIN trajectory_rows t ON t.id = c.trajectory WHERE c.batch = batches.id)
"""  # noqa: S608
# The store counts further ones as it writes them.
_COUNT_DELIVERED = """
UPDATE senders SET (trajectories, errors, response_tokens, reward_sum, first_received_at, last_received_at) =
    (SELECT COUNT(*), COUNT(t.error), COALESCE(SUM(t.response_tokens), 0),
            COALESCE(SUM(CASE WHEN t.error IS NULL THEN t.reward END), 0.0), MIN(t.received_at), MAX(t.received_at)
     FROM trajectory_rows t WHERE t.sender = senders.id)
"""
_INDEXES = (
    "CREATE UNIQUE INDEX idx_senders_sender ON senders (sender)",
    "CREATE UNIQUE INDEX idx_visits_run_epoch_place ON visits (run, epoch, place)",
    "CREATE INDEX visits_open ON visits (run) WHERE done_at IS NULL",
    "CREATE INDEX idx_consumption_trajectory ON consumption_rows (trajectory)",
)


def declare_references(db: Database) -> None:
    """Apply the migration, in the transaction of the caller. Ids of rows do not change."""
    for view in db.view_names():
        db.execute(f"DROP VIEW {view}")
    # 0 meant "none". Others were of a newer copy of the file, from which this one was restored.
    db.execute("UPDATE trajectory_rows SET visit = NULL WHERE visit NOT IN (SELECT id FROM visits)")
    for table, (columns, old_rows) in _REBUILT.items():
        # Not the other way round: SQLite would let references to the table follow the old one to its new name.
        db.execute(f"CREATE TABLE new_{table} {columns}")
        db.execute(f"INSERT INTO new_{table} {old_rows}")
        db.execute(f"DROP TABLE {table}")
        db.execute(f"ALTER TABLE new_{table} RENAME TO {table}")
    _redeclare(db)
    db.execute(SUMMARISE_BATCHES)
    db.execute(_COUNT_DELIVERED)
    for statement in (*_INDEXES, *VIEWS):
        db.execute(statement)


def _redeclare(db: Database) -> None:
    """Replace declarations of tables, as https://www.sqlite.org/lang_altertable.html describes in section 7."""
    (version,) = db.execute("PRAGMA schema_version").fetchone()
    db.execute("PRAGMA writable_schema = ON")
    try:
        for table, columns in _REDECLARED.items():
            statement = "UPDATE sqlite_master SET sql = ? WHERE type = 'table' AND name = ?"
            db.execute(statement, [f"CREATE TABLE {table} {columns}", table])
        # All connections, this one included, read the schema again.
        db.execute(f"PRAGMA schema_version = {version + 1}")
    finally:
        db.execute("PRAGMA writable_schema = OFF")
