"""The trainer's file server: snapshots for searchers that share no file system with it.

    searcher  FetchChunk, several at a time ──► one thread here ──► Chunk, in the order of asking

Only files that a published snapshot's manifest names, and the manifest itself, can be had.
"""

import functools
import os
import re
import socket
import threading
from pathlib import Path

from tba.common.channels import ServerChannel
from tba.common.codec import Frames, decode_file_request, encode_file_reply, request_id_of
from tba.common.errors import SnapshotError, WireError
from tba.common.log import get_logger
from tba.common.snapshot import MANIFEST, directory_name, read
from tba.common.wire import Chunk, Failure, FetchChunk

log = get_logger(__name__)

_POLL_SECONDS = 1.0
_AT_ONCE = 16
# Chunks of up to 4 MiB that may wait for one searcher: twice what it asks for at a time, so that none is dropped.
_UNSENT_CHUNKS = 16
_ANY_HOST = re.compile(r"^tcp://(0\.0\.0\.0|\*|\[::\])(?=:)")


class SnapshotServer:
    """Serves the snapshots under a directory from its own thread, until `close`.

    `address` is what searchers dial. Raises ConfigError if the endpoint cannot be bound.
    """

    def __init__(self, endpoint: str, directory: Path) -> None:
        self._channel = ServerChannel(endpoint, setting="train.serve_snapshots", unsent=_UNSENT_CHUNKS)
        self.address = _ANY_HOST.sub(f"tcp://{socket.gethostname()}", self._channel.address)
        self._directory = directory
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="snapshot server", daemon=True)
        self._thread.start()
        log.info("serving snapshots", address=self.address)

    def close(self) -> None:
        """End the thread and close the socket. Closing twice is fine."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._channel.wake()
        self._thread.join()
        self._channel.close()

    def _serve(self) -> None:
        while not self._closing.is_set():
            for peer, frames in self._channel.receive(_POLL_SECONDS, _AT_ONCE):
                # False where the searcher is gone or does not read: it asks again.
                self._channel.send(peer, self._answer(frames))

    def _answer(self, frames: list[memoryview]) -> Frames:
        try:
            request = decode_file_request(frames)
        except WireError as error:
            return encode_file_reply(Failure(code=error.code, message=str(error)), id=request_id_of(frames), run="")
        assert isinstance(request.message, FetchChunk)
        try:
            size, data = self._chunk(request.message)
        except (OSError, SnapshotError) as error:
            reason = f"v{request.message.version} has no {request.message.file!r} here (any more): {error}"
            failure = Failure(code="no_such_file", message=reason[:4000])
            return encode_file_reply(failure, id=request.header.id, run=request.header.run)
        chunk = Chunk(offset=request.message.offset, file_bytes=size)
        return encode_file_reply(chunk, id=request.header.id, run=request.header.run, frames=[data])

    def _chunk(self, asked: FetchChunk) -> tuple[int, bytes]:
        """The size of the file, and a piece of it."""
        directory = self._directory / directory_name(asked.version)
        if asked.file not in _files(directory):
            raise SnapshotError("its manifest does not name it")
        # The name is one of the manifest's, so it has no separator; nor may it lead elsewhere.
        descriptor = os.open(directory / asked.file, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            return os.fstat(descriptor).st_size, os.pread(descriptor, asked.length, asked.offset)
        finally:
            os.close(descriptor)


@functools.lru_cache(maxsize=32)
def _files(directory: Path) -> frozenset[str]:
    """What may be served of a snapshot; it never changes while its name is there. Raises SnapshotError."""
    return frozenset({MANIFEST, *read(directory).manifest.files})
