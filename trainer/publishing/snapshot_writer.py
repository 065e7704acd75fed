"""Snapshots of a policy: its copy on the host, and the files that are written from the copy.

Invariant: a name under a directory of snapshots never changes its content.

                 copied                             written before the announcement          after it
    in memory    all weights, to a mapped file      hash, canary, manifest, rename           kept ones to disk
    on disk      all weights, to host buffers       canary, files, fsync, manifest, rename
    adapters     the factors, and once the base     the base once and in full, then adapters
                                                    on it, on disk; kept ones with all weights

Nothing that comes before the announcement of a snapshot in memory waits for a disk. With full snapshots there are
deltas, if the trainer serves them to other nodes. The base of adapters is the model that training started from, rounded
to the published dtype: the policy of step 0.
"""

import contextlib
import errno
import json
import shutil
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tba.common.config import Config
from tba.common.errors import ConfigError
from tba.common.log import get_logger
from tba.common.run_snapshots import weights_directory
from tba.common.system.durable import json_text, new_directory, require_space
from tba.common.weights import adapter, snapshot
from tba.common.weights.adapter import Adapter, Factors
from tba.common.weights.delta import DeltaStore
from tba.common.weights.model_files import share_weights
from tba.common.weights.node_store import delete
from tba.common.weights.snapshot import MANIFEST, Canary, FileEntry, Manifest, SnapshotKey, directory_name
from tba.common.weights.tensor_file import Tensor, blake3_of_bytes, layout_of
from tba.common.wire.messages import AnnounceSnapshot, WeightsRef
from tba.common.wire.socket_files import is_local
from tba.trainer.distributed import ALONE, PUBLISH, Ranks
from tba.trainer.model.adapters import BASE, FACTORS, MERGED, A, B, gathered
from tba.trainer.model.host_buffers import HostBuffers, HostCopy, Tensors, own_stream
from tba.trainer.model.scorer import weights_of
from tba.trainer.preflight.shape import experts_per_token
from tba.trainer.publishing.canary import canary_sequences, make_canary, skeleton
from tba.trainer.publishing.weights_files import DTYPES, WEIGHTS, WeightsFile, WeightsFilePool

log = get_logger(__name__)

# Everything that belongs to a model directory and is not its weights: tokenizer, templates, generation settings.
_COPIED_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}
# Snapshots to keep that may wait for the disk, each with its copy of the weights.
_MAX_PENDING = 2


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


@dataclass(frozen=True, eq=False, slots=True)
class Written:
    """A complete snapshot under its final name.

    Of a full one `bits` are the tensors, whose memory `copy` owns: the base of the next delta, or to be kept on disk.
    """

    manifest: Manifest
    manifest_sha256: str
    path: Path
    bits: Mapping[str, Tensor] = field(default_factory=dict)
    copy: HostCopy | None = None

    @property
    def file(self) -> WeightsFile:
        """The mapped file of a snapshot in memory."""
        assert isinstance(self.copy, MappedCopy)
        return self.copy.file

    @property
    def exists(self) -> bool:
        """Whether the directory still exists: a person may have deleted it."""
        return (self.path / MANIFEST).is_file()

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


def in_memory(config: Config) -> bool:
    """Whether full snapshots between kept ones stay in memory: unless a searcher may need them on a disk."""
    if config.lora.publish == "adapter":
        return False
    if config.train.snapshots_in != "auto":
        return config.train.snapshots_in == "memory"
    here = is_local(config.address) or config.address.startswith(f"tcp://{socket.gethostname()}:")
    return here or bool(config.train.serve_snapshots)


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
        skipped = path.name in ("config.json", MANIFEST) or path.name.endswith(".index.json")
        if path.is_file() and path.suffix in _COPIED_SUFFIXES and not skipped:
            shutil.copyfile(path, directory / path.name)
    fields = json.loads((source / "config.json").read_text(encoding="utf-8"))
    fields.setdefault("architectures", [type(unwrapped).__name__])
    for name in {"dtype", "torch_dtype"} & fields.keys() or {"dtype"}:
        fields[name] = str(dtype).removeprefix("torch.")
    (directory / "config.json").write_bytes(json_text(fields).encode())


