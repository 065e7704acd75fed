"""Publishing: the training thread copies the weights to the host; a thread of its own does the rest.

    training thread   publish ──► round, canary, copy ──► queue of one
    publisher thread  write ──► fsync ──► hash ──► name ──► announce ──► collect old ones

Invariants: a name under the snapshot directory never changes its content; an announced snapshot is complete.
"""

import json
import queue
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tba.common import snapshot
from tba.common.config import Config
from tba.common.durable import temporary_directory, write_json
from tba.common.errors import BufferUnavailable, SnapshotError, TbaError
from tba.common.log import get_logger
from tba.common.snapshot import Canary, Manifest, directory_name
from tba.common.wire import AnnounceSnapshot, Done, WeightsRef
from tba.trainer.canary import canary_sequences, make_canary
from tba.trainer.connection import Client, Dial
from tba.trainer.model import weights_of

log = get_logger(__name__)

_POLL_SECONDS = 0.2
_WEIGHTS = "model.safetensors"
# Everything that belongs to a model directory and is not its weights: tokenizer, templates, generation settings.
_COPIED_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}


@dataclass(frozen=True, slots=True)
class _Publication:
    version: int
    step: int
    weights: dict[str, Tensor]  # on the host, in the published type
    canary: Canary


class Publisher:
    """Writes and announces snapshots of one model. `model_files` is the directory the model came from."""

    def __init__(
        self,
        config: Config,
        model: PreTrainedModel,
        model_files: Path,
        *,
        next_version: int,
        stop: Callable[[], bool],
        dial: Dial,
    ) -> None:
        self._config = config
        self._dial = dial
        self._model = model
        self._model_files = model_files
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._directory = config.snapshots.resolve()
        self._next_version = max(next_version, _after_leftovers(self._directory))
        self._sequences = canary_sequences(model_files, model.get_input_embeddings().num_embeddings)
        self._stop = stop
        self._queue: queue.Queue[_Publication] = queue.Queue(maxsize=1)
        self._closing = threading.Event()
        self._failure: Exception | None = None
        self._unfinished = 0  # publications handed over and not yet announced
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="publisher", daemon=True)
        self._thread.start()

    def publish(self, step: int) -> int:
        """Hand over the model as it is now, and return its version.

        Waits while an earlier snapshot is being written and another one waits: each is published, and the
        host holds no more than three copies. Raises what the thread failed on.
        """
        version = self._next_version
        self._next_version += 1
        weights = _rounded(self._model, self._dtype)
        canary = make_canary(self._model, weights, self._sequences)
        host = {name: tensor.to("cpu", copy=True) for name, tensor in weights.items()}
        del weights
        with self._changed:
            self._unfinished += 1
        while True:
            self.check()
            try:
                self._queue.put(_Publication(version, step, host, canary), timeout=_POLL_SECONDS)
                return version
            except queue.Full:
                if self._stop():  # it will not be announced; the next start publishes anew
                    self._done_with_one()
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

    def _process(self, client: Client, publication: _Publication) -> None:
        started = time.monotonic()
        announcement = self._write(publication)
        client.ask(announcement, Done, self._closing.is_set)
        train = self._config.train
        snapshot.collect(self._directory, keep_last=train.keep_snapshots, keep_every=train.keep_snapshot_every)
        log.info(
            "snapshot published",
            version=publication.version,
            step=publication.step,
            mbytes=announcement.bytes / 1e6,
            seconds=time.monotonic() - started,
        )
        self._done_with_one()

    def _done_with_one(self) -> None:
        with self._changed:
            self._unfinished -= 1
            self._changed.notify_all()

    def _write(self, publication: _Publication) -> AnnounceSnapshot:
        final = self._directory / directory_name(publication.version)
        temporary = temporary_directory(final)
        _copy_model_files(self._model_files, temporary, self._model, self._config.model.dtype)
        # The names and layouts that the model's own files have, which may differ from those in memory.
        weights = revert_weight_conversion(self._model, publication.weights)
        contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
        save_file(contiguous, temporary / _WEIGHTS, metadata={"format": "pt"})
        manifest = Manifest(
            run=self._config.run.name,
            version=publication.version,
            step=publication.step,
            created_at=time.time(),
            files=snapshot.describe_files(temporary),
            canary=publication.canary,
        )
        digest = snapshot.seal(temporary, final, manifest)
        ref = WeightsRef(version=publication.version, step=publication.step, path=str(final), manifest_sha256=digest)
        return AnnounceSnapshot(weights=ref, bytes=sum(entry.bytes for entry in manifest.files.values()))

    def _fail(self, error: Exception) -> None:
        log.exception("publisher failed")
        with self._changed:
            self._failure = error
            self._changed.notify_all()


@torch.no_grad()
def _rounded(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in weights_of(model).items()
    }


def _after_leftovers(directory: Path) -> int:
    """The first version that no directory has: one of a crashed trainer may never have been announced."""
    directory.mkdir(parents=True, exist_ok=True)
    for unfinished in directory.glob(".v????????.tmp"):
        shutil.rmtree(unfinished)
    taken = [int(path.name[1:]) for path in directory.glob("v????????") if path.name[1:].isdecimal()]
    return max(taken, default=-1) + 1


def _copy_model_files(source: Path, target: Path, model: PreTrainedModel, dtype: str) -> None:
    """Tokenizer and settings as they are; config.json with the type of the published weights."""
    for path in source.iterdir():
        skipped = path.name in ("config.json", snapshot.MANIFEST) or path.name.endswith(".index.json")
        if path.is_file() and path.suffix in _COPIED_SUFFIXES and not skipped:
            shutil.copyfile(path, target / path.name)
    fields = json.loads((source / "config.json").read_text(encoding="utf-8"))
    fields.setdefault("architectures", [type(model).__name__])
    for name in {"dtype", "torch_dtype"} & fields.keys() or {"dtype"}:
        fields[name] = dtype
    write_json(target / "config.json", fields)
