"""Download snapshot files from the trainer or from other nodes, where no file system is shared, and serve this node's.

A file is requested in chunks, several at a time, and written from front to back. The part on disk is therefore always
a prefix of the file, and a download that was interrupted, or whose process died, resumes at its end. The hash is
computed while receiving.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, ClassVar

from blake3 import blake3

from tba.common.clock import Clock
from tba.common.config import Config
from tba.common.errors import AddressInUse, ConfigError, SnapshotError, SnapshotMissing, SnapshotOutdated, WireError
from tba.common.log import get_logger
from tba.common.run_snapshots import weights_directory
from tba.common.system.durable import open_regular
from tba.common.weights.node_store import make_directory
from tba.common.weights.snapshot import DELTA
from tba.common.weights.snapshot_server import NodeServer, address_of
from tba.common.wire.channels import ClientChannel
from tba.common.wire.codec import PlainReply, decode_plain_reply, encode_request
from tba.common.wire.keys import KeyPair, announced, server_keys, with_key
from tba.common.wire.messages import MAX_CHUNK_BYTES, Chunk, Failure, FetchChunk

log = get_logger(__name__)

_CHUNK_BYTES = MAX_CHUNK_BYTES
# Chunks requested and not yet received.
_WINDOW = 8
_POLL_SECONDS = 0.2
# Without a chunk for this long, everything that is missing is requested again.
_TIMEOUT_SECONDS = 10.0
# Without anything for this long, the connection is replaced. A slow link takes as long for one chunk.
_SILENT_SECONDS = 60.0
# Without a chunk for this long, another node is asked. A node hears of a snapshot within about a second of the others.
_NODE_SECONDS = 5.0
# Shorter silences are not reported.
_REPORT_SECONDS = 3.0
# Between two attempts to listen while another searcher of the node serves its snapshots.
_RETRY_SECONDS = 10.0


@dataclass(slots=True)
class Progress:
    """What the preparing thread waits for, and whether it should stop waiting.

    The preparing thread calls `report` and `check`; another thread sets `outdated` and reads `waits_for`. With one
    thread, `go_on` is called while it waits, and False ends the wait.
    """

    # Set when another snapshot is wanted, or none at all: then only work that makes progress continues.
    outdated: bool = False
    # A sentence for people, empty while nothing is waited for.
    waits_for: str = ""
    go_on: Callable[[], bool] = lambda: True

    def report(self, waits_for: str) -> None:
        """Publish what is waited for; an empty string when the wait is over."""
        self.waits_for = waits_for

    def check(self, what: str) -> None:
        """Raise SnapshotOutdated if `what` is not needed any more. Called while waiting, not while progressing."""
        if self.outdated or not self.go_on():
            raise SnapshotOutdated(f"{what} is no longer wanted")


class Fetcher:
    """A connection to a snapshot server. Used by one thread. `own` is the key pair of this node, if it has one.

    While the trainer is away a download waits until `progress` says that its snapshot is outdated. For another node it
    waits `patience` seconds without a new chunk, whether that is silent or has not come that far itself.
    """

    def __init__(
        self, address: str, clock: Clock, progress: Progress, patience: float | None = None, own: KeyPair | None = None
    ) -> None:
        address, keys = announced(address, own)
        self._address = address
        self._patience = patience
        self._who = f"the trainer at {address}" if patience is None else f"the node at {address}"
        self._progress = progress
        self._clock = clock
        self._channel = ClientChannel(address, setting="the announced address", keys=keys)
        self._connections = 0
        self._last_id = 0

    def fetch(self, version: int, name: str, target: Path, size: int | None = None) -> str:
        """Download a file of a snapshot, or the rest of it. `size` in bytes, if it is known. Returns its BLAKE3 in hex.

        Raises SnapshotError if it is missing or cannot be written, SnapshotOutdated if another one is wanted meanwhile.
        """
        try:
            # It is also linked under another name, such as in an older snapshot: it must not be written to.
            if target.exists() and target.stat().st_nlink > 1:
                target.unlink()
            with open_regular(target, "ab") as file:
                # Larger than the file can be: a remainder of something else.
                if size is not None and file.tell() > size:
                    file.truncate(0)
                started_at = os.fstat(file.fileno()).st_size
                digest = blake3()
                if started_at:
                    log.info("fetch resumed", file=name, version=version, at_mbytes=started_at / 1e6)
                    digest.update_mmap(target)
                self._download(version, name, file, started_at, size, digest)
        except OSError as error:
            raise SnapshotError(f"{target} cannot be written: {error.strerror}") from error
        self._progress.report("")
        return digest.hexdigest()

    def close(self) -> None:
        self._channel.close()

    def _download(
        self, version: int, name: str, file: IO[bytes], written: int, size: int | None, digest: blake3
    ) -> None:
        """Append the rest of a file, to the digest as well.

        Invariant: the file on disk holds its first `written` bytes, and the chunks from there to `asked_to` are
        requested. A chunk is accepted at its place in the file, whichever request it answers: on a slow link that was
        silent for a while, the first replies are those to requests that have been repeated since.
        """
        what = f"{name} of v{version}"
        first_id = failing_id = self._last_id + 1
        asked_to = written
        received_at = asked_at = self._clock.monotonic()
        while size is None or written < size:
            # Requests in flight are lost with their connection.
            if self._channel.connections != self._connections:
                self._connections = self._channel.connections
                asked_to, asked_at = written, self._clock.monotonic()
            # While the size is unknown one chunk is requested: its reply holds the size.
            end = written + 1 if size is None else min(size, written + _WINDOW * _CHUNK_BYTES)
            for offset in range(max(asked_to, written), end, _CHUNK_BYTES):
                self._last_id += 1
                asked = FetchChunk(version=version, file=name, offset=offset, length=_CHUNK_BYTES)
                sender = f"fetch.{os.getpid()}"
                frames = encode_request(asked, id=self._last_id, role="searcher", sender=sender, run="")
                # False without a connection.
                if not self._channel.send(frames):
                    break
                asked_to = offset + _CHUNK_BYTES
            reply = self._receive()
            if reply is None:
                self._wait(what, received_at)
                if self._clock.monotonic() - asked_at > _TIMEOUT_SECONDS:
                    asked_to, asked_at = written, self._clock.monotonic()
                    self._channel.renew(_SILENT_SECONDS)
                continue
            if reply.header.id < first_id:
                continue
            if isinstance(reply.message, Failure) and self._patience is not None:
                if reply.header.id >= failing_id:
                    # The other requests in flight fail as well.
                    asked_to, failing_id = written, self._last_id + 1
                    self._wait(what, received_at)
                    time.sleep(_POLL_SECONDS / 4)
                continue
            if isinstance(reply.message, Chunk) and reply.message.offset != written:
                continue
            received_at = asked_at = self._clock.monotonic()
            content, size = self._chunk(reply, what, written, size)
            file.write(content)
            file.flush()
            digest.update(content)
            written += content.nbytes

    def _receive(self) -> PlainReply | None:
        """The next reply; None if none arrives within the polling interval, or it is malformed."""
        frames = self._channel.receive(_POLL_SECONDS)
        try:
            return None if frames is None else decode_plain_reply(frames)
        except WireError as error:
            log.warning("chunk dropped", reason=str(error))
            return None

    def _chunk(self, reply: PlainReply, what: str, offset: int, size: int | None) -> tuple[memoryview, int]:
        """The chunk of a reply and the size of the file. Raises SnapshotError for a refusal or unexpected sizes."""
        message, frames = reply.message, reply.frames
        if isinstance(message, Failure):
            kind = SnapshotMissing if message.code == "no_such_file" else SnapshotError
            raise kind(f"{self._who} refused: {message.message}")
        assert isinstance(message, Chunk)
        expected = min(_CHUNK_BYTES, message.file_bytes - offset)
        if (size or message.file_bytes) != message.file_bytes or frames[0].nbytes != expected:
            raise SnapshotError(
                f"{what} has {message.file_bytes} bytes at {self._address} and {size} in the manifest; "
                f"{frames[0].nbytes} of {expected} were received"
            )
        return frames[0], message.file_bytes

    def _wait(self, what: str, received_at: float) -> None:
        """Report a silent server. Raises SnapshotOutdated, or SnapshotError."""
        silent = self._clock.monotonic() - received_at
        if silent > _REPORT_SECONDS:
            why = self._channel.trouble or f"silent for {silent:.0f} s"
            self._progress.report(f"waiting for {self._who} to send {what}: {why}")
        self._progress.check(what)
        if self._patience is not None and silent > self._patience:
            raise SnapshotError(f"{self._who} did not send {what} for {silent:.0f} s")


@dataclass(slots=True)
class Nodes:
    """Other nodes, then the trainer: where the files of one snapshot and its ancestors come from. Used by one thread.

    Manifests and deltas come from the trainer. A node that did not send a file is not asked again, and a file that is
    fetched again, because it had another hash, comes from the trainer.
    """

    nodes: list[str]
    trainer: str
    clock: Clock
    progress: Progress
    own: KeyPair | None
    _fetchers: dict[str, Fetcher] = field(default_factory=dict)
    _fetched: set[tuple[int, str]] = field(default_factory=set)
    remote: ClassVar = True

    def fetch(self, version: int, name: str, target: Path, size: int | None = None) -> str:
        again = (version, name) in self._fetched
        self._fetched.add((version, name))
        while self.nodes and not (again or size is None or name == DELTA):
            try:
                return self._fetcher(self.nodes[0], _NODE_SECONDS).fetch(version, name, target, size)
            except SnapshotOutdated:
                raise
            except (SnapshotError, ConfigError) as error:
                log.info("another source is asked", file=name, version=version, reason=str(error))
                del self.nodes[0]
        return self._fetcher(self.trainer, None).fetch(version, name, target, size)

    def close(self) -> None:
        for fetcher in self._fetchers.values():
            fetcher.close()

    def _fetcher(self, address: str, patience: float | None) -> Fetcher:
        if address not in self._fetchers:
            self._fetchers[address] = Fetcher(address, self.clock, self.progress, patience, self.own)
        return self._fetchers[address]


class Serving:
    """Runs the node's server in this searcher unless another searcher of the node does. Used by one thread.

    `address` is the node's, whichever of its searchers listens there; empty if the node serves nothing.
    """

    def __init__(self, config: Config, clock: Clock) -> None:
        self._endpoint = config.search.serve_snapshots
        self._keys = None
        if self._endpoint:
            self._keys = server_keys(
                config.security.keys, self._endpoint, "search.serve_snapshots", insecure=config.security.insecure
            )
        self.address = with_key(address_of(self._endpoint), self._keys)
        self._directory = weights_directory(config)
        self._clock = clock
        self._server: NodeServer | None = None
        # Monotonic.
        self._retry_at = 0.0

    def update(self) -> None:
        """Listen if no searcher of this node does. Raises ConfigError, or what ended the server."""
        if self._server is not None:
            self._server.check()
        elif self._endpoint and self._clock.monotonic() >= self._retry_at:
            try:
                make_directory(self._directory)
                self._server = NodeServer(self._endpoint, self._directory, self._keys)
            except AddressInUse:
                log.debug("another searcher of this node serves its snapshots", address=self.address)
                self._retry_at = self._clock.monotonic() + _RETRY_SECONDS

    def close(self) -> None:
        """End the server. Closing twice is fine."""
        if self._server is not None:
            self._server.close()
