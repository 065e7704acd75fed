"""Serve snapshots to searchers that share no file system with this node.

    searcher  FetchChunk, several at a time ──► one thread here ──► Chunk, in the order of the requests

Only manifests and the files that they name are served: by the trainer those of its published snapshots and their
deltas, by a searcher those of complete snapshots, and the beginning of what it is fetching itself. That part is not
verified yet. A searcher checks the hash of what it fetches.
"""

import contextlib
import functools
import math
import os
import re
import socket
import time
from pathlib import Path

from tba.common.errors import SnapshotError, WireError
from tba.common.log import get_logger
from tba.common.system.background import Background
from tba.common.system.durable import open_regular
from tba.common.weights import delta
from tba.common.weights.node_store import VERIFIED, PinnedSnapshot, modified_at, pin_path
from tba.common.weights.snapshot import DELTA, MANIFEST, directory_name, read
from tba.common.wire.channels import Peer, ServerChannel
from tba.common.wire.codec import FILE_REQUESTS, Frames, decode_request, encode_plain_reply, request_id_of
from tba.common.wire.keys import KeyRole, ServerKeys, with_key
from tba.common.wire.messages import Chunk, Failure, FetchChunk

log = get_logger(__name__)

_MAY_FETCH: tuple[KeyRole, ...] = ("searcher", "trainer")
_POLL_SECONDS = 1.0
_MESSAGES_PER_RECEIVE = 16
# Chunks of up to 1 MiB that may wait for one searcher: twice what it requests at a time, so that none is dropped.
_UNSENT_CHUNKS = 16
# As long as a searcher waits for a chunk before it asks again, and then some.
_HOLD_SECONDS = 20.0
_ANY_HOST = re.compile(r"^tcp://(0\.0\.0\.0|\*|\[::\])(?=:)")


