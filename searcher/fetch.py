"""Fetching files of snapshots from the trainer, for nodes that share no file system with it.

A file is asked for in chunks, several at a time, and written from front to back: what there is of it on disk is always
its beginning, so a fetch that was cut off, or whose process died, goes on at the end of what is there.
"""

import contextlib
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from tba.common.channels import ClientChannel
from tba.common.clock import Clock
from tba.common.codec import decode_file_reply, encode_request
from tba.common.errors import SnapshotError, SnapshotOutdated, WireError
from tba.common.log import get_logger
from tba.common.wire import Chunk, Failure, FetchChunk, Message

log = get_logger(__name__)

_CHUNK_BYTES = 2 << 20
_WINDOW = 8  # chunks asked for and not yet here
_POLL_SECONDS = 0.2
_PATIENCE_SECONDS = 10.0  # without an answer; then what is missing is asked for again
_SAY_SO_SECONDS = 3.0


class Fetcher:
    """One connection to the trainer's file server. Used by one thread.

    While the trainer is away a fetch waits, for as long as `wanted()` says that its snapshot is, and `tell` hears why.
    """

    def __init__(self, address: str, clock: Clock, *, wanted: Callable[[], bool], tell: Callable[[str], None]) -> None:
        self.address = address
        self._clock = clock
        self._wanted = wanted
        self._tell = tell
        self._channel = ClientChannel(address, setting="the trainer's train.serve_snapshots")
        self._connections = 0
        self._last_id = 0

    def fetch(self, version: int, name: str, target: Path, size: int | None = None) -> None:
        """Bring a file of a snapshot, whose size may be known, or the rest of it.

        Raises SnapshotError if the trainer does not have it, SnapshotOutdated if a newer one is wanted while the
        trainer is away.
        """
        _own(target)
        with target.open("ab") as file:
            if size is not None and file.tell() > size:  # not of this file
                file.truncate(0)
            started_at = os.fstat(file.fileno()).st_size
            if started_at:
                log.info("fetch goes on", file=name, version=version, at_mbytes=started_at / 1e6)
            if started_at != size:
                _Download(self, version, name, file, started_at, size).run()
        self._tell("")

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def ask(self, message: Message) -> int | None:
        """Send a request; None if there is no connection to send it on."""
        self._last_id += 1
        frames = encode_request(message, id=self._last_id, role="searcher", sender=f"fetch.{os.getpid()}", run="")
        return self._last_id if self._channel.send(frames) else None

    def answer(self) -> tuple[int, Message, list[memoryview]] | None:
        """The next reply with its id, if one comes soon."""
        frames = self._channel.receive(_POLL_SECONDS)
        if frames is None:
            return None
        try:
            reply = decode_file_reply(frames)
        except WireError as error:
            log.warning("chunk dropped", reason=str(error))
            return None
        return reply.header.id, reply.message, reply.frames

    def is_new_connection(self) -> bool:
        """Whether there was another connection when this was last asked: what was under way then is lost."""
        before, self._connections = self._connections, self._channel.connections
        return self._connections != before

    def wait(self, silent_seconds: float, what: str) -> None:
        """Nothing came for so long. Says so; raises SnapshotOutdated if it is no longer wanted."""
        if silent_seconds > _SAY_SO_SECONDS:
            self._tell(f"waiting for the trainer at {self.address} to send {what}: silent for {silent_seconds:.0f} s")
        if not self._wanted():
            raise SnapshotOutdated(f"{what} is no longer wanted")

    def monotonic(self) -> float:
        return self._clock.monotonic()


def _own(target: Path) -> None:
    """What has another name is somebody else's too, such as a file of the snapshot before: it is not written to."""
    with contextlib.suppress(FileNotFoundError):
        if target.stat().st_nlink > 1:
            target.unlink()


class _Download:
    """One file. `asked` are the requests under way, in order; replies that answer none of them are late."""

    def __init__(
        self, fetcher: Fetcher, version: int, name: str, file: BinaryIO, written: int, size: int | None
    ) -> None:
        self._fetcher = fetcher
        self._version = version
        self._name = name
        self._file = file
        self._written = written
        self._size = size  # unknown until the first chunk, for a manifest
        self._asked: deque[tuple[int, int]] = deque()  # id, offset
        self._next = written
        self._heard_at = fetcher.monotonic()

    def run(self) -> None:
        while self._size is None or self._written < self._size:
            if self._fetcher.is_new_connection():
                self._start_over()
            self._fill_window()
            reply = self._fetcher.answer()
            if reply is not None:
                self._take(*reply)
                continue
            silent = self._fetcher.monotonic() - self._heard_at
            self._fetcher.wait(silent, f"{self._name} of v{self._version}")
            if silent > _PATIENCE_SECONDS:
                self._start_over()

    def _fill_window(self) -> None:
        # Of a file of unknown size one chunk is asked for: it says how long the file is.
        while len(self._asked) < (_WINDOW if self._size is not None else 1):
            if self._size is not None and self._next >= self._size:
                return
            message = FetchChunk(version=self._version, file=self._name, offset=self._next, length=_CHUNK_BYTES)
            id_ = self._fetcher.ask(message)
            if id_ is None:
                return
            self._asked.append((id_, self._next))
            self._next += _CHUNK_BYTES

    def _take(self, id_: int, message: Message, frames: list[memoryview]) -> None:
        if not self._asked or id_ != self._asked[0][0]:
            return
        self._heard_at = self._fetcher.monotonic()
        if isinstance(message, Failure):
            raise SnapshotError(f"the trainer at {self._fetcher.address} refused: {message.message}")
        assert isinstance(message, Chunk)
        _, offset = self._asked.popleft()
        expected = min(_CHUNK_BYTES, message.file_bytes - offset)
        if (self._size or message.file_bytes) != message.file_bytes or frames[0].nbytes != expected:
            raise SnapshotError(
                f"{self._name} of v{self._version} has {message.file_bytes} bytes at the trainer, "
                f"{frames[0].nbytes} came of {expected}; {self._size} were announced"
            )
        self._size = message.file_bytes
        self._file.write(frames[0])
        self._file.flush()
        self._written += expected

    def _start_over(self) -> None:
        """Ask again for everything that is not here."""
        self._asked.clear()
        self._next = self._written
