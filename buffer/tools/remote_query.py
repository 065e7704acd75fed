"""Ask a query server (`tba buffer serve-queries`) on another machine."""

import contextlib
import time
import uuid

from tba.common.errors import BufferUnavailable, Refused, UsageError, WireError
from tba.common.wire.channels import ClientChannel
from tba.common.wire.codec import QUERY_REPLIES, decode_plain_reply, encode_request
from tba.common.wire.keys import ClientKeys
from tba.common.wire.messages import Failure
from tba.common.wire.query_messages import MAX_QUERY_ROWS, QueryResult, RunQuery

_POLL_SECONDS = 0.2
_PATIENCE_SECONDS = 60.0
_NO_QUERY_SERVER = "name the address of a `tba buffer serve-queries`, which is not buffer.address"


def remote_query(address: str, sql: str, *, limit: int, keys: ClientKeys | None) -> QueryResult:
    """Return the result of one SELECT; `limit` 0 stands for as many rows as the server gives.

    Raises UsageError if the statement is refused, BufferUnavailable without a reply in time, Refused or WireError if
    something else than a query server replies.
    """
    request = RunQuery(sql=sql, limit=min(limit, MAX_QUERY_ROWS) or MAX_QUERY_ROWS)
    frames = encode_request(request, id=1, role="monitor", sender=f"query.{uuid.uuid4().hex[:8]}", run="")
    with contextlib.closing(ClientChannel(address, setting="--address", keys=keys)) as channel:
        reply = _reply(channel, frames, address)
    if isinstance(reply, Failure):
        if reply.code == "query":
            raise UsageError(reply.message)
        if reply.code == "not_allowed":
            raise Refused(reply.code, f"{address}: {reply.message}")
        raise Refused(reply.code, f"{address}: {reply.message}: {_NO_QUERY_SERVER}")
    assert isinstance(reply, QueryResult)
    return reply


def _reply(channel: ClientChannel, frames: list[bytes], address: str) -> QueryResult | Failure:
    deadline, is_sent = time.monotonic() + _PATIENCE_SECONDS, False
    while time.monotonic() < deadline:
        # Dials again if the connection was refused.
        _ = channel.connections
        # False until the connection is there. A query is sent once: it may be expensive.
        is_sent = is_sent or channel.send(frames)
        if (received := channel.receive(_POLL_SECONDS)) is None:
            continue
        try:
            message = decode_plain_reply(received, QUERY_REPLIES).message
        except WireError as error:
            raise WireError(f"{address} sent something else than the reply to a query: {_NO_QUERY_SERVER}") from error
        assert isinstance(message, QueryResult | Failure)
        return message
    busy = "this query takes longer, or one of another client before it"
    why = channel.trouble or (busy if is_sent else "is `tba buffer serve-queries` running there?")
    raise BufferUnavailable(f"no reply from {address} in {_PATIENCE_SECONDS:.0f} s: {why}")