@dataclass(frozen=True, eq=False)
class MappedCopy(HostCopy):
    """A copy whose weights are, or will be, in a mapped file."""

    file: WeightsFile


class SnapshotWriter:
    """Copies the policy `model` to the host, and writes snapshots from the copies.

    `unwrapped` has the structure of the model as in its files, which are in `model_files`. The training thread uses
    `copy`, `no_room`, `needs_base` and, after the publisher's thread has ended, `close`; both threads use `release`,
    `is_kept_step` and `pending`, and the publisher's thread everything else.
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
        self._config, self._model, self._copies = config, model, copies
        self._unwrapped, self._model_files = unwrapped, model_files
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        long = model.device.type != "cpu" or bool(experts_per_token(unwrapped))
        sequences = canary_sequences(model_files, model.get_input_embeddings().num_embeddings, long=long)
        self.make_canary = partial(
            make_canary, skeleton(unwrapped), sequences=sequences, device=model.device, stream=own_stream(model.device)
        )
        self._directory = config.snapshots.resolve()
        self._adapters = config.lora.publish == "adapter"
        self._pool = self._make_pool() if in_memory(config) else None
        # The directories of the snapshots, for the file server: those that are announced, and those that are kept.
        self.served = (self._directory,) if self._pool is None else (self._pool.directory, self._directory)
        self._deltas = DeltaStore(self.served[0])
        self._deltas.clear()
        # The newest full snapshot, and those in memory that are to be written to disk.
        self._last: Written | None = None
        self.pending: list[Written] = []
        # A run is compared with its first snapshot: the step of the first publication, if none is on disk.
        self._first: int | None = -1 if snapshot.list_snapshots(self._directory) else None
        self._base_copy: HostCopy | None = None
        self._base: Written | None = None
        # Whether a base is published, or announced by a publication in the queue. Used by the training thread alone.
        self._base_announced = False
        self._names_checked = False

    def _make_pool(self) -> WeightsFilePool:
        shapes = {name: torch.empty_like(one, device="meta") for name, one in weights_of(self._unwrapped).items()}
        saved = as_saved(self._unwrapped, shapes)
        # Whether the files hold the tensors in another form, such as the experts of a mixture one by one.
        self._converts = not (shapes.keys() == saved.keys() and all(saved[name] is shapes[name] for name in shapes))
        dtypes = {name: DTYPES[self._dtype if one.is_floating_point() else one.dtype] for name, one in saved.items()}
        layout = layout_of({name: (dtypes[name], tuple(one.shape)) for name, one in saved.items()})
        floor = self._config.train.min_free_mib << 20
        return WeightsFilePool(weights_directory(self._config), layout, self._model.device, floor)

    # ------------------------------------------------------------ training thread

    def copy(self, ranks: Ranks = ALONE) -> HostCopy | None:
        """Start to copy the current policy to the host, rounded to the published dtype; adapters in float32.

        Other ranks are told to take part once there is room. None if there is none, with the reason in `no_room`.
        """
        if self._adapters:
            kinds = (FACTORS,) if self._base_copy else (BASE, FACTORS)
            ranks.send(PUBLISH, " ".join(kinds).encode())
            if self._base_copy is None:
                self._base_copy = self._copies.copy(gathered(self._model, BASE), self._dtype)
            return self._copies.copy(gathered(self._model, FACTORS), torch.float32)
        file = self._pool.acquire() if self._pool is not None else None
        if file is None and self._pool is not None:
            return None
        ranks.send(PUBLISH, MERGED.encode())
        into = None if file is None or self._converts else file.tensors
        copied = self._copies.copy(gathered(self._model, MERGED), self._dtype, into=into)
        return copied if file is None else MappedCopy(copied.tensors, copied.done, file)

    @property
    def no_room(self) -> str:
        return self._pool.no_room if self._pool is not None else ""

    def release(self, copy: HostCopy) -> None:
        """Use the memory of a copy again that is not published."""
        if isinstance(copy, MappedCopy):
            assert self._pool is not None
            self._pool.give_back(copy.file)
        self._release_buffers(copy)

    def _release_buffers(self, copy: HostCopy) -> None:
        if not isinstance(copy, MappedCopy) or self._converts:
            self._copies.release(copy)

    def needs_base(self, step: int) -> bool:
        """Whether a base of adapters must be published before the snapshot of this step, which then needs a version.

        This is so for the first one after a restart, and after the base was deleted by hand. Step 0 is the base itself,
        and nothing is based on the last snapshot.
        """
        if not self._adapters or self._is_last(step):
            return False
        if self._base is not None and not self._base.exists:
            self._base_announced = False
        needed = step > 0 and not self._base_announced
        self._base_announced = True
        return needed

    def is_kept_step(self, step: int) -> bool:
        """Whether the snapshot of a step stays on disk, and is published even if a newer one is there.

        In memory these are also the first of a run.
        """
        if self._pool is not None and self._first is None:
            self._first = step
        return step == self._first or self._config.train.keeps_snapshot(step)

    def _is_last(self, step: int) -> bool:
        return step >= self._config.train.steps

    # ------------------------------------------------------------ publisher thread

    def write(self, publication: Publication) -> Written:
        """Write a snapshot under its final name. After an error no file is left, and the copy stays valid.

        Raises OSError or SafetensorError; `is_full_disk` tells whether the reason is too little space.
        """
        if self._adapters:
            written = self._write_adapters(publication)
            self._copies.release(publication.copy)
            return written
        weights = publication.copy.wait()
        try:
            if isinstance(publication.copy, MappedCopy):
                full = self._write_mapped(publication, publication.copy, weights)
            else:
                self._require_space(bytes_of(publication.copy))
                full = self._write_full(publication.version, publication.step, weights, publication.copy)
        except BaseException:
            self._deltas.discard(publication.version)
            raise
        self._deltas.publish(full.path, full.manifest)
        # The next delta needs the last snapshot and its buffers. Without deltas, one on disk is needed by nothing.
        keeps_buffers = self._pool is None and bool(self._config.train.serve_snapshots)
        unused = self._last if keeps_buffers else full
        self._last = full if keeps_buffers or self._pool is not None else None
        if unused is not None and unused.copy is not None:
            self._release_buffers(unused.copy)
        # The caller keeps it until the announcement, which may wait for the buffer, and needs no tensor.
        return replace(full, bits={}, copy=None)

    def _write_mapped(self, publication: Publication, copy: MappedCopy, weights: Tensors) -> Written:
        """Hash and verify the weights in a mapped file, then mark them complete."""
        assert self._pool is not None
        file = copy.file
        if self._converts:
            for name, tensor in as_saved(self._unwrapped, weights).items():
                file.tensors[name].copy_(tensor)
        # An attempt that found too little space may have left a manifest, which this one would name.
        file.clear()
        # Both only read, and neither holds the interpreter's lock while it does.
        with ThreadPoolExecutor(1, "hash") as hashing:
            hashed = hashing.submit(blake3_of_bytes, file.content.data)
            canary = self.make_canary(weights)
        copy_settings(self._model_files, file.path, self._unwrapped, self._dtype)
        files = {path.name: snapshot.describe_file(path) for path in file.path.iterdir() if path.name != WEIGHTS}
        files[WEIGHTS] = FileEntry(file.content.nbytes, hashed.result())
        manifest = self._add_delta(self._manifest(publication.version, publication.step, canary, files), file.bits)
        digest = self._pool.seal(file, manifest)
        return Written(manifest, digest, file.path, file.bits, copy)

    def _write_full(
        self, version: int, step: int, weights: Tensors, copy: HostCopy, *, only_base: bool = False
    ) -> Written:
        """Write a complete model directory to disk."""
        canary, saved = self.make_canary(weights), as_saved(self._unwrapped, weights)
        bits = {name: as_bits(tensor) for name, tensor in saved.items()}
        final = self._directory / directory_name(version)
        with new_directory(final) as directory:
            write_model(directory, saved, self._model_files, self._unwrapped, self._dtype)
            manifest = self._manifest(version, step, canary, snapshot.describe_files(directory))
            manifest = self._add_delta(replace(manifest, only_base=only_base), bits)
            digest = snapshot.write_manifest(directory, manifest)
        return Written(manifest, digest, final, {} if self._adapters else bits, copy)

    def _manifest(self, version: int, step: int, canary: Canary, files: dict[str, FileEntry]) -> Manifest:
        return Manifest(
            run=self._config.run.name, version=version, step=step, created_at=time.time(), files=files, canary=canary
        )

    def _add_delta(self, manifest: Manifest, bits: Mapping[str, Tensor]) -> Manifest:
        """Write what changed since the newest snapshot, for nodes that fetch."""
        if self._last is None or self._adapters or not self._config.train.serve_snapshots:
            return manifest
        key = SnapshotKey(self._last.manifest.version, self._last.manifest_sha256)
        return replace(manifest, delta=self._deltas.build(manifest.version, key, self._last.bits, bits))

    def _require_space(self, needed: int) -> None:
        """Raise OSError if a snapshot of `needed` bytes would leave less than `train.min_free_mib` of disk space."""
        require_space(self._directory, needed, self._config.train.min_free_mib << 20)

    # ------------------------------------------------------------ adapters

    @property
    def base_paths(self) -> list[Path]:
        """The base of adapters, if any, which stays also while all snapshots that are kept are full ones."""
        return [self._base.path] if self._base else []

    def _write_adapters(self, publication: Publication) -> Written:
        """Write the adapters, or all weights with them merged; before them the base, if it is needed."""
        base, step = self._base if self._base is not None and self._base.exists else None, publication.step
        base_first = base is None and publication.base_version is not None and not self._is_last(step)
        # Also if the base was deleted after this publication was queued: the next one brings a new base.
        full = self._config.train.keeps_snapshot(step) or (base is None and not base_first)
        assert self._base_copy is not None, "copied with the first adapters"
        needed = bytes_of(publication.copy) + (int(base_first) + int(full)) * bytes_of(self._base_copy)
        self._require_space(needed)
        weights = self._base_copy.wait()
        if step == 0 and base is None:
            # Every B is zero.
            self._base = self._write_full(publication.version, 0, weights, self._base_copy)
            return self._base
        if base_first:
            assert publication.base_version is not None
            base = self._write_full(publication.base_version, 0, weights, self._base_copy, only_base=True)
            self._base = base
        copied = publication.copy.wait()
        names = [name.removeprefix(f"{A}/") for name in copied if name.startswith(f"{A}/")]
        factors = {name: Factors(copied[f"{A}/{name}"].numpy(), copied[f"{B}/{name}"].numpy()) for name in names}
        policy = Adapter(factors, self._config.lora.alpha / self._config.lora.rank)
        if not self._names_checked:
            check_names(list(policy.factors), weights, as_saved(self._unwrapped, weights))
            self._names_checked = True
        changed = {name: weights[name].float() + torch.from_numpy(policy.change(name)) for name in policy.factors}
        merged = {**weights, **changed}
        if full or base is None:
            # Rounded before the canary, which must hold for the weights in the files.
            rounded = {name: tensor.to(self._dtype) for name, tensor in merged.items()}
            return self._write_full(publication.version, step, rounded, publication.copy)
        return self._write_adapter(publication, policy, base, self.make_canary(merged))

    def _write_adapter(self, publication: Publication, policy: Adapter, base: Written, canary: Canary) -> Written:
        final = self._directory / directory_name(publication.version)
        with new_directory(final) as directory:
            adapter.save(directory, policy, rank=self._config.lora.rank, base=base.path)
            files = snapshot.describe_files(directory)
            manifest = replace(
                self._manifest(publication.version, publication.step, canary, files),
                base=base.manifest.version,
                base_manifest_sha256=base.manifest_sha256,
                complete=base.manifest.files,
            )
            digest = snapshot.write_manifest(directory, manifest)
        return Written(manifest, digest, final)

    # ------------------------------------------------------------ after the announcement

    def announced(self, written: Written) -> None:
        """Use older files in memory again, and note whether this snapshot is to be written to disk."""
        if self._pool is None:
            return
        assert self._last is not None
        if self.is_kept_step(written.manifest.step):
            self._keep(self._last)
        self._pool.announced()

    def _keep(self, one: Written) -> None:
        assert self._pool is not None
        self._pool.hold(one.file)
        self.pending.append(one)
        while len(self.pending) > _MAX_PENDING:
            dropped = self.pending.pop(0)
            self._pool.let_go(dropped.file)
            log.warning("snapshot not kept", version=dropped.manifest.version, reason="a newer one waits, too")

    def write_kept(self) -> str:
        """Write the snapshots that are to be kept to disk. Returns the reason if there is too little space, else ""."""
        while self.pending:
            assert self._pool is not None
            one = self.pending[0]
            try:
                self._require_space(one.file.content.nbytes)
                self._write_to_disk(one)
            except OSError as error:
                if not is_full_disk(error):
                    raise
                return f"v{one.manifest.version} waits for disk space: {error}"
            self._pool.let_go(one.file)
            self.pending.pop(0)
        return ""

    def keep_newest(self) -> None:
        """Note that the newest snapshot is to be kept: the trainer stops, and memory is lost with the machine."""
        if self._pool is None or self._last is None or self._last in self.pending:
            return
        if not (self._directory / directory_name(self._last.manifest.version)).is_dir():
            self._keep(self._last)

    def _write_to_disk(self, one: Written) -> None:
        with new_directory(self._directory / directory_name(one.manifest.version)) as directory:
            for name in (*one.manifest.files, MANIFEST):
                if name != WEIGHTS:
                    shutil.copyfile(one.path / name, directory / name)
            (directory / WEIGHTS).write_bytes(one.file.content.data)

    def close(self, *, finished: bool) -> None:
        """Release the files in memory. After the end of the run (`finished`) nothing asks for them."""
        newest, self._last = self._last, None
        if self._pool is None:
            return
        self._pool.close()
        if finished:
            self._deltas.clear()
            if newest is not None:
                delete(newest.path)
            with contextlib.suppress(OSError):
                self._pool.directory.rmdir()


def bytes_of(copy: HostCopy) -> int:
    return sum(tensor.nbytes for tensor in copy.tensors.values())


def as_bits(tensor: torch.Tensor) -> Tensor:
    """View a contiguous host tensor as unsigned integers of the same width; shares its memory."""
    bits = tensor.reshape(-1).view(torch.uint8).numpy().view(f"u{tensor.element_size()}")
    return Tensor(DTYPES[tensor.dtype], tuple(tensor.shape), bits)


def check_names(names: list[str], weights: Tensors, saved: Tensors) -> None:
    """Raise ConfigError for a weight that the model's files store under another name or in another shape.

    Engines find the layers of an adapter by the names in the files.
    """
    for name in names:
        if name not in saved or saved[name].shape != weights[name].shape:
            raise ConfigError(
                f'lora.publish = "adapter" cannot publish an adapter of {name}, which the files of the model store in '
                'another form: set lora.publish = "merged", or lora.targets without it'
            )
