"""The snapshot format: an immutable directory of safetensors files and a manifest that names and hashes each of them.

    v00000040/              full
        manifest.json       version, step, run, size and BLAKE3 of each file, canary
        model.safetensors   with config.json and the tokenizer: a complete Hugging Face model directory
    v00000042/              adapter
        manifest.json       also its base (version, sha256 of the manifest), and the base's files
        adapter_model.safetensors, adapter_config.json
                            PEFT's format of low-rank factors on the base: `tba.common.weights.adapter`
    deltas/v00000041/       optional, for nodes that fetch: `tba.common.weights.delta`
        manifest.json       the same bytes as in the full snapshot v00000041, which names the delta and its base
        delta.safetensors.zst
                            what changed since the base: `tba.common.weights.delta`

A snapshot between two kept ones has the hash of its manifest in its name: `tba.common.weights.node_store`.

The announcement carries the sha256 of the manifest, and the manifest of a delta or an adapter that of its base's
manifest, so that one hash verifies everything. A searcher assembles the complete directory of an adapter before it
loads it: it looks like its base with the adapter files next to it, and its weights are those of the base.
"""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from tba.common.errors import SnapshotCorrupt, SnapshotError, SnapshotMissing, UsageError
from tba.common.log import get_logger
from tba.common.system.durable import json_text, open_regular, publish_directory, sha256_of
from tba.common.weights import adapter
from tba.common.weights.tensor_file import blake3_of

log = get_logger(__name__)

T = TypeVar("T")
FORMAT = 1
MANIFEST = "manifest.json"
DELTA = "delta.safetensors.zst"
# No separator and no leading dot: a manifest can only name files of its own directory.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][^/\\\0]{0,200}")


class SnapshotKey(NamedTuple):
    """Identifies a snapshot. The hash tells apart snapshots of the same version in different runs."""

    version: int
    manifest_sha256: str

    @property
    def name(self) -> str:
        """A directory name, unique on a node: `v00000042-1a2b3c4d5e6f7a8b`."""
        return f"{directory_name(self.version)}-{self.manifest_sha256[:16]}"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and BLAKE3 hash (hex) of one file of a snapshot."""

    bytes: int
    blake3: str


@dataclass(frozen=True, slots=True)
class Delta:
    """The file DELTA, which turns the weights of a full snapshot into those of the one that names it.

    The file is optional: nodes fetch it in place of the weights if they have the base, or can get there by deltas.
    `file` is compressed, and `bytes` is the size of its content.
    """

    file: FileEntry
    bytes: int
    base: int
    base_manifest_sha256: str

    @property
    def base_key(self) -> SnapshotKey:
        """The snapshot that the delta applies to."""
        return SnapshotKey(self.base, self.base_manifest_sha256)


@dataclass(frozen=True, slots=True)
class Canary:
    """Fixed token sequences with the trainer's log-probabilities, which an engine must reproduce.

    `logprobs[i][t]` is the natural-log probability of `sequences[i][t + 1]` given the tokens before it, at
    temperature 1: one value fewer than there are tokens.
    """

    sequences: list[list[int]]
    logprobs: list[list[float]]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `manifest.json`. `files` are the files that were published.

    The files of a full snapshot are a complete model directory. `delta` is another way to its weights.

    An adapter has `base` and `base_manifest_sha256`, the full snapshot that it applies to, and `complete`, the files of
    that one. A full snapshot has None for all three. `only_base` marks a full snapshot that was written as a base for
    adapters and never announced as a policy; its step is 0, whatever the steps of the snapshots before it are.
    """

    run: str
    version: int
    step: int
    created_at: float
    files: dict[str, FileEntry]
    canary: Canary
    delta: Delta | None = None
    base: int | None = None
    base_manifest_sha256: str | None = None
    complete: dict[str, FileEntry] | None = None
    only_base: bool = False

    @property
    def base_key(self) -> SnapshotKey | None:
        """The base of an adapter; None for a full snapshot."""
        if self.base is None or self.base_manifest_sha256 is None:
            return None
        return SnapshotKey(self.base, self.base_manifest_sha256)

    @property
    def model_files(self) -> dict[str, FileEntry]:
        """The files of the complete model directory: its own, or those of the adapter's base."""
        return self.files if self.complete is None else self.complete


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot that has been found and verified.

    `weight_files` hold all weights of the version, or of its base if `adapter` is the directory of an adapter that must
    be applied to them. They are empty if only the published files of an adapter are there.
    """

    path: Path
    manifest: Manifest
    weight_files: list[Path] = field(default_factory=list)
    adapter: Path | None = None


def directory_name(version: int) -> str:
    """`v00000042`: sorts by version."""
    return f"v{version:08d}"


def seal(temporary: Path, final: Path, manifest: Manifest) -> str:
    """Write the manifest of a finished directory and publish it. Returns the manifest's sha256."""
    digest = write_manifest(temporary, manifest)
    publish_directory(temporary, final)
    return digest


