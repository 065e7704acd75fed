"""Snapshots of all weights: full, or as what changed since the snapshot before.

Invariant: the base of a delta is a snapshot that was written here, held as the very tensors that went into its file.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tba.common import delta
from tba.common.snapshot import Canary, FileEntry, Manifest
from tba.common.tensor_file import Layout, Tensor, fits, read_layout, sha256_of_tensors, write_tensor_file
from tba.trainer.adapters import MERGED, gathered
from tba.trainer.host_copies import HostCopies, HostCopy
from tba.trainer.snapshot_writer import WEIGHTS, Publication, SnapshotWriter, Written, bytes_of
from tba.trainer.tensor_bits import as_bits

# A delta saves bytes on the way and costs the searcher a copy of its base: it has to be worth that.
_LARGEST_DELTA = 0.5


@dataclass(frozen=True, slots=True)
class _Base:
    """The snapshot that the next delta applies to."""

    written: Written
    layout: Layout  # of the complete weights file
    tensors: dict[str, Tensor]
    copy: HostCopy  # the memory of the tensors
    deltas: int  # since the last full one


class WholeWriter:
    """Publishes the weights of `model`, adapters merged into them. Implements `Writer`."""

    gathers = (MERGED,)

    def __init__(self, writer: SnapshotWriter, model: PreTrainedModel, copies: HostCopies) -> None:
        self._writer = writer
        self._model = model
        self._copies = copies
        self._dtype: torch.dtype = getattr(torch, writer.config.model.dtype)
        self._last: _Base | None = None

    def copy(self) -> HostCopy:
        """All weights, rounded."""
        return self._copies.copy(gathered(self._model, MERGED), self._dtype)

    def needs_base(self, step: int) -> bool:  # noqa: ARG002
        """Never: a delta is on a snapshot that was announced."""
        return False

    def keeps(self) -> tuple[Path, ...]:
        """None: what a delta is based on is kept with it."""
        return ()

    def shortage(self, publication: Publication) -> str:
        """As for a full one: whether a delta will do is known when it is made."""
        return self._writer.shortage(publication.version, bytes_of(publication.copy))

    def write(self, publication: Publication) -> Written:
        """Publish all weights, or what changed. The copy is kept as the base of the next delta."""
        weights = publication.copy.wait()
        canary = self._writer.make_canary(weights)
        saved = self._writer.as_saved(weights)
        tensors = {name: as_bits(tensor) for name, tensor in saved.items()}

        def make(directory: Path) -> Manifest:
            manifest = self._write_delta(directory, publication, canary, tensors)
            if manifest is None:
                version, step = publication.version, publication.step
                manifest = self._writer.write_full(directory, version, step, canary, saved)
            return manifest

        written = self._writer.publish(publication.version, make)
        self._remember(written, publication.copy, tensors)
        return written

    def _write_delta(
        self, directory: Path, publication: Publication, canary: Canary, tensors: dict[str, Tensor]
    ) -> Manifest | None:
        """A delta, where there may be one and it is worth it; else None, and nothing is written."""
        last = self._last
        if last is None or self._must_be_full(publication.step, last) or not fits(last.layout, tensors):
            return None
        whole = sum(tensor.bits.nbytes for tensor in tensors.values())
        changed = delta.build_delta(last.tensors, tensors, most_bytes=_LARGEST_DELTA * whole)
        if changed is None:
            return None
        published = FileEntry(*write_tensor_file(directory / delta.FILE, changed))
        sha256 = sha256_of_tensors(last.layout, tensors)
        return self._writer.based_on(last.written, publication, canary, {delta.FILE: published}, sha256)

    def _must_be_full(self, step: int, last: _Base) -> bool:
        due = last.deltas + 1 >= self._writer.config.train.full_snapshot_every
        return due or self._writer.must_be_full(step) or not last.written.is_there

    def _remember(self, written: Written, copy: HostCopy, tensors: dict[str, Tensor]) -> None:
        last = self._last
        if written.manifest.base is None or last is None:
            layout, deltas = read_layout(written.path / WEIGHTS), 0
        else:
            layout, deltas = last.layout, last.deltas + 1
        self._last = _Base(written, layout, tensors, copy, deltas)
        if last is not None:
            self._copies.give_back(last.copy)
