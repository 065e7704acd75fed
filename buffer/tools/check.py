"""Check a buffer file: SQLite's integrity check, and the invariants of tba's tables.

The result of a check is `ok`, `fail`, or `note`, which is information and no error.
"""

import sqlite3
from pathlib import Path
from typing import Any

from tba.buffer.store.reader import open_reader
from tba.buffer.store.schema import applied_migrations, schema_names
from tba.common.wire.trajectory import ARRAY_KINDS

_SHOWN = 5
_UNITS = {kind.name: kind.unit_bytes for kind in ARRAY_KINDS}

# Each query selects the violations of a rule. Its columns locate them.
_RULES = {
    "payload without trajectory": (
        "SELECT trajectory FROM payloads WHERE trajectory NOT IN (SELECT id FROM trajectory_rows)"
    ),
    "trajectory without payload": (
        "SELECT id FROM trajectory_rows WHERE compacted_at IS NULL AND id NOT IN (SELECT trajectory FROM payloads)"
    ),
    "compacted with payload": (
        "SELECT id FROM trajectory_rows WHERE compacted_at IS NOT NULL AND id IN (SELECT trajectory FROM payloads)"
    ),
    "tokens as counted": (
        "SELECT t.id FROM trajectory_rows t JOIN payloads y ON y.trajectory = t.id"
        f" WHERE LENGTH(y.prompt_ids) != {_UNITS['prompt_ids']} * t.prompt_tokens"
        f" OR LENGTH(y.response_ids) != {_UNITS['response_ids']} * t.response_tokens"
        f" OR LENGTH(y.logprobs) != {_UNITS['logprobs']} * t.response_tokens"
    ),
    "trajectory of unknown origin": (
        "SELECT t.id FROM trajectory_rows t WHERE NOT EXISTS (SELECT 1 FROM runs r WHERE r.id = t.run)"
        " OR NOT EXISTS (SELECT 1 FROM prompts p WHERE p.id = t.prompt AND p.run = t.run)"
        " OR NOT EXISTS (SELECT 1 FROM senders s WHERE s.id = t.sender)"
    ),
    "policy version never announced": (
        "SELECT t.id FROM trajectory_rows t WHERE t.policy_version >= 0"
        " AND NOT EXISTS (SELECT 1 FROM snapshots n WHERE n.run = t.run AND n.version = t.policy_version)"
    ),
    "consumption without trajectory": (
        "SELECT c.step, c.slot, c.trajectory FROM consumption_rows c"
        " WHERE NOT EXISTS (SELECT 1 FROM trajectory_rows t WHERE t.id = c.trajectory)"
    ),
    "consumption without batch": (
        "SELECT c.step, c.slot FROM consumption_rows c"
        " WHERE NOT EXISTS (SELECT 1 FROM batches b WHERE b.run = c.run AND b.step = c.step)"
    ),
    "batch of the right size": (
        "SELECT b.step FROM batches b WHERE b.prompts * b.samples !="
        " (SELECT COUNT(*) FROM consumption_rows c WHERE c.run = b.run AND c.step = b.step)"
    ),
    "steps without a gap": (
        "SELECT b.step FROM batches b WHERE b.step > 0"
        " AND NOT EXISTS (SELECT 1 FROM batches a WHERE a.run = b.run AND a.step = b.step - 1)"
    ),
    "done visit without trajectory": (
        "SELECT v.id FROM visits v WHERE v.done_at IS NOT NULL"
        " AND NOT EXISTS (SELECT 1 FROM trajectory_rows t WHERE t.prompt = v.prompt AND t.visit = v.id)"
    ),
    "places of an epoch without a gap": (
        "SELECT epoch, COUNT(*) FROM visits GROUP BY run, epoch HAVING MAX(place) + 1 != COUNT(*)"
    ),
    "prompt once in an epoch": "SELECT epoch, prompt FROM visits GROUP BY run, epoch, prompt HAVING COUNT(*) > 1",
    "past epochs complete": (
        "SELECT v.epoch, COUNT(*), r.prompts FROM visits v JOIN runs r ON r.id = v.run"
        " WHERE v.epoch < (SELECT MAX(w.epoch) FROM visits w WHERE w.run = v.run)"
        " GROUP BY v.run, v.epoch HAVING COUNT(*) != r.prompts"
    ),
    "reference of unknown trajectory": (
        "SELECT f.trajectory FROM reference_logprobs f"
        " WHERE NOT EXISTS (SELECT 1 FROM trajectory_rows t WHERE t.id = f.trajectory)"
    ),
}
# The trajectories of an offline run are in another file.
_NEED_TRAJECTORIES = {"consumption without trajectory", "reference of unknown trajectory"}
_RECORDED_FILE = "SELECT json_extract(config, '$.offline.file') FROM starts ORDER BY id LIMIT 1"
# Gaps are legitimate: a killed searcher has numbered trajectories that it never delivered, and an import leaves out
# those without tokens.
_GAPS = (
    "SELECT s.sender, MAX(t.sequence) - MIN(t.sequence) + 1 - COUNT(*) AS missing FROM trajectory_rows t"
    " JOIN senders s ON s.id = t.sender GROUP BY t.sender HAVING missing > 0"
)


