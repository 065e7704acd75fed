"""Check a buffer file: SQLite's integrity check, and the invariants of tba's tables.

The result of a check is `ok`, `fail`, or `note`, which is information, not an error.
"""

import sqlite3
from pathlib import Path
from typing import Any

from tba.buffer.store.archives import ArchiveFile
from tba.buffer.store.reader import open_reader
from tba.common.errors import MissingExtra, StorageError, UsageError
from tba.common.wire.trajectory import ARRAY_KINDS, LOG_RATIO_DTYPE

_SHOWN = 5
_UNITS = {kind.name: kind.unit_bytes for kind in ARRAY_KINDS}

# Each query selects the violations of a rule. Its columns locate them. The name of a rule says what is so if it holds.
_RULES = {
    "every trajectory has its tokens": (
        "SELECT id FROM trajectory_rows WHERE compacted_at IS NULL AND id NOT IN (SELECT trajectory FROM payloads)"
    ),
    "compacted trajectories have no tokens": (
        "SELECT id FROM trajectory_rows WHERE compacted_at IS NOT NULL"
        " AND (id IN (SELECT trajectory FROM payloads) OR id IN (SELECT trajectory FROM kept_tokens))"
    ),
    "archived trajectories are compacted": (
        "SELECT id FROM trajectory_rows WHERE archive IS NOT NULL AND compacted_at IS NULL"
    ),
    "token counts match the stored arrays": (
        "SELECT t.id FROM trajectory_rows t JOIN payloads y ON y.trajectory = t.id"
        f" WHERE LENGTH(y.prompt_ids) != {_UNITS['prompt_ids']} * t.prompt_tokens"
        f" OR LENGTH(y.response_ids) != {_UNITS['response_ids']} * t.response_tokens"
        f" OR LENGTH(y.logprobs) != {_UNITS['logprobs']} * t.response_tokens"
    ),
    "the turns of an episode follow each other in its response": (
        "SELECT trajectory, turn FROM (SELECT u.trajectory, u.turn, u.start + u.tokens AS stop, t.response_tokens,"
        " LEAD(u.start, 1, t.response_tokens) OVER (PARTITION BY u.trajectory ORDER BY u.turn) AS next"
        " FROM turns u JOIN trajectory_rows t ON t.id = u.trajectory) WHERE stop > next OR stop > response_tokens"
    ),
    "exactly the errors have a kind": "SELECT id FROM trajectory_rows WHERE (error IS NULL) != (error_kind IS NULL)",
    "one log-ratio per token": (
        "SELECT c.trajectory FROM consumption_rows c JOIN trajectory_rows t ON t.id = c.trajectory"
        f" WHERE LENGTH(c.token_log_ratios) != {LOG_RATIO_DTYPE.itemsize} * t.response_tokens"
    ),
    "a trajectory and its prompt belong to the same run": (
        "SELECT t.id FROM trajectory_rows t JOIN prompts p ON p.id = t.prompt WHERE p.run != t.run"
    ),
    "every policy version was announced": (
        "SELECT t.id FROM trajectory_rows t WHERE t.policy_version >= 0"
        " AND NOT EXISTS (SELECT 1 FROM snapshots n WHERE n.run = t.run AND n.version = t.policy_version)"
    ),
    "each batch has prompts × samples slots": (
        "SELECT b.step FROM batches b WHERE b.prompts * b.samples !="
        " (SELECT COUNT(*) FROM consumption_rows c WHERE c.batch = b.id)"
    ),
    "every done visit has a trajectory": (
        "SELECT v.id FROM visits v JOIN runs r ON r.id = v.run WHERE v.done_at IS NOT NULL AND r.pruned = 0"
        " AND NOT EXISTS (SELECT 1 FROM trajectory_rows t WHERE t.prompt = v.prompt AND t.visit = v.id)"
    ),
    "positions in an epoch have no gaps": (
        "SELECT epoch, COUNT(*) FROM visits GROUP BY run, epoch HAVING MAX(place) + 1 != COUNT(*)"
    ),
    "a prompt occurs at most once per epoch": (
        "SELECT epoch, prompt FROM visits GROUP BY run, epoch, prompt HAVING COUNT(*) > 1"
    ),
    "past epochs are complete": (
        "SELECT v.epoch, COUNT(*), r.prompts FROM visits v JOIN runs r ON r.id = v.run"
        " WHERE v.epoch < (SELECT MAX(w.epoch) FROM visits w WHERE w.run = v.run)"
        " GROUP BY v.run, v.epoch HAVING COUNT(*) != r.prompts - (SELECT COUNT(*) FROM curriculum_rows c"
        " WHERE c.run = v.run AND c.epoch = v.epoch AND c.decision = 'skipped')"
    ),
}
_ARCHIVES = "the files of the archive are there"
_REFERENCES = "every reference leads to a row"
# The trajectories of an offline run are in another file.
_NEED_TRAJECTORIES = {"consumption_rows", "reference_logprobs"}
_RECORDED_FILE = "SELECT json_extract(config, '$.offline.file') FROM starts ORDER BY id LIMIT 1"
# Not faults. A database that was restored from a backup lacks the steps since then, a pruned one those before.
# A killed searcher has numbered trajectories that it never delivered, and an import leaves out those without tokens.
_NOTES = {
    "steps have no gaps": (
        "SELECT 'step ' || (b.step - 1) || ' is missing' FROM batches b JOIN runs r ON r.id = b.run WHERE b.step > 0"
        " AND NOT EXISTS (SELECT 1 FROM batches a WHERE a.run = b.run AND a.step = b.step - 1)"
        " AND (r.pruned_slots = 0 OR b.step > (SELECT MIN(f.step) FROM batches f WHERE f.run = b.run))"
    ),
    "sequence numbers have no gaps": (
        "SELECT s.sender || ': ' || (MAX(t.sequence) - MIN(t.sequence) + 1 - COUNT(*)) || ' missing'"
        " FROM trajectory_rows t JOIN senders s ON s.id = t.sender GROUP BY t.sender"
        " HAVING MAX(t.sequence) - MIN(t.sequence) + 1 > COUNT(*)"
    ),
}


