"""Whether a buffer file is sound: SQLite's own check, and what tba promises of its tables.

A finding is `ok`, `fail`, or `note`: something to know that is not wrong.
"""

import sqlite3
from pathlib import Path
from typing import Any

from tba.buffer.reader import applied_migrations, open_reader
from tba.buffer.schema import schema_names
from tba.common.trajectory import ARRAY_KINDS

_SHOWN = 5
_UNITS = {kind.name: kind.unit_bytes for kind in ARRAY_KINDS}

# Each selects what is wrong: one row per finding, its first columns say where.
_RULES = {
    "payload without trajectory": (
        "SELECT trajectory FROM payloads y WHERE NOT EXISTS (SELECT 1 FROM trajectory_rows t WHERE t.id = y.trajectory)"
    ),
    "trajectory without payload": (
        "SELECT id FROM trajectory_rows t WHERE compacted_at IS NULL"
        " AND NOT EXISTS (SELECT 1 FROM payloads y WHERE y.trajectory = t.id)"
    ),
    "compacted with payload": (
        "SELECT id FROM trajectory_rows t WHERE compacted_at IS NOT NULL"
        " AND EXISTS (SELECT 1 FROM payloads y WHERE y.trajectory = t.id)"
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
    "prompt once in an epoch": ("SELECT epoch, prompt FROM visits GROUP BY run, epoch, prompt HAVING COUNT(*) > 1"),
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
# The trajectories of an offline run are those of another file.
_NEED_TRAJECTORIES = {"consumption without trajectory", "reference of unknown trajectory"}
_RECORDED_FILE = "SELECT json_extract(config, '$.offline.file') FROM starts ORDER BY id LIMIT 1"
# A searcher that was killed had numbered what it never delivered, and an import leaves out what has no tokens.
_GAPS = (
    "SELECT s.sender, MAX(t.sequence) - MIN(t.sequence) + 1 - COUNT(*) AS missing FROM trajectory_rows t"
    " JOIN senders s ON s.id = t.sender GROUP BY t.sender HAVING missing > 0"
)


def check(path: Path, *, quick: bool = False) -> list[dict[str, str]]:
    """One row per check: check, result, detail. `quick` leaves out the comparison of indexes with their tables.

    Raises UsageError if there is no file, StorageError if it cannot be read or is of a newer release.
    """
    with open_reader(path, any_schema=True) as connection:
        connection.execute("BEGIN")  # all of it is about one moment
        findings = [_schema(connection), _integrity(connection, quick=quick)]
        if findings[0]["result"] != "ok":
            return findings
        rules = _RULES
        if source := _recorded_file(connection):
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
    try:
        said = [row[0] for row in connection.execute(f"PRAGMA {pragma}({_SHOWN})")]
    except sqlite3.DatabaseError as error:
        said = [str(error)]
    return _finding(pragma.replace("_", " "), "ok" if said == ["ok"] else "fail", "; ".join(said))


def _recorded_file(connection: sqlite3.Connection) -> str | None:
    """The file that an offline run trains from; None for the database of a server."""
    try:
        row = connection.execute(_RECORDED_FILE).fetchone()
    except sqlite3.DatabaseError:  # a damaged file: the rules will say more
        return None
    return row[0] if row else None


def _rule(connection: sqlite3.Connection, name: str, sql: str) -> dict[str, str]:
    try:
        rows: list[Any] = connection.execute(f"{sql} LIMIT {_SHOWN + 1}").fetchall()
    except sqlite3.DatabaseError as error:
        return _finding(name, "fail", str(error))
    shown = ", ".join("/".join(map(str, row)) for row in rows[:_SHOWN])
    return _finding(name, "fail" if rows else "ok", shown + (", ..." if len(rows) > _SHOWN else ""))


def _gaps(connection: sqlite3.Connection) -> dict[str, str]:
    try:
        rows = connection.execute(_GAPS).fetchall()
    except sqlite3.DatabaseError as error:
        return _finding("numbers without a gap", "fail", str(error))
    detail = ", ".join(f"{sender}: {missing} missing" for sender, missing in rows)
    return _finding("numbers without a gap", "note" if rows else "ok", detail)
