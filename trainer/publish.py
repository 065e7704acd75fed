"""Publishing: the training thread copies the weights to the host; a thread of its own does the rest.

    training thread   publish ──► round and copy in one pass, or copy the adapters ──► queue of one
    publisher thread  space? ─► merge ─► canary ─► write ─► fsync ─► hash ─► name ─► announce ─► collect old ones

Invariants: an announced snapshot is complete, and the versions of a run ascend. The canary is computed from the very
weights that are written or hashed.
"""

import functools
import queue
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError
from transformers import PreTrainedModel

from tba.common import snapshot
from tba.common.config import Config
from tba.common.errors import BufferUnavailable, SnapshotError, TbaError
from tba.common.log import get_logger
from tba.common.wire import AnnounceSnapshot, Done
from tba.trainer.adapter_writer import AdapterWriter
from tba.trainer.canary import canary_sequences, make_canary, skeleton
from tba.trainer.connection import Client, Dial
from tba.trainer.host_copies import HostCopies
from tba.trainer.serve import SnapshotServer
from tba.trainer.snapshot_writer import Publication, SnapshotWriter, Writer, is_full_disk
from tba.trainer.whole_writer import WholeWriter

log = get_logger(__name__)

_POLL_SECONDS = 0.2
_SPACE_POLL_SECONDS = 1.0


