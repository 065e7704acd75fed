"""Run a user's SQL on a buffer file: one read-only statement, whose rows are streamed."""

import contextlib
import math
import sqlite3
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from tba.buffer.store.reader import open_reader
from tba.common.errors import UsageError

# An allowlist, because even a read-only connection can attach, and so create, another file.
_ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
_ALLOWED_PRAGMAS = frozenset({"table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo"})
_DENIED_FUNCTIONS = frozenset({"load_extension", "writefile", "edit"})
_STATEMENT_ERRORS = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_RANGE)
# One instruction may make a value of megabytes: few, so that a limit on seconds holds.
_PROGRESS_INSTRUCTIONS = 100
_HINT = (
    ": docs/database.md lists the views (trajectories, groups, consumption, staleness, clients, evaluations, "
    "held_out, waste, lengths, curriculum) and tables"
)


@contextlib.contextmanager
def query(path: Path, sql: str, parameters: Sequence[Any] = ()) -> Iterator[tuple[list[str], sqlite3.Cursor]]:
    """Run one statement that reads: yield its column headings, and its rows, which are read when requested.

    Raises UsageError with SQLite's message if the statement is wrong, or if it would write.
    """
    with open_reader(path) as connection, reading_only(connection):
        cursor = connection.execute(sql, parameters)
        if cursor.description is None:
            raise UsageError("the statement returns no rows: a query is one SELECT")
        yield [column[0] for column in cursor.description], cursor


@contextlib.contextmanager
def reading_only(
    connection: sqlite3.Connection, *, seconds: float = math.inf, denied: Collection[str] = ()
) -> Iterator[None]:
    """Restrict a connection to statements that read, for at most some seconds, without the functions in `denied`.

    Raises UsageError with one sentence for a wrong statement, or for one that takes longer.
    """
    refused, deadline = False, time.monotonic() + seconds

    # SQLite calls it for every action of a statement, before the statement runs.
    def authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
        nonlocal refused
        if action == sqlite3.SQLITE_FUNCTION and second in denied:
            # SQLite's message names the function.
            return sqlite3.SQLITE_DENY
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
    connection.set_progress_handler(lambda: time.monotonic() > deadline, _PROGRESS_INSTRUCTIONS)
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
        # The second is that of a function of the connection which has looked at its time.
        if code in (sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_ERROR) and time.monotonic() > deadline:
            raise UsageError(f"the query takes longer than {seconds:g} s: read fewer rows") from error
        # SQLite's error for an exception in the progress handler, such as a Ctrl-C.
        if code == sqlite3.SQLITE_INTERRUPT:
            raise KeyboardInterrupt from error
        if code in _STATEMENT_ERRORS:
            unknown = str(error).startswith(("no such table", "no such column"))
            raise UsageError(f"SQL: {error}{_HINT if unknown else ''}") from error
        raise
