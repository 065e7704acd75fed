"""Writing one snapshot after another into a directory: full, or as what changed since the one before.

Invariants: a name under the directory never changes its content; the base of a delta is a snapshot that was written
here, held as the very tensors that went into its file.
"""

import errno
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tba.common import delta, snapshot
from tba.common.config import Config
from tba.common.durable import temporary_directory, write_json
from tba.common.model_files import share_weights
from tba.common.snapshot import Canary, FileEntry, Manifest, directory_name
from tba.common.tensor_file import Layout, Tensor, fits, read_layout, sha256_of_tensors, write_tensor_file
from tba.common.wire import AnnounceSnapshot, WeightsRef
from tba.trainer.host_copies import HostCopy

WEIGHTS = "model.safetensors"
# A delta saves bytes on the way and costs the searcher a copy of its base: it has to be worth that.
_LARGEST_DELTA = 0.5
# Everything that belongs to a model directory and is not its weights: tokenizer, templates, generation settings.
_COPIED_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}
_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64",
           torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
           torch.int64: "I64"}  # fmt: skip
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


@dataclass(frozen=True, slots=True)
class Publication:
    """The weights of a step, on their way to the host in the published type."""

    version: int
    step: int
    copy: HostCopy


@dataclass(frozen=True, slots=True)
class _Written:
    """The snapshot that the next delta applies to."""

    manifest: Manifest
    manifest_sha256: str
    layout: Layout  # of the complete weights file
    tensors: dict[str, Tensor]
    deltas: int  # since the last full one


def is_full_disk(error: Exception) -> bool:
    """Whether writing failed for want of space. The safetensors package hands on the system's error as text."""
    if isinstance(error, SafetensorError):
        return f"os error {errno.ENOSPC}" in str(error) or f"os error {errno.EDQUOT}" in str(error)
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


class SnapshotWriter:
    """Writes the snapshots of one model. `model_files` is the directory the model came from."""

    def __init__(self, config: Config, model: PreTrainedModel, model_files: Path, *, address: str) -> None:
        self._config = config
        self._model = model
        self._model_files = model_files
        self._address = address
        self._directory = config.snapshots.resolve()
        self._last: _Written | None = None

    def shortage(self, publication: Publication) -> str:
        """Why there is no space for a snapshot, in a sentence; empty if there is."""
        floor = self._config.train.min_free_mib << 20
        needed = sum(tensor.nbytes for tensor in publication.copy.tensors.values())
        free = shutil.disk_usage(self._directory).free
        if not floor or free - needed >= floor:
            return ""
        return (
            f"v{publication.version} waits for disk space: {self._directory} has {free >> 20} MiB free, a snapshot of "
            f"{needed >> 20} MiB must leave train.min_free_mib = {floor >> 20}"
        )

    def write(self, publication: Publication, canary: Canary) -> AnnounceSnapshot:
        """Publish a snapshot under its name. An error leaves nothing behind.

        The copy that it comes from is the base of the next delta: it must stay as it is until another one is written.
        """
        final = self._directory / directory_name(publication.version)
        temporary = temporary_directory(final)
        # The names and layouts that the model's own files have, which may differ from those in memory.
        reverted = revert_weight_conversion(self._model, publication.copy.wait())
        weights = {name: tensor.contiguous() for name, tensor in reverted.items()}
        tensors = {name: _as_bits(tensor) for name, tensor in weights.items()}
        try:
            manifest = self._write_delta(temporary, publication, canary, tensors)
            if manifest is None:
                manifest = self._write_full(temporary, publication, canary, weights)
            digest = snapshot.seal(temporary, final, manifest)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._remember(manifest, digest, final, tensors)
        ref = WeightsRef(
            version=publication.version,
            step=publication.step,
            path=str(final),
            manifest_sha256=digest,
            address=self._address,
        )
        return AnnounceSnapshot(weights=ref, bytes=sum(entry.bytes for entry in manifest.files.values()))

    def _write_full(
        self, temporary: Path, publication: Publication, canary: Canary, weights: dict[str, torch.Tensor]
    ) -> Manifest:
        _copy_model_files(self._model_files, temporary, self._model, self._config.model.dtype)
        save_file(weights, temporary / WEIGHTS, metadata={"format": "pt"})
        share_weights(temporary)
        return self._manifest(publication, canary, snapshot.describe_files(temporary))

    def _write_delta(
        self, temporary: Path, publication: Publication, canary: Canary, tensors: dict[str, Tensor]
    ) -> Manifest | None:
        """A delta, where there may be one and it is worth it; else None, and nothing is written."""
        last = self._last
        if last is None or self._must_be_full(publication.step, last) or not fits(last.layout, tensors):
            return None
        whole = sum(tensor.bits.nbytes for tensor in tensors.values())
        changed = delta.build_delta(last.tensors, tensors, most_bytes=_LARGEST_DELTA * whole)
        if changed is None:
            return None
        published = FileEntry(*write_tensor_file(temporary / delta.FILE, changed))
        before = last.manifest.complete_files
        made = FileEntry(before[WEIGHTS].bytes, sha256_of_tensors(last.layout, tensors))
        return self._manifest(publication, canary, {delta.FILE: published}, last, {**before, WEIGHTS: made})

    def _must_be_full(self, step: int, last: _Written) -> bool:
        train = self._config.train
        kept = train.keep_snapshot_every and step % train.keep_snapshot_every == 0
        # Somebody may have tidied up by hand.
        lost = not (self._directory / directory_name(last.manifest.version) / snapshot.MANIFEST).is_file()
        return bool(last.deltas + 1 >= train.full_snapshot_every or kept or step >= train.steps or lost)

    def _manifest(
        self,
        publication: Publication,
        canary: Canary,
        files: dict[str, FileEntry],
        base: _Written | None = None,
        complete: dict[str, FileEntry] | None = None,
    ) -> Manifest:
        return Manifest(
            run=self._config.run.name,
            version=publication.version,
            step=publication.step,
            created_at=time.time(),
            files=files,
            canary=canary,
            base=base.manifest.version if base else None,
            base_manifest_sha256=base.manifest_sha256 if base else None,
            complete=complete,
        )

    def _remember(self, manifest: Manifest, digest: str, final: Path, tensors: dict[str, Tensor]) -> None:
        if manifest.base is None or self._last is None:
            layout, deltas = read_layout(final / WEIGHTS), 0
        else:
            layout, deltas = self._last.layout, self._last.deltas + 1
        self._last = _Written(manifest, digest, layout, tensors, deltas)


def _as_bits(tensor: torch.Tensor) -> Tensor:
    """A contiguous tensor of the host as its bits; shares its memory."""
    flat = tensor.reshape(-1)
    bits = flat.view(_BITS[flat.element_size()]).numpy().view(_UNSIGNED[flat.element_size()])
    return Tensor(_DTYPES[tensor.dtype], tuple(tensor.shape), bits)


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
