"""Writing snapshots into a directory: what full ones, deltas and adapters have in common.

Invariant: a name under the directory never changes its content.

    WholeWriter    (tba.trainer.whole_writer)     all weights: full, or as what changed since the snapshot before
    AdapterWriter  (tba.trainer.adapter_writer)   a base once, then adapters
"""

import errno
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tba.common import snapshot
from tba.common.config import Config
from tba.common.durable import json_text, temporary_directory
from tba.common.model_files import share_weights
from tba.common.snapshot import Canary, FileEntry, Manifest, directory_name
from tba.common.wire import AnnounceSnapshot, WeightsRef
from tba.trainer.host_copies import HostCopy, Tensors

WEIGHTS = "model.safetensors"
# Everything that belongs to a model directory and is not its weights: tokenizer, templates, generation settings.
_COPIED_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}


@dataclass(frozen=True, slots=True)
class Publication:
    """The policy of a step on its way to the host: its weights in the published type, or its adapters in float32.

    `base_version` is a number for the adapters' base, should that have to be published first.
    """

    version: int
    step: int
    copy: HostCopy
    base_version: int | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """A snapshot that has its name."""

    manifest: Manifest
    manifest_sha256: str
    path: Path

    @property
    def is_there(self) -> bool:
        """Whether it still is: somebody may have tidied up by hand."""
        return (self.path / snapshot.MANIFEST).is_file()

    def announcement(self, address: str) -> AnnounceSnapshot:
        """What the buffer is told. `address` is that of the trainer's file server, or empty."""
        ref = WeightsRef(
            version=self.manifest.version,
            step=self.manifest.step,
            path=str(self.path),
            manifest_sha256=self.manifest_sha256,
            address=address,
        )
        return AnnounceSnapshot(weights=ref, bytes=sum(entry.bytes for entry in self.manifest.files.values()))


class Writer(Protocol):
    """How the policy becomes snapshots. The first two are the training thread's, the others the publisher's."""

    @property
    def gathers(self) -> tuple[str, ...]:
        """What `copy` puts together from all ranks: arguments of `tba.trainer.adapters.gathered`, in order."""

    def copy(self) -> HostCopy:
        """The policy as it is now, on its way to the host."""

    def needs_base(self, step: int) -> bool:
        """Whether the snapshot of a step may have to be preceded by another, which needs a version then."""

    def shortage(self, publication: Publication) -> str:
        """Why there is no space for a snapshot, in a sentence; empty if there is."""

    def write(self, publication: Publication) -> Written:
        """Publish a snapshot under its name. An error leaves nothing behind, and the copy is still needed."""

    def keeps(self) -> Iterable[Path]:
        """Snapshots that must not be collected."""


def is_full_disk(error: Exception) -> bool:
    """Whether writing failed for want of space. The safetensors package hands on the system's error as text."""
    if isinstance(error, SafetensorError):
        return f"os error {errno.ENOSPC}" in str(error) or f"os error {errno.EDQUOT}" in str(error)
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


class SnapshotWriter:
    """Writes the snapshots of one model. `model_files` is the directory the model came from."""

    def __init__(
        self, config: Config, model: PreTrainedModel, model_files: Path, make_canary: Callable[[Tensors], Canary]
    ) -> None:
        self.config = config
        self.directory = config.snapshots.resolve()
        self.make_canary = make_canary
        self._model = model
        self._model_files = model_files

    def shortage(self, version: int, needed: int) -> str:
        """Why there is no space for so many bytes, in a sentence; empty if there is."""
        floor = self.config.train.min_free_mib << 20
        free = shutil.disk_usage(self.directory).free
        if not floor or free - needed >= floor:
            return ""
        return (
            f"v{version} waits for disk space: {self.directory} has {free >> 20} MiB free, a snapshot of "
            f"{needed >> 20} MiB must leave train.min_free_mib = {floor >> 20}"
        )

    def must_be_full(self, step: int) -> bool:
        """Whether people may want the snapshot of this step as a model directory: the last, and those that are kept."""
        every = self.config.train.keep_snapshot_every
        return self.is_last(step) or bool(every and step % every == 0)

    def is_last(self, step: int) -> bool:
        """Whether no snapshot follows that of this step."""
        return step >= self.config.train.steps

    def as_saved(self, weights: Tensors) -> Tensors:
        """The names and layouts that the model's own files have, which may differ from those in memory."""
        reverted = revert_weight_conversion(self._model, weights)
        return {name: tensor.contiguous() for name, tensor in reverted.items()}

    def publish(self, version: int, make: Callable[[Path], Manifest]) -> Written:
        """Have a snapshot made in an empty directory, and give it its name. An error leaves nothing behind."""
        final = self.directory / directory_name(version)
        temporary = temporary_directory(final)
        try:
            manifest = make(temporary)
            digest = snapshot.seal(temporary, final, manifest)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return Written(manifest, digest, final)

    def write_full(
        self, directory: Path, version: int, step: int, canary: Canary, saved: Tensors, *, only_base: bool = False
    ) -> Manifest:
        """The files of a complete model directory, with weights from `as_saved`."""
        for name, content in self._files_beside_weights():
            (directory / name).write_bytes(content)
        save_file(saved, directory / WEIGHTS, metadata={"format": "pt"})
        share_weights(directory)
        return self._manifest(version, step, snapshot.describe_files(directory), canary, only_base=only_base)

    def hashes_of_model_files(self) -> dict[str, str]:
        """The sha256 of each file that a full snapshot written now would have beside its weights."""
        return {name: hashlib.sha256(content).hexdigest() for name, content in self._files_beside_weights()}

    def _files_beside_weights(self) -> Iterator[tuple[str, bytes]]:
        """Tokenizer and settings as they are; config.json with the type of the published weights."""
        for path in self._model_files.iterdir():
            skipped = path.name in ("config.json", snapshot.MANIFEST) or path.name.endswith(".index.json")
            if path.is_file() and path.suffix in _COPIED_SUFFIXES and not skipped:
                yield path.name, path.read_bytes()
        fields = json.loads((self._model_files / "config.json").read_text(encoding="utf-8"))
        fields.setdefault("architectures", [type(self._model).__name__])
        for name in {"dtype", "torch_dtype"} & fields.keys() or {"dtype"}:
            fields[name] = self.config.model.dtype
        yield "config.json", json_text(fields).encode()

    def based_on(
        self, base: Written, publication: Publication, canary: Canary, files: dict[str, FileEntry], sha256: str
    ) -> Manifest:
        """The manifest of `files` that make a weights file with this hash of the base's; its other files stay."""
        before = base.manifest.complete_files
        return self._manifest(
            publication.version,
            publication.step,
            files,
            canary,
            base=base.manifest.version,
            base_manifest_sha256=base.manifest_sha256,
            complete={**before, WEIGHTS: FileEntry(before[WEIGHTS].bytes, sha256)},
        )

    def _manifest(
        self,
        version: int,
        step: int,
        files: dict[str, FileEntry],
        canary: Canary,
        *,
        base: int | None = None,
        base_manifest_sha256: str | None = None,
        complete: dict[str, FileEntry] | None = None,
        only_base: bool = False,
    ) -> Manifest:
        return Manifest(
            run=self.config.run.name,
            version=version,
            step=step,
            created_at=time.time(),
            files=files,
            canary=canary,
            base=base,
            base_manifest_sha256=base_manifest_sha256,
            complete=complete,
            only_base=only_base,
        )


def bytes_of(copy: HostCopy) -> int:
    """The size of what is copied."""
    return sum(tensor.nbytes for tensor in copy.tensors.values())
