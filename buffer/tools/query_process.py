"""The process of one query: `python -m ... URI ROWS SECONDS`, with the statement on standard input.

It writes a QueryResult, or a sentence and exits with `REFUSED`. It imports little, so that it starts in a tenth of a
second; the schema of the file has been checked.
"""

import contextlib
import resource
import signal
import sqlite3
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from tba.common.errors import UsageError, quantity

REFUSED = 3
MAX_QUERY_ROWS = 10_000
_MAX_RESULT_BYTES = 8 << 20
LIMIT_HEAP = f"PRAGMA hard_heap_limit = {256 << 20}"
_ADDRESS_BYTES = 1 << 30
_VALUE_BYTES = 4 << 20
_BUSY_SECONDS = 10.0
# Bytes of a value in the result in addition to those of a text or a blob.
_VALUE_HEADER_BYTES = 9
# An allowlist, because even a read-only connection can attach, and so create, another file.
_ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
_ALLOWED_PRAGMAS = frozenset({"table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo"})
_DENIED_FUNCTIONS = frozenset({"load_extension", "writefile", "edit"})
_STATEMENT_ERRORS = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_RANGE)
_PROGRESS_INSTRUCTIONS = 1000
_HINT = (
    ": docs/database.md lists the views (trajectories, turns, groups, consumption, staleness, clients, evaluations, "
    "held_out, waste, lengths, curriculum) and tables"
)


class QueryResult(msgspec.Struct, frozen=True):
    """Rows of null, integers, floats, strings and bytes. `cut` says why there are no more; "" if these are all."""

    headings: list[str]
    rows: list[list[Any]]
    cut: str


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


def _main(uri: str, rows: int, seconds: float) -> int:
    sql = sys.stdin.buffer.read().decode()
    try:
        answer = msgspec.msgpack.encode(_read(uri, sql, rows, seconds))
    except (UsageError, sqlite3.Error, MemoryError) as error:
        sys.stdout.buffer.write((str(error) or "the query needs too much memory").encode())
        return REFUSED
    sys.stdout.buffer.write(answer)
    return 0


def _read(uri: str, sql: str, rows: int, seconds: float) -> QueryResult:
    found: list[list[Any]] = []
    size, cut = 0, ""
    with contextlib.closing(
        sqlite3.connect(f"{uri}?mode=ro", uri=True, isolation_level=None, timeout=_BUSY_SECONDS)
    ) as connection:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _VALUE_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0)
        connection.execute(LIMIT_HEAP)
        # A sort counts as memory: on the disk it would take space from the buffer.
        connection.execute("PRAGMA temp_store = MEMORY")
        _limit_process(seconds)
        with reading_only(connection):
            cursor = connection.execute(sql)
            if cursor.description is None:
                raise UsageError("the statement returns no rows: a query is one SELECT")
            headings = [column[0][:200] for column in cursor.description]
            for row in cursor:
                size += sum(map(_encoded_bytes, row))
                if len(found) == rows or size > _MAX_RESULT_BYTES:
                    why = "" if len(found) == rows else f": a result has at most {_MAX_RESULT_BYTES >> 20} MiB"
                    cut = f"first {quantity(len(found), 'row')} only{why}"
                    break
                found.append(list(row))
    return QueryResult(headings=headings, rows=found, cut=cut)


def _limit_process(seconds: float) -> None:
    """Have the system end this process after some seconds, which the default action of both signals does at once."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_seconds = int(used.ru_utime + used.ru_stime + seconds) + 1
    limits = {resource.RLIMIT_CPU: cpu_seconds, resource.RLIMIT_AS: _ADDRESS_BYTES, resource.RLIMIT_CORE: 0}
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


def _encoded_bytes(value: Any) -> int:
    content = value.encode() if isinstance(value, str) else value if isinstance(value, bytes) else b""
    return _VALUE_HEADER_BYTES + len(content)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
