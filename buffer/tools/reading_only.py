"""Restrict a connection to statements that read. Imported by the process of a query, so it imports little."""

import contextlib
import sqlite3
from collections.abc import Iterator

from tba.common.errors import UsageError

# An allowlist, because even a read-only connection can attach, and so create, another file.
_ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
_ALLOWED_PRAGMAS = frozenset({"table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo"})
_DENIED_FUNCTIONS = frozenset({"load_extension", "writefile", "edit"})
_STATEMENT_ERRORS = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_RANGE)
_PROGRESS_INSTRUCTIONS = 1000
_HINT = (
    ": docs/database.md lists the views (trajectories, groups, consumption, staleness, clients, evaluations, "
    "held_out, waste, lengths, curriculum) and tables"
)


@contextlib.contextmanager
def reading_only(connection: sqlite3.Connection) -> Iterator[None]:
    """Restrict a connection to statements that read. Raises UsageError with one sentence for a wrong statement."""
    refused = False

    # SQLite calls it for every action of a statement, before the statement runs.
    def authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
        nonlocal refused
        if action in _ALLOWED and second not in _DENIED_FUNCTIONS:
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_PRAGMA and first in _ALLOWED_PRAGMAS:
            return sqlite3.SQLITE_OK
        refused = True
        return sqlite3.SQLITE_DENY

    # At their first use SQLite asks for permission to change the schema.
    connection.execute("SELECT 1 FROM json_each('[]'), json_tree('[]')").close()
    connection.set_authorizer(authorize)
    # Python handles Ctrl-C in this callback, even while a statement runs for minutes.
    connection.set_progress_handler(lambda: 0, _PROGRESS_INSTRUCTIONS)
    try:
        yield
    # Python 3.11 raises Warning for several statements at once.
    except sqlite3.Warning as error:
        raise UsageError("one statement at a time") from error
    except sqlite3.DatabaseError as error:
        # SQLite refuses to change a view before it asks.
        if refused or "readonly" in str(error) or "because it is a view" in str(error):
            raise UsageError(
                "a query only reads: writing, ATTACH and most PRAGMAs are refused; to change a file, stop "
                "its server and use another SQLite client on a copy"
            ) from error
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        # SQLite's error for an exception in the progress handler, such as a Ctrl-C.
        if code == sqlite3.SQLITE_INTERRUPT:
            raise KeyboardInterrupt from error
        if code in _STATEMENT_ERRORS:
            unknown = str(error).startswith(("no such table", "no such column"))
            raise UsageError(f"SQL: {error}{_HINT if unknown else ''}") from error
        raise
