"""Snapshots of adapters: the base once and in full, then only its adapters, each on that base and on no other.

    base      the model that training started from, rounded to the published type: the policy of step 0
    adapter   A and B of each layer; what they make of the base is defined bit for bit in `tba.common.low_rank`

Invariant: every snapshot of a step after 0, full or adapter, has the weights that a searcher makes of base and adapter.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from tba.common import adapter
from tba.common.durable import sha256_of
from tba.common.errors import ConfigError, SnapshotError
from tba.common.log import get_logger
from tba.common.low_rank import MERGED_DTYPES, Factors, merge
from tba.common.snapshot import MANIFEST, Canary, FileEntry, Manifest, check_hash, list_snapshots, read
from tba.common.tensor_file import Layout, Tensor, fits, read_layout, sha256_of_tensors, write_tensor_file
from tba.trainer.adapters import BASE, FACTORS, gathered, scalings
from tba.trainer.host_copies import HostCopies, HostCopy, Tensors
from tba.trainer.snapshot_writer import WEIGHTS, Publication, SnapshotWriter, Written, bytes_of
from tba.trainer.tensor_bits import as_bits

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Base:
    """The published base and the layout of its weights file."""

    written: Written
    layout: Layout


class AdapterWriter:
    """Publishes the adapters of `model`. Implements `Writer`.

    The host holds the base twice over: as it is, and with the newest adapters merged.
    """

    def __init__(self, writer: SnapshotWriter, model: PreTrainedModel, copies: HostCopies) -> None:
        self._writer = writer
        self._model = model
        self._copies = copies
        self._dtype: torch.dtype = getattr(torch, writer.config.model.dtype)
        self._scalings = scalings(model)
        self._base_copy: HostCopy | None = None
        self._base: _Base | None = None
        self._base_comes = False  # with a snapshot that was asked for, or it is there; the training thread's
        self._merging: _Merging | None = None

    @property
    def gathers(self) -> tuple[str, ...]:
        """The base goes to the host once: it never changes."""
        return (FACTORS,) if self._base_copy else (BASE, FACTORS)

    def copy(self) -> HostCopy:
        """The adapters, and the first time the base as well."""
        if self._base_copy is None:
            self._base_copy = self._copies.copy(gathered(self._model, BASE), self._dtype)
        return self._copies.copy(gathered(self._model, FACTORS), torch.float32)

    def needs_base(self, step: int) -> bool:
        """After step 0, unless the base is there or comes first. What an earlier start has left is not known yet."""
        if self._writer.is_last(step):
            return False
        if self._base is not None and not self._has_base():
            self._base_comes = False
        needed = step > 0 and not self._base_comes
        self._base_comes = True
        return needed

    def keeps(self) -> tuple[Path, ...]:
        """The base, also while all snapshots that are kept are full ones."""
        return (self._base.written.path,) if self._base else ()

    def shortage(self, publication: Publication) -> str:
        """As for the adapters alone, or for all weights where the snapshot is full, and the base if it is not there."""
        self._start()
        needed = bytes_of(publication.copy) + self._wholes(publication) * bytes_of(self._copied_base())
        return self._writer.shortage(publication.version, needed)

    def _wholes(self, publication: Publication) -> int:
        """How many snapshots of all weights `write` will make: the base, or a full one, or both."""
        if not self._has_base() and publication.step == 0:
            return 1
        base = self._base_first(publication)
        full = self._writer.must_be_full(publication.step) or not (base or self._has_base())
        return int(base) + int(full)

    def _base_first(self, publication: Publication) -> bool:
        """Whether the base has to be published before: nothing will be based on it after the last step."""
        wanted = publication.base_version is not None and not self._writer.is_last(publication.step)
        return wanted and not self._has_base()

    def write(self, publication: Publication) -> Written:
        """Publish the adapters, or all weights with them merged."""
        written = self._write(publication)
        self._copies.give_back(publication.copy)
        return written

    def _write(self, publication: Publication) -> Written:
        merging = self._start()
        if publication.step == 0 and not self._has_base():  # every B is zero
            return self._publish_base(publication.version).written
        if self._base_first(publication):
            assert publication.base_version is not None
            self._publish_base(publication.base_version, only_base=True)
        factors = _factors_of(publication.copy.wait(), self._scalings)
        weights = merging.merged(factors)
        canary = self._writer.make_canary(weights)
        saved = self._writer.as_saved(weights)

        def make(directory: Path) -> Manifest:
            # Without a base it was deleted just now: it is asked for with the next one.
            if self._base is None or not self._has_base() or self._writer.must_be_full(publication.step):
                version, step = publication.version, publication.step
                return self._writer.write_full(directory, version, step, canary, saved)
            return self._write_adapter(directory, publication, canary, self._base, merging.renamed(factors), saved)

        return self._writer.publish(publication.version, make)

    def _write_adapter(
        self,
        directory: Path,
        publication: Publication,
        canary: Canary,
        base: _Base,
        factors: dict[str, Factors],
        saved: Tensors,
    ) -> Manifest:
        entry = FileEntry(*write_tensor_file(directory / adapter.FILE, adapter.tensors_of(factors)))
        sha256 = sha256_of_tensors(base.layout, {name: as_bits(tensor) for name, tensor in saved.items()})
        return self._writer.based_on(base.written, publication, canary, {adapter.FILE: entry}, sha256)

    # ------------------------------------------------------------ the base

    def _start(self) -> "_Merging":
        """What merges, from the first snapshot on, and the base that an earlier start has left."""
        if self._merging is None:
            weights = self._copied_base().wait()
            saved = self._writer.as_saved(weights)
            self._merging = _Merging(weights, saved, list(self._scalings))
            self._base = self._find_base({name: as_bits(tensor) for name, tensor in saved.items()})
        return self._merging

    def _copied_base(self) -> HostCopy:
        assert self._base_copy is not None, "copied with the first adapters"
        return self._base_copy

    def _has_base(self) -> bool:
        return self._base is not None and self._base.written.is_there

    def _find_base(self, tensors: dict[str, Tensor]) -> _Base | None:
        """A full snapshot of step 0 that has the very files that one of the base would have, undamaged."""
        others = self._writer.hashes_of_model_files()
        for path in list_snapshots(self._writer.directory):
            try:
                manifest = read(path).manifest
                hashes = {name: entry.sha256 for name, entry in manifest.files.items()}
                weights = hashes.pop(WEIGHTS, None)
                if manifest.base is not None or manifest.step != 0 or hashes != others:
                    continue
                layout = read_layout(path / WEIGHTS)
                if not fits(layout, tensors) or sha256_of_tensors(layout, tensors) != weights:
                    continue
                # Every adapter of this start will be made of these files: they are read once, not trusted.
                for name, entry in manifest.files.items():
                    check_hash(path / name, entry.sha256)
            except SnapshotError as error:
                log.warning("snapshot is no base for adapters", path=path, reason=str(error))
                continue
            return _Base(Written(manifest, sha256_of(path / MANIFEST), path), layout)
        return None

    def _publish_base(self, version: int, *, only_base: bool = False) -> _Base:
        weights = self._copied_base().wait()
        canary, saved = self._writer.make_canary(weights), self._writer.as_saved(weights)
        written = self._writer.publish(
            version,
            lambda directory: self._writer.write_full(directory, version, 0, canary, saved, only_base=only_base),
        )
        self._base = _Base(written, read_layout(written.path / WEIGHTS))
        return self._base


class _Merging:
    """The rounded base `weights`, its names in files (`saved`), and memory for what adapters make of `targets`."""

    def __init__(self, weights: Tensors, saved: Tensors, targets: list[str]) -> None:
        self._weights = weights
        self._targets = targets
        self._names = _names_in_files(weights, saved, targets)
        self._base = {name: as_bits(weights[name]) for name in targets}
        self._merged = {name: torch.empty_like(weights[name]) for name in targets}
        self._into = {name: as_bits(tensor) for name, tensor in self._merged.items()}

    def merged(self, factors: dict[str, Factors]) -> Tensors:
        """All weights, under the names in memory, with the factors merged in; valid until the next call."""
        merge(self._base, factors, self._into)
        return {**self._weights, **self._merged}

    def renamed(self, factors: dict[str, Factors]) -> dict[str, Factors]:
        """The factors under the names that their weights have in files."""
        return {self._names[name]: factor for name, factor in factors.items()}


def _names_in_files(weights: Tensors, saved: Tensors, targets: list[str]) -> dict[str, str]:
    """The name of each target in files. Raises ConfigError for one that is stored as something else."""
    places = {(tensor.data_ptr(), tensor.shape): name for name, tensor in saved.items()}
    names = {name: places.get((weights[name].data_ptr(), weights[name].shape)) for name in targets}
    for name, found in names.items():
        if found is None or as_bits(weights[name]).dtype not in MERGED_DTYPES:
            raise ConfigError(
                f'lora.publish = "adapter" cannot be had with an adapter of {name}, which the model\'s files store in '
                'another form: set lora.publish = "merged", or lora.targets without it'
            )
    return {name: found for name, found in names.items() if found is not None}


def _factors_of(copied: Tensors, scaling: dict[str, float]) -> dict[str, Factors]:
    """The factors of each target, as they were copied."""
    return {
        name: Factors(
            copied[f"{adapter.LOW}/{name}"].numpy(), copied[f"{adapter.HIGH}/{name}"].numpy(), np.float32(value)
        )
        for name, value in scaling.items()
    }
