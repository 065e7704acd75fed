"""Publishing: the training thread copies the weights to the host; the publisher's thread does the rest.

    training thread   publish ──► round and copy in one pass, or copy the adapters ──► queue
    publisher thread  space? ─► canary ─► write or hash ─► rename ─► announce ─► keep on disk, delete old ones

Invariants: an announced snapshot is complete, and the versions of a run ascend. The canary is computed from the
same tensors that are written or hashed. The training thread never waits for the publisher's, and the newest weights
win: a queued snapshot is replaced by a newer one.
"""

import shutil
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError
from transformers import PreTrainedModel

from tba.common.config import Config
from tba.common.errors import BufferUnavailable, SnapshotError, TbaError
from tba.common.log import get_logger
from tba.common.system.background import Background
from tba.common.weights import snapshot
from tba.common.weights.snapshot import Canary
from tba.common.weights.snapshot_server import SnapshotServer
from tba.common.wire.keys import server_keys
from tba.common.wire.messages import Done
from tba.trainer.buffer_link import Client, Dial
from tba.trainer.distributed import ALONE, Ranks
from tba.trainer.model.host_buffers import HostBuffers
from tba.trainer.publishing.canary import use_one_core
from tba.trainer.publishing.snapshot_writer import Publication, SnapshotWriter, Written, is_full_disk

log = get_logger(__name__)

_SPACE_POLL_SECONDS = 1.0
_JOIN_SECONDS = 10.0
# Includes writing the newest snapshot to disk.
_CLOSE_SECONDS = 60.0
# Kept snapshots and the newest one that may wait for the publisher's thread, each with its copy of the weights.
_MAX_QUEUED = 2
# Snapshots in a row with the same weights that are worth a warning.
_MOST_EQUAL = 5


