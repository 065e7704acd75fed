"""Write snapshots into a directory: the base class of the three writers.

Invariant: a name under the directory never changes its content.

    MemoryWriter   (memory_writer)    all weights, in mapped files; on disk only what is kept
    DiskWriter     (disk_writer)      all weights, on disk
    AdapterWriter  (adapter_writer)   a base once, then adapters, on disk
"""

import errno
import json
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tba.common.config import Config
from tba.common.system.durable import json_text, temporary_directory
from tba.common.weights import snapshot
from tba.common.weights.model_files import share_weights
from tba.common.weights.snapshot import Canary, FileEntry, Manifest, SnapshotKey, directory_name
from tba.common.weights.tensor_file import Tensor
from tba.common.wire.messages import AnnounceSnapshot, WeightsRef
from tba.trainer.model.host_buffers import HostBuffers, HostCopy, Tensors
from tba.trainer.model.transfers import own_stream
from tba.trainer.preflight.shape import experts_per_token
from tba.trainer.publishing.canary import canary_sequences, make_canary, skeleton

WEIGHTS = "model.safetensors"
# Everything that belongs to a model directory and is not its weights: tokenizer, templates, generation settings.
_COPIED_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}

DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64",
           torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
           torch.int64: "I64"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Publication:
    """The policy of a step, being copied to the host: its weights in the published dtype, or its adapters in float32.

    `base_version` is reserved for the base of the adapters, in case it must be published first. A `kept` one is
    published even if a newer one is there.
    """

    version: int
    step: int
    copy: HostCopy
    base_version: int | None = None
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """A complete snapshot under its final name."""

    manifest: Manifest
    manifest_sha256: str
    path: Path

    @property
    def key(self) -> SnapshotKey:
        """The snapshot as the base of a delta."""
        return SnapshotKey(self.manifest.version, self.manifest_sha256)

    @property
    def exists(self) -> bool:
        """Whether the directory still exists: a person may have deleted it."""
        return (self.path / snapshot.MANIFEST).is_file()

    def announcement(self, address: str) -> AnnounceSnapshot:
        """The message to the buffer. `address` is that of the trainer's file server, or empty."""
        ref = WeightsRef(
            version=self.manifest.version,
            step=self.manifest.step,
            path=str(self.path),
            manifest_sha256=self.manifest_sha256,
            address=address,
        )
        return AnnounceSnapshot(weights=ref, bytes=sum(entry.bytes for entry in self.manifest.files.values()))


def is_full_disk(error: Exception) -> bool:
    """Whether a write failed because the disk is full. The safetensors package passes the system's error as text."""
    if isinstance(error, SafetensorError):
        return f"os error {errno.ENOSPC}" in str(error) or f"os error {errno.EDQUOT}" in str(error)
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def as_saved(unwrapped: PreTrainedModel, weights: Tensors) -> Tensors:
    """Rename and reshape tensors as in the model's own files, which may differ from those in memory."""
    reverted = revert_weight_conversion(unwrapped, weights)
    return {name: tensor.contiguous() for name, tensor in reverted.items()}


def write_model(directory: Path, saved: Tensors, source: Path, unwrapped: PreTrainedModel, dtype: torch.dtype) -> None:
    """Write a complete model directory: weights from `as_saved`, of one dtype, and the settings of `source`."""
    copy_settings(source, directory, unwrapped, dtype)
    save_file(saved, directory / WEIGHTS, metadata={"format": "pt"})
    share_weights(directory)


def copy_settings(source: Path, directory: Path, unwrapped: PreTrainedModel, dtype: torch.dtype) -> None:
    """Copy tokenizer and settings of a model as they are; write config.json with the dtype of the new weights.

    transformers' `save_pretrained` would refuse generation settings that it accepts when it loads them.
    """
    for path in source.iterdir():
        skipped = path.name in ("config.json", snapshot.MANIFEST) or path.name.endswith(".index.json")
        if path.is_file() and path.suffix in _COPIED_SUFFIXES and not skipped:
            shutil.copyfile(path, directory / path.name)
    fields = json.loads((source / "config.json").read_text(encoding="utf-8"))
    fields.setdefault("architectures", [type(unwrapped).__name__])
    for name in {"dtype", "torch_dtype"} & fields.keys() or {"dtype"}:
        fields[name] = str(dtype).removeprefix("torch.")
    (directory / "config.json").write_bytes(json_text(fields).encode())


