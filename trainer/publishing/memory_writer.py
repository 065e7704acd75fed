"""Snapshots of all weights in files that are mapped and used again; those to keep are written to disk as well.

    training thread    device ──► mapped file                        one pass
    publisher thread   hash, canary ──► manifest ──► rename          one pass each, over memory
                       after the announcement, of a kept snapshot: mapped file ──► disk, with fsync

Nothing that comes before the announcement waits for a disk.
"""

import contextlib
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from tba.common.log import get_logger
from tba.common.run_snapshots import weights_directory
from tba.common.system.durable import publish_directory, temporary_directory
from tba.common.weights import snapshot
from tba.common.weights.delta import DeltaStore
from tba.common.weights.node_store import delete
from tba.common.weights.snapshot import MANIFEST, directory_name
from tba.common.weights.tensor_file import layout_of
from tba.trainer.model.adapters import MERGED, gathered
from tba.trainer.model.host_buffers import HostCopy
from tba.trainer.model.scorer import weights_of
from tba.trainer.publishing.snapshot_writer import DTYPES, WEIGHTS, Publication, SnapshotWriter, Written, is_full_disk
from tba.trainer.publishing.weights_files import WeightsFile, WeightsFilePool, same_layout

log = get_logger(__name__)

# Snapshots to keep that may wait for the disk, each with its copy of the weights.
_MAX_PENDING = 2


class MappedCopy(HostCopy):
    """A copy whose weights are, or will be, in a mapped file."""

    def __init__(self, copied: HostCopy, file: WeightsFile) -> None:
        super().__init__(copied.tensors, copied.done)
        self.copied, self.file = copied, file


@dataclass(frozen=True, slots=True)
class _Last:
    """The newest snapshot, which is the base of the next delta."""

    written: Written
    file: WeightsFile