class SnapshotServer:
    """Serves the snapshots under some directories from its own thread; `address` is what searchers dial.

    Raises ConfigError if the endpoint of `setting` cannot be bound, AddressInUse if another program has it.
    """

    def __init__(
        self, endpoint: str, *directories: Path, setting: str = "train.serve_snapshots", keys: ServerKeys | None = None
    ) -> None:
        self._channel = ServerChannel(endpoint, setting=setting, unsent=_UNSENT_CHUNKS, keys=keys)
        self._keys = keys
        self.address = with_key(address_of(self._channel.address), keys)
        self._directories = directories
        # The directory that each connection reads from, and the monotonic time of its last read. It is held until the
        # connection asks for another one, so that no file is written again before the last one is sent.
        self._reading: dict[bytes, tuple[Path, float]] = {}
        self._held: dict[Path, PinnedSnapshot] = {}
        self._thread = Background("snapshot server", self._serve, wake=self._channel.wake)
        self._thread.start()
        log.info("serving snapshots", address=self.address)

    def check(self) -> None:
        """Raise what ended the thread, if anything did: searchers would wait for chunks without end."""
        self._thread.check()

    def close(self) -> None:
        """End the thread and close the socket. Closing twice is fine."""
        if not self._thread.stopping.is_set():
            self._thread.stop()
            self._channel.close()

    def _serve(self) -> None:
        while not self._thread.stopping.is_set():
            for peer, frames in self._channel.receive(_POLL_SECONDS, _MESSAGES_PER_RECEIVE):
                # False where the searcher is gone or does not read: it sends the request again.
                self._channel.send(peer, self._answer(peer, frames))
            self._release(before=time.monotonic() - _HOLD_SECONDS)
        self._release(before=math.inf)

    def _answer(self, peer: Peer, frames: list[memoryview]) -> Frames:
        if self._keys is not None and (refusal := self._keys.refusal(peer.key, _MAY_FETCH)):
            log.warning("request refused", by=peer.address, reason=refusal)
            return encode_plain_reply(Failure(code="not_allowed", message=refusal), id=request_id_of(frames), run="")
        try:
            request = decode_request(frames, FILE_REQUESTS)
        except WireError as error:
            return encode_plain_reply(Failure(code=error.code, message=str(error)), id=request_id_of(frames), run="")
        assert isinstance(request.message, FetchChunk)
        try:
            size, data = self._chunk(peer.routing_id, request.message)
        except (OSError, SnapshotError) as error:
            reason = f"v{request.message.version} has no {request.message.file!r} here (any more): {error}"
            failure = Failure(code="no_such_file", message=reason[:4000])
            return encode_plain_reply(failure, id=request.header.id, run=request.header.run)
        chunk = Chunk(offset=request.message.offset, file_bytes=size)
        return encode_plain_reply(chunk, id=request.header.id, run=request.header.run, frames=[data])

    def _chunk(self, reader: bytes, request: FetchChunk) -> tuple[int, bytes]:
        """Return the size of the file in bytes, and the requested part of it. Raises OSError or SnapshotError."""
        directory = self._find(reader, request)
        # A name in the manifest has no separator; O_NOFOLLOW excludes symbolic links, and a FIFO cannot be read so.
        descriptor = os.open(directory / request.file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            return os.fstat(descriptor).st_size, os.pread(descriptor, request.length, request.offset)
        finally:
            os.close(descriptor)

    def _find(self, reader: bytes, request: FetchChunk) -> Path:
        """Hold and return the directory that has a file of a version. Raises SnapshotError if there is none."""
        name = directory_name(request.version)
        for parent in self._directories:
            # Several if an earlier run of this name had the version, too. The newest is of this run.
            named = sorted(parent.glob(f"{name}-*"), key=modified_at, reverse=True)
            for directory in (*named, parent / name, parent / delta.FOLDER / name):
                if self._hold(reader, directory):
                    with contextlib.suppress(SnapshotError):
                        if request.file in _files(directory):
                            return directory
                    self._let_go(reader)
        raise SnapshotError("no manifest names it")

    def _hold(self, reader: bytes, directory: Path) -> bool:
        """Keep a directory as it is while a connection reads from it, for some time. False if it is not there."""
        if self._reading.get(reader, (None,))[0] != directory:
            self._let_go(reader)
        if directory not in self._held and (pinned := pin_path(directory)) is not None:
            self._held[directory] = pinned
        if directory in self._held:
            self._reading[reader] = directory, time.monotonic()
        return directory in self._held

    def _let_go(self, reader: bytes) -> None:
        directory, _ = self._reading.pop(reader, (None, 0.0))
        if directory is not None and all(other != directory for other, _ in self._reading.values()):
            self._held.pop(directory).release()

    def _release(self, *, before: float) -> None:
        """Let go of what was last read before a monotonic time: the reader may be gone."""
        for reader, (_, used_at) in [*self._reading.items()]:
            if used_at < before:
                self._let_go(reader)


def address_of(endpoint: str) -> str:
    """What other nodes dial: the endpoint, with the name of this machine in place of any interface."""
    return _ANY_HOST.sub(f"tcp://{socket.gethostname()}", endpoint)


@functools.lru_cache(maxsize=64)
def _files(directory: Path) -> frozenset[str]:
    """The files of a snapshot that may be served. Cached: a published snapshot never changes. Raises SnapshotError."""
    if directory.parent.name == delta.FOLDER:
        if read(directory).manifest.delta is None:
            raise SnapshotError(f"{directory} has no delta")
        return frozenset({MANIFEST, DELTA})
    return frozenset({MANIFEST, *read(directory).manifest.files})


class NodeServer(SnapshotServer):
    """Serves the snapshots that a node's searchers have assembled, and the beginning of what they fetch.

    Endpoint and directory are the node's: one of its searchers has the endpoint, which is AddressInUse for the others.
    """

    def __init__(self, endpoint: str, directory: Path, keys: ServerKeys | None = None) -> None:
        super().__init__(endpoint, directory, setting="search.serve_snapshots", keys=keys)

    def _chunk(self, reader: bytes, request: FetchChunk) -> tuple[int, bytes]:
        try:
            return super()._chunk(reader, request)
        except (OSError, SnapshotError):
            return self._begun(request)

    def _hold(self, reader: bytes, directory: Path) -> bool:
        # Without the mark it was found to be damaged.
        return (directory / VERIFIED).is_file() and super()._hold(reader, directory)

    def _begun(self, request: FetchChunk) -> tuple[int, bytes]:
        """As `_chunk`, of a file that is being fetched."""
        parts = self._directories[0].glob(f".{directory_name(request.version)}-*.part")
        for part in sorted(parts, key=modified_at, reverse=True):
            entry = read(part).manifest.files.get(request.file)
            if entry is None:
                continue
            with open_regular(part / request.file) as file:
                data = os.pread(file.fileno(), request.length, request.offset)
            if len(data) == min(request.length, entry.bytes - request.offset):
                return entry.bytes, data
            raise SnapshotError(f"{request.file} of v{request.version} is still being fetched here")
        raise SnapshotError("no manifest names it")