def write_manifest(directory: Path, manifest: Manifest) -> str:
    """Write the manifest of a directory. Returns its sha256."""
    text = json_text(asdict(manifest) | {"format": FORMAT}).encode()
    (directory / MANIFEST).write_bytes(text)
    return hashlib.sha256(text).hexdigest()


def describe_file(path: Path) -> FileEntry:
    return FileEntry(path.stat().st_size, blake3_of(path))


def describe_files(directory: Path) -> dict[str, FileEntry]:
    """Size and hash of every file in a directory except the manifest."""
    return {path.name: describe_file(path) for path in sorted(directory.iterdir()) if path.name != MANIFEST}


def check_file(path: Path, entry: FileEntry) -> None:
    """Raise SnapshotCorrupt if a file is not the one of a manifest, SnapshotError if it cannot be read."""
    check_hash(path, _measured(path, blake3_of), entry.blake3)


def check_size(path: Path, entry: FileEntry) -> None:
    """Raise SnapshotCorrupt if a file has another size than in a manifest, SnapshotError if there is none."""
    if (found := _measured(path, lambda one: one.stat().st_size)) != entry.bytes:
        raise SnapshotCorrupt(f"{path} has {found} bytes, not {entry.bytes} as announced")


def check_manifest(directory: Path, sha256: str) -> None:
    """Raise SnapshotCorrupt if a manifest is not the announced one, SnapshotError if it cannot be read."""
    check_hash(directory / MANIFEST, _measured(directory / MANIFEST, sha256_of), sha256)


def read_error(error: OSError, sentence: str) -> SnapshotError:
    """Return the error of a file of a snapshot that cannot be read: SnapshotMissing if it does not exist."""
    return (SnapshotMissing if isinstance(error, FileNotFoundError) else SnapshotError)(sentence)


def _measured(path: Path, measure: Callable[[Path], T]) -> T:
    try:
        return measure(path)
    except OSError as error:
        raise read_error(error, f"{path}: {error.strerror}: the snapshot was deleted or never complete") from error


def check_hash(path: Path, found: str, expected: str) -> None:
    """Raise SnapshotCorrupt if the hash that was computed of a file is not the expected one."""
    if found != expected:
        raise SnapshotCorrupt(f"{path} does not hash to what was announced: {found[:12]}…, not {expected[:12]}…")


def read(path: Path) -> Snapshot:
    """Read a manifest without checking the files it names. Raises SnapshotError."""
    try:
        with open_regular(path / MANIFEST) as file:
            manifest = _parse(json.load(file))
    except OSError as error:
        raise read_error(error, f"{path / MANIFEST}: {error.strerror}: not a snapshot, or already deleted") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SnapshotCorrupt(f"{path / MANIFEST} is malformed: {error}") from error
    weights = [path / name for name in manifest.model_files if name.endswith(".safetensors")]
    if manifest.base is None:
        return Snapshot(path, manifest, weights)
    return Snapshot(path, manifest, weights if all(file.is_file() for file in weights) else [], path)


def list_snapshots(directory: Path) -> list[Path]:
    """The published snapshots in a directory, oldest first."""
    return sorted(path for path in directory.glob("v????????") if (path / MANIFEST).is_file())