class Publisher:
    """Writes and announces snapshots of one model. `model_files` is the directory the model came from.

    A model that has adapters or is divided over ranks is put together on the host, tensor by tensor; `plain` is then
    its structure as the files have it. The other ranks have to be told before `publish`.
    """

    def __init__(
        self,
        config: Config,
        model: PreTrainedModel,
        model_files: Path,
        *,
        plain: PreTrainedModel | None = None,
        next_version: int,
        stop: Callable[[], bool],
        dial: Dial,
        copies: HostCopies | None = None,
    ) -> None:
        self._config = config
        self._dial = dial
        plain = model if plain is None else plain
        self._copies = copies or HostCopies(model.device)
        self._directory = config.snapshots.resolve()
        self._next_version = max(next_version, _after_leftovers(self._directory))
        sequences = canary_sequences(model_files, model.get_input_embeddings().num_embeddings)
        canary_of = functools.partial(make_canary, skeleton(plain), sequences=sequences)
        writer = SnapshotWriter(config, plain, model_files, canary_of)
        kind = AdapterWriter if config.lora.publish == "adapter" else WholeWriter
        self._writer: Writer = kind(writer, model, self._copies)
        self._stop = stop
        self._server: SnapshotServer | None = None
        if config.train.serve_snapshots:
            self._server = SnapshotServer(config.train.serve_snapshots, self._directory)
        self._address = self._server.address if self._server else ""
        self.trouble = ""  # why a snapshot waits, for people; read by the training thread
        self._queue: queue.Queue[Publication] = queue.Queue(maxsize=1)
        self._closing = threading.Event()
        self._failure: Exception | None = None
        self._unfinished = 0  # publications handed over and not yet announced
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="publisher", daemon=True)
        self._thread.start()

    @property
    def gathers(self) -> tuple[str, ...]:
        """What the next `publish` puts together from all ranks, for `tba.trainer.adapters.gathered`."""
        return self._writer.gathers

    def publish(self, step: int) -> int:
        """Hand over the model as it is now, and return its version.

        Waits while an earlier snapshot is being written and another one waits: each is published, and the
        host holds no more than four copies, the base of the next delta included, or two and some adapters. Raises what
        the thread failed on.
        """
        base_version = self._take_version() if self._writer.needs_base(step) else None
        version = self._take_version()
        publication = Publication(version, step, self._writer.copy(), base_version)
        with self._changed:
            self._unfinished += 1
        while True:
            self.check()
            try:
                self._queue.put(publication, timeout=_POLL_SECONDS)
                return version
            except queue.Full:
                if self._stop():  # it will not be announced; the next start publishes anew
                    self._done_with_one()
                    return version

    def _take_version(self) -> int:
        version = self._next_version
        self._next_version += 1
        return version

    def check(self) -> None:
        """Raise what the thread failed on, if it did."""
        if self._failure is None:
            return
        if isinstance(self._failure, TbaError):
            raise self._failure
        raise SnapshotError(f"publishing to {self._directory} failed: {self._failure}") from self._failure

    def flush(self, deadline_seconds: float) -> bool:
        """Wait until everything handed over is announced; False after the deadline."""
        with self._changed:
            done = self._changed.wait_for(lambda: self._unfinished == 0 or self._failure is not None, deadline_seconds)
        self.check()
        return done

    def close(self) -> None:
        """End the thread; what is not announced stays unannounced."""
        self._closing.set()
        self._thread.join(timeout=10.0)
        if self._server is not None:
            self._server.close()

    # ------------------------------------------------------------ publisher thread

    def _work(self) -> None:
        client = self._dial("publisher", "publisher")
        try:
            while not self._closing.is_set():
                try:
                    publication = self._queue.get(timeout=_POLL_SECONDS)
                except queue.Empty:
                    continue
                self._process(client, publication)
        except BufferUnavailable:
            log.info("publisher closed before the buffer was back")
        except Exception as error:  # noqa: BLE001 - kept, and raised again in the training thread
            self._fail(error)
        finally:
            client.close()

    def _process(self, client: Client, publication: Publication) -> None:
        started = time.monotonic()
        announcement = self._write(publication)
        if announcement is None:
            return
        client.ask(announcement, Done, self._closing.is_set)
        train = self._config.train
        snapshot.collect(
            self._directory,
            keep_last=train.keep_snapshots,
            keep_every=train.keep_snapshot_every,
            keep=self._writer.keeps(),
        )
        log.info(
            "snapshot published",
            version=announcement.weights.version,
            step=announcement.weights.step,
            mbytes=announcement.bytes / 1e6,
            seconds=time.monotonic() - started,
        )
        self._done_with_one()

    def _write(self, publication: Publication) -> AnnounceSnapshot | None:
        """Write it, or the newest there is by the time that there is space. None if the publisher is closed first."""
        while not self._closing.is_set():
            shortage = self._writer.shortage(publication)
            if not shortage:
                try:
                    written = self._writer.write(publication)
                except (OSError, SafetensorError) as error:
                    if not is_full_disk(error):
                        raise
                    shortage = f"v{publication.version} waits for disk space: {error}"
                else:
                    self.trouble = ""
                    return written.announcement(self._address)
            publication = self._wait_for_space(publication, shortage)
        return None

    def _wait_for_space(self, publication: Publication, shortage: str) -> Publication:
        """Training goes on meanwhile: of two snapshots that wait the newer one counts, the other is dropped."""
        if not self.trouble:
            log.warning("snapshot waits", reason=shortage)
        self.trouble = shortage
        try:
            newer = self._queue.get(timeout=_SPACE_POLL_SECONDS)
        except queue.Empty:
            return publication
        log.warning("snapshot dropped", version=publication.version, step=publication.step, reason=shortage)
        self._copies.give_back(publication.copy)
        self._done_with_one()
        # A base that was to come with the dropped one, or to be it, comes with this one: its number is free.
        return newer if newer.base_version is not None else replace(newer, base_version=publication.version)

    def _done_with_one(self) -> None:
        with self._changed:
            self._unfinished -= 1
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        log.exception("publisher failed")
        with self._changed:
            self._failure = error
            self._changed.notify_all()


def _after_leftovers(directory: Path) -> int:
    """The first version that no directory has: one of a crashed trainer may never have been announced."""
    directory.mkdir(parents=True, exist_ok=True)
    for unfinished in directory.glob(".v????????.tmp"):
        shutil.rmtree(unfinished)
    taken = [int(path.name[1:]) for path in directory.glob("v????????") if path.name[1:].isdecimal()]
    return max(taken, default=-1) + 1
