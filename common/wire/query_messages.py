"""Messages of a query server: SQL over the buffer's file from another machine.

A separate conversation, without the buffer, as that of a snapshot server.
"""

from typing import Annotated, Any

from pydantic import Field

from tba.common.wire.messages import Message, Name, Sentence

MAX_QUERY_ROWS = 10_000
MAX_QUERY_BYTES = 8 << 20
MAX_COLUMNS = 2_000


class RunQuery(Message):
    """Monitor -> query server. Reply: QueryResult, or Failure with the code `query` if the statement is refused."""

    TYPE = "run_query"
    sql: Annotated[str, Field(min_length=1, max_length=100_000)]
    limit: Annotated[int, Field(ge=1, le=MAX_QUERY_ROWS)]


class QueryResult(Message):
    """Reply to RunQuery: rows of null, integers, floats, strings and bytes.

    `cut` says why there are no more rows, and is empty if these are all.
    """

    TYPE = "query_result"
    headings: Annotated[list[Name], Field(max_length=MAX_COLUMNS)]
    rows: Annotated[list[list[Any]], Field(max_length=MAX_QUERY_ROWS)]
    cut: Sentence