def choose_snapshots(directory: Path, memory: Path, named: Path | None, *, every: bool) -> list[Path]:
    """The named snapshot, or the policies of a run: every one, or the newest. Raises UsageError if there is none.

    `directory` has those that are kept. `memory` is where the trainer of this node publishes: the newest of the run may
    be there alone. The newest has the highest version, not the highest step: a run resumed from an older checkpoint
    continues there, and what it had reached before is abandoned.
    """
    if named is not None:
        if not (named / MANIFEST).is_file():
            raise UsageError(f"{named} is neither a snapshot, with a {MANIFEST}, nor a model directory")
        return [named]
    found = [path for path in list_snapshots(directory) if not ((manifest := _readable(path)) and manifest.only_base)]
    if not found:
        raise UsageError(
            f"{directory} has no snapshots: train first, or name a snapshot or the configuration of a run (-c FILE)"
        )
    found += _newer(memory, found)[-1:]
    return found if every else found[-1:]


def _newer(memory: Path, kept: list[Path]) -> list[Path]:
    """The snapshots in memory after the newest kept one, oldest first. Those of an earlier run of this name are not."""
    began = min((manifest.created_at for path in kept if (manifest := _readable(path))), default=math.inf)
    there = sorted(path for path in memory.glob("v????????-*") if path.name[:9] > kept[-1].name)
    return [path for path in there if (manifest := _readable(path)) and manifest.created_at > began]


def collect(directory: Path, *, keep_last: int, keep_every: int, keep: Iterable[Path] = ()) -> list[Path]:
    """Delete old snapshots and return their paths.

    Kept are the newest `keep_last`, the first (a run is compared with it), those of every `keep_every`-th step (0: none
    by its step), those in `keep`, and every base of a kept snapshot. A snapshot that cannot be read is left for a
    person to decide, and so is one that is a link: its files belong to another directory. The manifest is deleted
    first, so that a half-deleted directory is not a snapshot.
    """
    found = list_snapshots(directory)
    manifests = {path: manifest for path in found if (manifest := _readable(path))}
    kept = {found[0], *found[-max(keep_last, 1) :], *keep} if found else set()
    kept |= {path for path, manifest in manifests.items() if keep_every and manifest.step % keep_every == 0}
    bases = {manifests[path].base for path in kept & manifests.keys()} - {None}
    kept |= {directory / directory_name(base) for base in bases if base is not None}
    removable = {path for path in manifests.keys() - kept if not path.is_symlink()}
    # From the newest, so that at every moment each readable snapshot has its base.
    return [path for path in reversed(found) if path in removable and _delete(path)]


def _readable(path: Path) -> Manifest | None:
    try:
        return read(path).manifest
    except SnapshotError as error:
        log.warning("snapshot not readable", path=path, reason=str(error))
        return None


def _delete(path: Path) -> bool:
    try:
        (path / MANIFEST).unlink()
        shutil.rmtree(path)
    except OSError as error:
        # Such as on a network file system, which keeps a file that a searcher has open.
        log.warning("snapshot not deleted", path=path, reason=str(error))
        return False
    return True


def _parse(fields: dict[str, Any]) -> Manifest:
    if (found := fields.pop("format", None)) != FORMAT:
        raise SnapshotError(f"snapshot format {found!r}, this release reads {FORMAT}")
    manifest = msgspec.convert(fields, Manifest)
    for name in (*manifest.files, *(manifest.complete or ())):
        if name in (MANIFEST, DELTA) or not _FILE_NAME.fullmatch(name):
            raise SnapshotCorrupt(f"a manifest names a file outside its directory: {name!r}")
    if manifest.delta is not None and not (manifest.base is None and 0 <= manifest.delta.base < manifest.version):
        raise SnapshotCorrupt(f"v{manifest.version} cannot be a delta on v{manifest.delta.base}")
    if manifest.base is not None and not (
        0 <= manifest.base < manifest.version
        and manifest.base_manifest_sha256
        and manifest.complete
        and adapter.FILE in manifest.files
    ):
        raise SnapshotCorrupt(
            f"v{manifest.version} adapts v{manifest.base}, and its manifest does not describe the resulting files"
        )
    return manifest