class Publisher:
    """Writes and announces snapshots of one model. `model_files` is the directory the model came from.

    A model with adapters or sharded over ranks is gathered on the host tensor by tensor; `unwrapped` is its structure
    as in the files.
    """

    def __init__(
        self,
        config: Config,
        model: PreTrainedModel,
        model_files: Path,
        *,
        unwrapped: PreTrainedModel | None = None,
        next_version: int,
        dial: Dial,
        copies: HostBuffers | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._config = config
        self._dial = dial
        self._directory = config.snapshots.resolve()
        self._next_version = max(next_version, _after_leftovers(self._directory))
        self._writer = SnapshotWriter(
            config, model, copies or HostBuffers(model.device), unwrapped=unwrapped or model, model_files=model_files
        )
        self._device, self._ranks = model.device, ranks
        self._server: SnapshotServer | None = None
        if endpoint := config.train.serve_snapshots:
            security = config.security
            keys = server_keys(security.keys, endpoint, "train.serve_snapshots", insecure=security.insecure)
            self._server = SnapshotServer(endpoint, *self._writer.served, keys=keys)
        self._address = self._server.address if self._server else ""
        # The reason why a snapshot waits. The training thread reads it.
        self.reason = ""
        # Whether the newest weights could not be copied: `publish` should be called again.
        self.missed = False
        # The version of the newest weights that are queued or published.
        self.newest: int | None = None
        # Guards everything below.
        self._changed = threading.Condition()
        # Oldest first. Only the last one may be replaced by a newer one.
        self._queue: deque[Publication] = deque()
        self._busy = False
        # Set by the thread, so that `flush` waits for nothing more.
        self._ended = False
        self._finished = False
        # Of the thread: the canary of the last snapshot, and how many in a row had it.
        self._last_canary: Canary | None = None
        self._equal = 0
        self._thread = Background("publisher", self._run, wake=self._wake)
        self._thread.start()

    def publish(self, step: int) -> int | None:
        """Queue a copy of the current model. Returns the version of the newest weights that are queued or published.

        Never waits for what is being written. A queued snapshot is replaced by this one, unless it is one to be kept
        and few are queued; then both are published. Without room for one more copy nothing is queued, and `missed` is
        set. Raises the thread's failure, and SnapshotError if the weights cannot be written.
        """
        self.check()
        base_version = self._take_version() if self._writer.needs_base(step) else None
        replaced = self._replaceable()
        if replaced is not None:
            log.debug("snapshot replaced by a newer one", version=replaced.version, step=replaced.step)
            # The newer one takes over publishing the base, under the version of the replaced snapshot.
            base_version = replaced.version if base_version is None else base_version
            self._writer.release(replaced.copy)
        try:
            copy = self._writer.copy(self._ranks)
        except OSError as error:
            raise SnapshotError(f"publishing to {self._directory} failed: {error}") from error
        self.missed = copy is None
        if copy is None:
            no_room = self._writer.no_room
            if not self.reason:
                log.warning("snapshot not published yet", step=step, reason=no_room)
            self.reason = f"the weights of step {step} wait for memory: {no_room}"
            return self.newest
        publication = Publication(self._take_version(), step, copy, base_version, kept=self._writer.is_kept_step(step))
        with self._changed:
            self._queue.append(publication)
            self._changed.notify_all()
        self.newest = publication.version
        return self.newest

    def _replaceable(self) -> Publication | None:
        """Take the queued publication that a newer one replaces."""
        with self._changed:
            if self._queue and (len(self._queue) == _MAX_QUEUED or not self._queue[-1].kept):
                return self._queue.pop()
        return None

    def _take_version(self) -> int:
        self._next_version += 1
        return self._next_version - 1

    def check(self) -> None:
        """Raise what ended the publisher's or the file server's thread, if anything did."""
        if self._server is not None:
            self._server.check()
        failure = self._thread.failure
        if failure is not None and not isinstance(failure, TbaError):
            raise SnapshotError(f"publishing to {self._directory} failed: {failure}") from failure
        self._thread.check()

    def flush(self, deadline_seconds: float) -> bool:
        """Wait until every queued snapshot is announced, and kept ones are on disk. False after the deadline."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._ended or not (self._queue or self._busy or self._writer.pending), deadline_seconds
            )
        if self._ended:
            self._thread.join(_JOIN_SECONDS)
        self.check()
        return done

    def finish(self) -> None:
        """The run is finished: `close` deletes what is not kept on disk."""
        self._finished = True

    def close(self) -> None:
        """End the thread. A snapshot that is not announced yet stays unannounced."""
        ended = self._thread.stop(_CLOSE_SECONDS)
        if self._server is not None:
            self._server.close()
        if ended:
            self._writer.close(finished=self._finished)

    # ------------------------------------------------------------ publisher thread

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        use_one_core(self._device)
        client = self._dial("publisher", "publisher")
        try:
            try:
                while not self._thread.stopping.is_set():
                    if (publication := self._next()) is not None:
                        self._process(client, publication)
                    self._keep()
            except BufferUnavailable:
                log.info("publisher closed before the buffer was back")
            # Such as of a directory that was moved: its sentence says all.
            except (OSError, SafetensorError) as error:
                raise SnapshotError(f"publishing to {self._directory} failed: {error}") from error
            if not self._finished:
                self._writer.keep_newest()
            self._keep()
        finally:
            client.close()
            self._ended = True
            self._wake()

    def _next(self) -> Publication | None:
        """The next publication; None when the thread stops, or when a kept snapshot should be tried again."""
        with self._changed:
            timeout = _SPACE_POLL_SECONDS if self._writer.pending else None
            self._changed.wait_for(lambda: bool(self._queue) or self._thread.stopping.is_set(), timeout)
            if not self._queue or self._thread.stopping.is_set():
                return None
            self._busy = True
            return self._queue.popleft()

    def _process(self, client: Client, publication: Publication) -> None:
        started = time.monotonic()
        written = self._write(publication)
        if written is None:
            return
        announcement = written.announcement(self._address)
        client.call(announcement, Done, stop=self._thread.stopping.is_set)
        about = {"version": announcement.weights.version, "step": announcement.weights.step}
        seconds = time.monotonic() - started
        log.info("snapshot published", **about, mbytes=announcement.bytes / 1e6, seconds=seconds)
        self._writer.announced(written)
        self._note_standstill(written.manifest.canary)
        self._collect()
        self._busy = False
        self._wake()

    def _note_standstill(self, canary: Canary) -> None:
        """Log once if several snapshots in a row have the same weights: their canaries are then equal to the last bit.

        No searcher can find that out: each of these snapshots is sound. What they sample looks stale, and is.
        """
        self._equal = self._equal + 1 if canary == self._last_canary else 1
        self._last_canary = canary
        if self._equal == _MOST_EQUAL:
            log.warning(
                "snapshots do not change",
                snapshots=_MOST_EQUAL,
                reason="no step changes the weights, as with a learning rate of 0 or equal rewards, or the weights "
                "that are published are not those that are trained",
            )

    def _keep(self) -> None:
        """Write snapshots that are kept to disk, if there is space for them."""
        if not self._writer.pending:
            return
        reason = self._writer.write_kept()
        if reason and not self.reason:
            log.warning("snapshot waits", reason=reason)
        self.reason = reason
        self._collect()
        self._wake()

    def _collect(self) -> None:
        train = self._config.train
        last, every, keep = train.keep_snapshots, train.keep_snapshot_every, self._writer.base_paths
        snapshot.collect(self._directory, keep_last=last, keep_every=every, keep=keep)

    def _write(self, publication: Publication) -> Written | None:
        """Write the snapshot, or a newer one if it had to wait for disk space. None if the publisher is closed."""
        while not self._thread.stopping.is_set():
            try:
                written = self._writer.write(publication)
            except (OSError, SafetensorError) as error:
                if not is_full_disk(error):
                    raise
                publication = self._wait_for_space(publication, f"v{publication.version} waits for disk space: {error}")
            else:
                self.reason = ""
                return written
        return None

    def _wait_for_space(self, publication: Publication, reason: str) -> Publication:
        """Wait for disk space while training continues. If a newer snapshot is queued by then, drop the older one."""
        if not self.reason:
            log.warning("snapshot waits", reason=reason)
        self.reason = reason
        with self._changed:
            self._changed.wait_for(lambda: bool(self._queue) or self._thread.stopping.is_set(), _SPACE_POLL_SECONDS)
            if not self._queue:
                return publication
            newer = self._queue.popleft()
        log.warning("snapshot dropped", version=publication.version, step=publication.step, reason=reason)
        self._writer.release(publication.copy)
        # The newer one takes over publishing the base, under the version of the dropped snapshot.
        return newer if newer.base_version is not None else replace(newer, base_version=publication.version)


def _after_leftovers(directory: Path) -> int:
    """The first unused version: a directory of a crashed trainer may never have been announced."""
    directory.mkdir(parents=True, exist_ok=True)
    for unfinished in directory.glob(".v????????.tmp"):
        shutil.rmtree(unfinished)
    taken = [int(path.name[1:]) for path in directory.glob("v????????") if path.name[1:].isdecimal()]
    return max(taken, default=-1) + 1
