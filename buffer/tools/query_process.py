"""The process of one query: `python -m ... URI ROWS SECONDS`, with the statement on standard input.

It writes a QueryResult, or a sentence and exits with `REFUSED`. It imports little, so that it starts in a tenth of a
second; the schema of the file has been checked.
"""

import contextlib
import resource
import signal
import sqlite3
import sys
from typing import Any

import msgspec

from tba.buffer.tools.reading_only import reading_only
from tba.common.errors import UsageError
from tba.common.quantity import quantity
from tba.common.wire.query_messages import MAX_QUERY_BYTES, QueryResult

REFUSED = 3
LIMIT_HEAP = f"PRAGMA hard_heap_limit = {256 << 20}"
_ADDRESS_BYTES = 1 << 30
_VALUE_BYTES = 4 << 20
_BUSY_SECONDS = 10.0
# Of a value on the wire, in addition to the bytes of a text or a blob.
_VALUE_HEADER_BYTES = 9


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
            headings = [column[0][:200] or "?" for column in cursor.description]
            for row in cursor:
                size += sum(map(_wire_bytes, row))
                if len(found) == rows:
                    cut = f"first {quantity(len(found), 'row')} only"
                elif size > MAX_QUERY_BYTES:
                    cut = f"first {quantity(len(found), 'row')} only: a reply has at most {MAX_QUERY_BYTES >> 20} MiB"
                if cut:
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


def _wire_bytes(value: Any) -> int:
    content = value.encode() if isinstance(value, str) else value if isinstance(value, bytes) else b""
    return _VALUE_HEADER_BYTES + len(content)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
