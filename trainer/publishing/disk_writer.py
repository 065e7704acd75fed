"""Snapshots of all weights on disk, for searchers of other nodes that see the trainer's directory.

Invariant: the base of a delta is a snapshot that this process wrote, kept in memory as the tensors of its file.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tba.common.weights.delta import DeltaStore
from tba.common.weights.snapshot import Manifest
from tba.common.weights.tensor_file import Tensor
from tba.trainer.model.adapters import MERGED, gathered
from tba.trainer.model.host_buffers import HostCopy
from tba.trainer.publishing.snapshot_writer import Publication, SnapshotWriter, Written, as_bits


@dataclass(frozen=True, slots=True)
class _Base:
    """The snapshot that the next delta applies to."""

    written: Written
    tensors: dict[str, Tensor]
    copy: HostCopy
    """Owns the memory of `tensors`."""


class DiskWriter(SnapshotWriter):
    """Publishes the weights of `model` with adapters merged into them."""

    gathers = (MERGED,)
    _last: _Base | None = None

    def _prepare(self) -> None:
        self._deltas = DeltaStore(self._directory)
        self._deltas.clear()

    def copy(self, before: Callable[[], None]) -> HostCopy:
        """Copy all weights, rounded to the published dtype."""
        before()
        return self._copies.copy(gathered(self._model, MERGED), self._dtype)

    def write(self, publication: Publication) -> Written:
        """Publish all weights; keep the copy as the base of the next delta if nodes fetch."""
        weights, version = publication.copy.wait(), publication.version
        canary = self._make_canary(weights)
        saved = self._as_saved(weights)
        tensors = {name: as_bits(tensor) for name, tensor in saved.items()}

        def build(directory: Path) -> Manifest:
            manifest = self._write_full(directory, version, publication.step, canary, saved)
            last = self._last
            delta = self._deltas.build(version, last.written.key, last.tensors, tensors) if last else None
            return replace(manifest, delta=delta)

        try:
            written = self._publish(version, build)
        except BaseException:
            self._deltas.discard(version)
            raise
        self._deltas.publish(written.path, written.manifest)
        self._remember(_Base(written, tensors, publication.copy))
        return written

    def _remember(self, base: _Base) -> None:
        if not self._config.train.serve_snapshots:
            self._copies.release(base.copy)
            return
        if self._last is not None:
            self._copies.release(self._last.copy)
        self._last = base
