"""The query server: answers SQL from other machines, in a process of its own next to the buffer's.

It opens the file as any reader does and runs one query at a time, so the most that queries can take from a run is the
CPU time of one process of low priority. Time, rows, bytes and memory of a query are limited.
"""

import contextlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tba.buffer.store.reader import open_reader
from tba.buffer.tools.query import reading_only
from tba.common.errors import StorageError, UsageError, WireError
from tba.common.log import get_logger
from tba.common.wire.channels import ServerChannel
from tba.common.wire.codec import QUERY_REQUESTS, Frames, decode_request, encode_file_reply, request_id_of
from tba.common.wire.messages import Failure
from tba.common.wire.query_messages import MAX_QUERY_BYTES, QueryResult, RunQuery

log = get_logger(__name__)

_POLL_SECONDS = 0.5
# Added to the priority number of the process: queries yield to the buffer, searchers and trainer.
_NICE = 10
# Replies that may wait for one client.
_UNSENT = 2
_HEAP_BYTES = 256 << 20
_VALUE_BYTES = 4 << 20
# A pattern such as %a%a%a... takes time proportional to a power of the text, without a chance to interrupt it.
_PATTERN_BYTES = 100
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: _VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: _PATTERN_BYTES,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
# Of a value on the wire, in addition to the bytes of a text or a blob.
_VALUE_HEADER_BYTES = 9


def serve_queries(path: Path, address: str, stop: Callable[[], bool], *, seconds: float) -> None:
    """Answer queries over a database until `stop()`, each within some seconds.

    Raises AddressInUse, ConfigError for an address that cannot be bound, UsageError or StorageError for a file that is
    not a buffer database.
    """
    with open_reader(path) as connection:
        # It holds for the process.
        connection.execute(f"PRAGMA hard_heap_limit = {_HEAP_BYTES}")
    with contextlib.closing(ServerChannel(address, setting="ADDRESS", unsent=_UNSENT)) as channel:
        os.nice(_NICE)
        log.info("answering queries", address=channel.address, database=str(path))
        if not channel.is_local:
            log.warning("the address is reachable from other machines, and everybody there may read the database")
        while not stop():
            for peer, frames in channel.receive(_POLL_SECONDS, 1):
                channel.send(peer, answer(path, frames, seconds=seconds))


def answer(path: Path, frames: list[memoryview], *, seconds: float) -> Frames:
    """Return the reply to a request."""
    try:
        request = decode_request(frames, QUERY_REQUESTS)
    except WireError as error:
        return encode_file_reply(Failure(code=error.code, message=str(error)[:4000]), id=request_id_of(frames), run="")
    assert isinstance(request.message, RunQuery)
    reply: QueryResult | Failure
    try:
        reply = _run(path, request.message, seconds)
    except (UsageError, StorageError, MemoryError) as error:
        reply = Failure(code="query", message=(str(error) or "the query needs too much memory")[:4000])
    return encode_file_reply(reply, id=request.header.id, run=request.header.run)


def _run(path: Path, query: RunQuery, seconds: float) -> QueryResult:
    rows: list[list[Any]] = []
    size, cut = 0, ""
    with open_reader(path) as connection:
        for limit, value in _LIMITS.items():
            connection.setlimit(limit, value)
        # A sort counts as memory: on the disk it would take space from the buffer.
        connection.execute("PRAGMA temp_store = MEMORY")
        with reading_only(connection, seconds=seconds):
            cursor = connection.execute(query.sql)
            if cursor.description is None:
                raise UsageError("the statement returns no rows: a query is one SELECT")
            headings = [column[0][:200] or "?" for column in cursor.description]
            for row in cursor:
                size += sum(map(_wire_bytes, row))
                if len(rows) == query.limit:
                    cut = f"first {len(rows)} rows only"
                elif size > MAX_QUERY_BYTES:
                    cut = f"first {len(rows)} rows only: a reply has at most {MAX_QUERY_BYTES >> 20} MiB"
                if cut:
                    break
                rows.append(list(row))
    return QueryResult(headings=headings, rows=rows, cut=cut)


def _wire_bytes(value: Any) -> int:
    content = value.encode() if isinstance(value, str) else value if isinstance(value, bytes) else b""
    return _VALUE_HEADER_BYTES + len(content)