class MemoryWriter(SnapshotWriter):
    """Publishes the weights of `model` with adapters merged into them."""

    gathers = (MERGED,)

    def _prepare(self) -> None:
        shapes = {name: torch.empty_like(one, device="meta") for name, one in weights_of(self._unwrapped).items()}
        saved = self._as_saved(shapes)
        # Whether the files hold the tensors in another form, such as the experts of a mixture one by one.
        self._converts = not same_layout(shapes, saved)
        dtypes = {name: DTYPES[self._dtype if one.is_floating_point() else one.dtype] for name, one in saved.items()}
        layout = layout_of({name: (dtypes[name], tuple(one.shape)) for name, one in saved.items()})
        floor = self._config.train.min_free_mib << 20
        self._pool = WeightsFilePool(weights_directory(self._config), layout, self._model.device, floor)
        self.served = (self._pool.directory, self._directory)
        self._deltas = DeltaStore(self._pool.directory)
        self._deltas.clear()
        self._last: _Last | None = None
        self._pending: list[_Last] = []
        # A run is compared with its first snapshot: the step of the first publication, if none is on disk.
        self._first: int | None = -1 if snapshot.list_snapshots(self._directory) else None

    def copy(self, before: Callable[[], None]) -> HostCopy | None:
        """Copy all weights, rounded to the published dtype, into a mapped file; None if there is no room for it."""
        file = self._pool.acquire()
        if file is None:
            return None
        before()
        into = None if self._converts else file.tensors
        return MappedCopy(self._copies.copy(gathered(self._model, MERGED), self._dtype, into=into), file)

    def release(self, copy: HostCopy) -> None:
        """Use the memory of a publication that is replaced by a newer one."""
        assert isinstance(copy, MappedCopy)
        if self._converts:
            self._copies.release(copy.copied)
        self._pool.give_back(copy.file)

    @property
    def no_room(self) -> str:
        """Why `copy` made none."""
        return self._pool.shortage

    def shortage(self, publication: Publication) -> str:  # noqa: ARG002
        """Nothing more is needed once there is a file."""
        return ""

    def write(self, publication: Publication) -> Written:
        """Hash, prove and seal the weights of a publication."""
        copy, version = publication.copy, publication.version
        assert isinstance(copy, MappedCopy)
        weights, file = copy.wait(), copy.file
        if self._converts:
            for name, tensor in self._as_saved(weights).items():
                file.tensors[name].copy_(tensor)
        # Such as the manifest of an attempt without enough space: this one would name it.
        file.clear()
        # Both only read, and neither holds the interpreter's lock while it does.
        with ThreadPoolExecutor(1, "hash") as hashing:
            hashed = hashing.submit(file.describe)
            canary = self._make_canary(weights)
        self._write_other_files(file.path)
        files = {path.name: snapshot.describe_file(path) for path in file.path.iterdir() if path.name != WEIGHTS}
        files[WEIGHTS] = hashed.result()
        manifest = self._manifest(version, publication.step, canary, files)
        if (last := self._last) is not None and self._config.train.serve_snapshots:
            delta = self._deltas.build(version, last.written.key, last.file.bits, file.bits)
            manifest = replace(manifest, delta=delta)
        try:
            digest = self._pool.seal(file, manifest)
        except BaseException:
            self._deltas.discard(version)
            raise
        if self._converts:
            self._copies.release(copy.copied)
        written = Written(manifest, digest, file.path)
        self._deltas.publish(written.path, manifest)
        self._last = _Last(written, file)
        return written

    # ------------------------------------------------------------ after the announcement

    def announced(self, written: Written) -> None:
        """Let older files be used again, and note whether this snapshot is to be kept."""
        assert self._last is not None
        if self.is_kept_step(written.manifest.step):
            self._note(self._last)
        self._pool.announced()

    def is_kept_step(self, step: int) -> bool:
        """Whether a snapshot is written to disk: the first of a run, the last, and every `keep_snapshot_every`-th."""
        if self._first is None:
            self._first = step
        return step == self._first or self._config.train.keeps_snapshot(step)

    def _note(self, one: _Last) -> None:
        one.file.kept = True
        self._pending.append(one)
        while len(self._pending) > _MAX_PENDING:
            dropped = self._pending.pop(0)
            dropped.file.kept = False
            log.warning("snapshot not kept", version=dropped.written.manifest.version, reason="a newer one waits, too")

    @property
    def pending(self) -> bool:
        """Whether a snapshot that is to be kept is not on disk yet."""
        return bool(self._pending)

    def write_kept(self) -> str:
        """Write the snapshots that are to be kept to disk. Returns a sentence if there is no space, else ""."""
        while self._pending:
            one = self._pending[0]
            version = one.written.manifest.version
            if shortage := self._shortage(version, one.file.content.nbytes):
                return shortage
            try:
                self._write_to_disk(one)
            except OSError as error:
                if not is_full_disk(error):
                    raise
                return f"v{version} waits for disk space: {error}"
            one.file.kept = False
            self._pending.pop(0)
        return ""

    def mark_newest_kept(self) -> None:
        """Note that the newest snapshot is to be kept: the trainer stops, and memory is lost with the machine."""
        if self._last is None or self._last in self._pending:
            return
        if not (self._directory / directory_name(self._last.written.manifest.version)).is_dir():
            self._note(self._last)

    def _write_to_disk(self, one: _Last) -> None:
        final = self._directory / directory_name(one.written.manifest.version)
        temporary = temporary_directory(final)
        try:
            for name in (*one.written.manifest.files, MANIFEST):
                if name != WEIGHTS:
                    shutil.copyfile(one.written.path / name, temporary / name)
            (temporary / WEIGHTS).write_bytes(one.file.content.data)
            publish_directory(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def close(self, *, finished: bool) -> None:
        """Release all files. After the end of the run nothing asks for them."""
        newest = self._last.written.path if self._last is not None else None
        self._last = None
        self._pool.close()
        if finished:
            self._deltas.clear()
            if newest is not None:
                delete(newest)
            with contextlib.suppress(OSError):
                self._pool.directory.rmdir()
