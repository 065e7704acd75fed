"""Messages of a query server: SQL over the buffer's file from another machine.

A separate conversation, without the buffer, as that of a snapshot server.
"""

from typing import Annotated, Any

from msgspec import Meta

from tba.common.wire.fields import Name, Sentence
from tba.common.wire.messages import Message

MAX_QUERY_ROWS = 10_000
MAX_QUERY_BYTES = 8 << 20
MAX_COLUMNS = 2_000


class RunQuery(Message, frozen=True):
    """Monitor -> query server. Reply: QueryResult, or Failure with the code `query` if the statement is refused."""

    TYPE = "run_query"
    sql: Annotated[str, Meta(min_length=1, max_length=100_000)]
    limit: Annotated[int, Meta(ge=1, le=MAX_QUERY_ROWS)]


class QueryResult(Message, frozen=True):
    """Reply to RunQuery: rows of null, integers, floats, strings and bytes.

    `cut` says why there are no more rows, and is empty if these are all.
    """

    TYPE = "query_result"
    headings: Annotated[list[Name], Meta(max_length=MAX_COLUMNS)]
    rows: Annotated[list[list[Any]], Meta(max_length=MAX_QUERY_ROWS)]
    cut: Sentence