def check(path: Path, *, quick: bool = False) -> list[dict[str, str]]:
    """Return (check, result, detail) rows. `quick` leaves out the comparison of indexes with their tables.

    Raises UsageError if there is no file, StorageError if it cannot be read or has an unknown schema.
    """
    with open_reader(path, any_schema=True) as connection:
        # All checks see the same snapshot of the database.
        connection.execute("BEGIN")
        findings = [_schema(connection), _integrity(connection, quick=quick)]
        if findings[0]["result"] != "ok":
            return findings
        rules = _RULES
        # If the file is damaged, the rules report it.
        starts, _ = _select(connection, _RECORDED_FILE)
        if starts and (source := starts[0][0]):
            findings.append(_finding("trajectories", "note", f"an offline run: they are in {source}"))
            rules = {name: sql for name, sql in _RULES.items() if name not in _NEED_TRAJECTORIES}
        findings += [_rule(connection, name, sql) for name, sql in rules.items()]
        return [*findings, _gaps(connection)]


def _finding(check: str, result: str, detail: str) -> dict[str, str]:
    return {"check": check, "result": result, "detail": detail}


def _schema(connection: sqlite3.Connection) -> dict[str, str]:
    applied = applied_migrations(connection)
    newest = max(applied)
    if missing := [name for name in schema_names() if name not in applied]:
        detail = f"{newest}; without {missing[0]} the tables are not checked: run `tba buffer migrate` first"
        return _finding("schema", "note", detail)
    return _finding("schema", "ok", newest)


def _integrity(connection: sqlite3.Connection, *, quick: bool) -> dict[str, str]:
    pragma = "quick_check" if quick else "integrity_check"
    rows, error = _select(connection, f"PRAGMA {pragma}({_SHOWN})")
    found = [error] if error else [row[0] for row in rows]
    return _finding(pragma.replace("_", " "), "ok" if found == ["ok"] else "fail", "; ".join(found))


def _select(connection: sqlite3.Connection, sql: str) -> tuple[list[Any], str]:
    """Return rows, and the error if the file is too damaged to read them: else an empty string."""
    try:
        return connection.execute(sql).fetchall(), ""
    except sqlite3.DatabaseError as error:
        return [], str(error)


def _rule(connection: sqlite3.Connection, name: str, sql: str) -> dict[str, str]:
    rows, error = _select(connection, f"{sql} LIMIT {_SHOWN + 1}")
    shown = error or ", ".join("/".join(map(str, row)) for row in rows[:_SHOWN])
    return _finding(name, "fail" if rows or error else "ok", shown + (", ..." if len(rows) > _SHOWN else ""))


def _gaps(connection: sqlite3.Connection) -> dict[str, str]:
    rows, error = _select(connection, _GAPS)
    detail = error or ", ".join(f"{sender}: {missing} missing" for sender, missing in rows)
    return _finding("numbers without a gap", "fail" if error else "note" if rows else "ok", detail)
