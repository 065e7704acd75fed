"""Messages of a snapshot server, the trainer's or a node's: files for searchers without a shared file system.

A separate conversation, without the buffer. Its replies carry no run state: a server does not decide which snapshot is
the newest.
"""

from typing import Annotated

from msgspec import Meta

from tba.common.wire.fields import Id, Name
from tba.common.wire.messages import Message

MAX_CHUNK_BYTES = 1 << 20


class FetchChunk(Message, frozen=True):
    """Searcher -> snapshot server, several at a time. Reply: Chunk, or Failure if the file is not here, or not yet.

    `file` is `manifest.json` or a file that the manifest of the version names.
    """

    TYPE = "fetch_chunk"
    version: Id
    file: Name
    offset: Id
    length: Annotated[int, Meta(ge=1, le=MAX_CHUNK_BYTES)]


class Chunk(Message, frozen=True):
    """Reply to FetchChunk. One frame of bytes follows, shorter than requested only at the end of the file."""

    TYPE = "chunk"
    RAW = True
    offset: Id
    file_bytes: Id