class SnapshotWriter(ABC):
    """Turns the policy `model` into snapshots.

    `unwrapped` has the structure of the model as in its files, which are in `model_files`. The training thread uses
    `gathers`, `copy` and `needs_base`, the publisher's thread everything else.
    """

    def __init__(
        self,
        config: Config,
        model: PreTrainedModel,
        copies: HostBuffers,
        *,
        unwrapped: PreTrainedModel,
        model_files: Path,
    ) -> None:
        self._config = config
        self._model = model
        self._copies = copies
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._unwrapped = unwrapped
        self._model_files = model_files
        long = model.device.type != "cpu" or bool(experts_per_token(unwrapped))
        sequences = canary_sequences(model_files, model.get_input_embeddings().num_embeddings, long=long)
        self._make_canary = partial(
            make_canary,
            skeleton(unwrapped),
            sequences=sequences,
            device=model.device,
            stream=own_stream(model.device),
        )
        self._directory = config.snapshots.resolve()
        # The directories of its snapshots, for the file server.
        self.served: tuple[Path, ...] = (self._directory,)
        self._prepare()

    def _prepare(self) -> None:  # noqa: B027
        """Set up what only this kind of writer has."""

    @property
    @abstractmethod
    def gathers(self) -> tuple[str, ...]:
        """What `copy` gathers from all ranks: arguments of `tba.trainer.model.adapters.gathered`, in order."""

    @abstractmethod
    def copy(self, before: Callable[[], None]) -> HostCopy | None:
        """Start to copy the current policy to the host. None if there is no room, with the reason in `no_room`.

        `before` is called once there is room, before the policy is read: other ranks may have to take part.
        """

    def release(self, copy: HostCopy) -> None:
        """Use the memory of a publication that is replaced by a newer one. Thread-safe."""
        self._copies.release(copy)

    @property
    def no_room(self) -> str:
        """Why `copy` made none."""
        return ""

    def needs_base(self, step: int) -> bool:  # noqa: ARG002
        """Whether the snapshot of a step may need a base to be published first, which then needs a version."""
        return False

    @abstractmethod
    def write(self, publication: Publication) -> Written:
        """Write a snapshot under its final name. After an error no file is left, and the copy stays valid."""

    def protected_paths(self) -> tuple[Path, ...]:
        """Snapshots that must not be deleted."""
        return ()

    def announced(self, written: Written) -> None:  # noqa: B027
        """The snapshot that was written last is announced."""

    def is_kept_step(self, step: int) -> bool:
        """Whether the snapshot of a step must be published even if a newer one is there."""
        return self._config.train.keeps_snapshot(step)

    @property
    def pending(self) -> bool:
        """Whether something is left to be done after the announcement, by `write_kept`."""
        return False

    def write_kept(self) -> str:
        """Write to disk what is kept and only in memory. Returns a sentence if there is no disk space, else ""."""
        return ""

    def mark_newest_kept(self) -> None:  # noqa: B027
        """The trainer stops: let `write_kept` write what would be lost."""

    def close(self, *, finished: bool) -> None:  # noqa: B027
        """Release everything. `finished` means that the run is."""

    def shortage(self, publication: Publication) -> str:
        """A sentence if writing would leave less than `train.min_free_mib` of disk space, else empty."""
        return self._shortage(publication.version, self._bytes_needed(publication))

    def _shortage(self, version: int, needed: int) -> str:
        floor = self._config.train.min_free_mib << 20
        free = shutil.disk_usage(self._directory).free
        if not floor or free - needed >= floor:
            return ""
        return (
            f"v{version} waits for disk space: {self._directory} has {free >> 20} MiB free, a snapshot of "
            f"{needed >> 20} MiB must leave train.min_free_mib = {floor >> 20}"
        )

    def _bytes_needed(self, publication: Publication) -> int:
        return bytes_of(publication.copy)

    def _is_last(self, step: int) -> bool:
        """Whether the snapshot of this step is the last of the run."""
        return step >= self._config.train.steps

    def _as_saved(self, weights: Tensors) -> Tensors:
        return as_saved(self._unwrapped, weights)

    def _publish(self, version: int, build: Callable[[Path], Manifest]) -> Written:
        """Let `build` fill an empty directory, then rename it. After an error no file is left."""
        final = self._directory / directory_name(version)
        temporary = temporary_directory(final)
        try:
            manifest = build(temporary)
            digest = snapshot.seal(temporary, final, manifest)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return Written(manifest, digest, final)

    def _write_full(
        self, directory: Path, version: int, step: int, canary: Canary, saved: Tensors, *, only_base: bool = False
    ) -> Manifest:
        """Write a complete model directory with weights from `_as_saved`."""
        write_model(directory, saved, self._model_files, self._unwrapped, self._dtype)
        files = snapshot.describe_files(directory)
        return replace(self._manifest(version, step, canary, files), only_base=only_base)

    def _manifest(self, version: int, step: int, canary: Canary, files: dict[str, FileEntry]) -> Manifest:
        """The manifest of a full snapshot, written now."""
        return Manifest(
            run=self._config.run.name, version=version, step=step, created_at=time.time(), files=files, canary=canary
        )

    def _write_other_files(self, directory: Path) -> None:
        copy_settings(self._model_files, directory, self._unwrapped, self._dtype)

    def _based_on(
        self, base: Written, publication: Publication, canary: Canary, files: dict[str, FileEntry]
    ) -> Manifest:
        """Build the manifest of an adapter on `base`, published as `files`."""
        return replace(
            self._manifest(publication.version, publication.step, canary, files),
            base=base.manifest.version,
            base_manifest_sha256=base.manifest_sha256,
            complete=base.manifest.files,
        )


def bytes_of(copy: HostCopy) -> int:
    """The size of a copy in bytes."""
    return sum(tensor.nbytes for tensor in copy.tensors.values())


def as_bits(tensor: torch.Tensor) -> Tensor:
    """View a contiguous host tensor as unsigned integers of the same width; shares its memory."""
    bits = tensor.reshape(-1).view(torch.uint8).numpy().view(f"u{tensor.element_size()}")
    return Tensor(DTYPES[tensor.dtype], tuple(tensor.shape), bits)
