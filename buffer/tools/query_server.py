"""The query server: answers SQL from other machines, in a process of its own next to the buffer's.

It opens the file as any reader does and runs one query at a time, so the most that queries can take from a run is the
CPU time of one process of low priority. Time, rows, bytes and memory of a query are limited.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from tba.buffer.tools.limited_query import limit_memory, query_limited
from tba.common.errors import StorageError, UsageError, WireError
from tba.common.log import get_logger
from tba.common.wire.addresses import is_private
from tba.common.wire.channels import Peer, ServerChannel
from tba.common.wire.codec import QUERY_REQUESTS, Frames, decode_request, encode_plain_reply, request_id_of
from tba.common.wire.keys import KeyRole, ServerKeys
from tba.common.wire.messages import Failure
from tba.common.wire.query_messages import QueryResult, RunQuery

log = get_logger(__name__)

_POLL_SECONDS = 0.5
_MAY_QUERY: tuple[KeyRole, ...] = ("monitor",)
# Added to the priority number of the process: queries yield to the buffer, searchers and trainer.
_NICE = 10
# Connections whose queries are read before they are answered.
_MOST_WAITING = 1024
# Replies that may wait for one client.
_UNSENT = 2


def serve_queries(
    path: Path, address: str, stop: Callable[[], bool], *, seconds: float, keys: ServerKeys | None
) -> None:
    """Answer queries over a database until `stop()`, each within some seconds.

    Raises AddressInUse, ConfigError for an address that cannot be bound, UsageError or StorageError for a file that is
    not a buffer database.
    """
    limit_memory(path)
    with contextlib.closing(ServerChannel(address, setting="ADDRESS", unsent=_UNSENT, keys=keys)) as channel:
        os.nice(_NICE)
        log.info("answering queries", address=channel.address, database=str(path))
        if keys is None and not is_private(channel.address):
            log.warning("every client that reaches the address may read the database: security.insecure is set")
        # The newest query of each connection: it may have given up the ones before.
        waiting: dict[Peer, list[memoryview]] = {}
        while not stop():
            waiting.update(channel.receive(0.0 if waiting else _POLL_SECONDS, _MOST_WAITING - len(waiting)))
            if not waiting:
                continue
            peer = next(iter(waiting))
            frames = waiting.pop(peer)
            if refusal := keys.refusal(peer.key, _MAY_QUERY) if keys else "":
                log.warning("query refused", by=peer.address, reason=refusal)
                failure = Failure(code="not_allowed", message=refusal)
                channel.send(peer, encode_plain_reply(failure, id=request_id_of(frames), run=""))
            else:
                channel.send(peer, answer(path, frames, seconds=seconds))


def answer(path: Path, frames: list[memoryview], *, seconds: float) -> Frames:
    """Return the reply to a request."""
    try:
        request = decode_request(frames, QUERY_REQUESTS)
    except WireError as error:
        return encode_plain_reply(Failure(code=error.code, message=str(error)[:4000]), id=request_id_of(frames), run="")
    assert isinstance(request.message, RunQuery)
    reply: QueryResult | Failure
    try:
        reply = query_limited(path, request.message.sql, rows=request.message.limit, seconds=seconds)
    except (UsageError, StorageError, MemoryError) as error:
        reply = Failure(code="query", message=(str(error) or "the query needs too much memory")[:4000])
    return encode_plain_reply(reply, id=request.header.id, run=request.header.run)