def check(path: Path, *, quick: bool = False) -> list[dict[str, str]]:
    """Return (check, result, detail) rows. `quick` leaves out indexes' comparison with tables, and the archive's files.

    Raises UsageError if there is no file, StorageError if it cannot be read or has an unknown schema.
    """
    with open_reader(path) as connection:
        # All checks see the same snapshot of the database.
        connection.execute("BEGIN")
        pragma = "quick_check" if quick else "integrity_check"
        found, error = _select(connection, f"PRAGMA {pragma}({_SHOWN})")
        wrong = [error] if error else [text for (text,) in found if text != "ok"]
        findings = [_finding(pragma.replace("_", " "), "fail" if wrong else "ok", "; ".join(wrong) or "ok")]
        offline: set[str] = set()
        # If the file is damaged, the rules report it.
        starts, _ = _select(connection, _RECORDED_FILE)
        if starts and (source := starts[0][0]):
            findings.append(_finding("trajectories", "note", f"an offline run: they are in {source}"))
            offline = _NEED_TRAJECTORIES
        findings.append(_references(connection, leave_out=offline))
        if not quick:
            findings.append(_archives(connection))
        findings += [_rule(connection, name, sql, "fail") for name, sql in _RULES.items()]
        return findings + [_rule(connection, name, sql, "note") for name, sql in _NOTES.items()]


def _finding(check: str, result: str, detail: str) -> dict[str, str]:
    return {"check": check, "result": result, "detail": detail}


def _select(connection: sqlite3.Connection, sql: str) -> tuple[list[Any], str]:
    """Return rows, and the error if the file is too damaged to read them: else an empty string."""
    try:
        return connection.execute(sql).fetchall(), ""
    except sqlite3.DatabaseError as error:
        return [], str(error)


def _references(connection: sqlite3.Connection, *, leave_out: set[str]) -> dict[str, str]:
    """Check all foreign keys, but those of the tables to leave out."""
    tables, error = _select(connection, "SELECT name FROM sqlite_master WHERE type = 'table'")
    # Rows such as (table, rowid, referenced table, number of the foreign key).
    dangling: list[str] = []
    for (table,) in tables:
        if error or table in leave_out:
            continue
        rows, error = _select(connection, f"PRAGMA foreign_key_check({table})")
        dangling += [f"{table} row {rowid}: no such row in {referenced}" for _, rowid, referenced, _ in rows]
    return _finding(_REFERENCES, "fail" if dangling or error else "ok", error or _shorten(dangling))


def _archives(connection: sqlite3.Connection) -> dict[str, str]:
    """Open each file of `tba buffer archive`, without reading its tokens."""
    files, error = _select(connection, "SELECT url FROM archives ORDER BY id")
    wrong = [error] if error else []
    for (url,) in files:
        try:
            ArchiveFile(url)
        except (StorageError, UsageError, MissingExtra) as failure:
            wrong.append(str(failure))
    return _finding(_ARCHIVES, "fail" if wrong else "ok", _shorten(wrong))


def _rule(connection: sqlite3.Connection, name: str, sql: str, otherwise: str) -> dict[str, str]:
    rows, error = _select(connection, f"{sql} LIMIT {_SHOWN + 1}")
    result = "fail" if error else otherwise if rows else "ok"
    return _finding(name, result, error or _shorten(["/".join(map(str, row)) for row in rows]))


def _shorten(found: list[str]) -> str:
    return ", ".join(found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
