"""The snapshot format: an immutable directory of safetensors plus a manifest that names and hashes every file.

    v00000042/
        manifest.json       version, step, run, sha256 and size of each file, canary
        model.safetensors   with config.json and the tokenizer: a complete Hugging Face model directory

The manifest's own sha256 travels in the announcement, so one hash vouches for everything.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tba.common.durable import publish_directory, sha256_of, write_json
from tba.common.errors import SnapshotCorrupt, SnapshotError, UsageError
from tba.common.log import get_logger
from tba.common.wire import WeightsRef

log = get_logger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and hash of one file of a snapshot."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Canary:
    """Fixed token sequences with the trainer's log-probabilities, which an engine must reproduce.

    `logprobs[i][t]` is the natural-log probability of `sequences[i][t + 1]` given the tokens before it,
    at temperature 1: one fewer than there are tokens.
    """

    sequences: list[list[int]]
    logprobs: list[list[float]]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `manifest.json` holds. `base` is the version a delta applies to; None for a full snapshot."""

    run: str
    version: int
    step: int
    created_at: float
    files: dict[str, FileEntry]
    canary: Canary
    base: int | None = None
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot that has been found and verified.

    `weight_files` hold all weights of the version, also where it was published as a delta: then they are what
    the delta makes of its base, and `delta` names the file with the changes alone (since `manifest.base`).
    """

    path: Path
    manifest: Manifest
    weight_files: list[Path] = field(default_factory=list)
    delta: Path | None = None


def directory_name(version: int) -> str:
    """`v00000042`: sorts by version."""
    return f"v{version:08d}"


def seal(temporary: Path, final: Path, manifest: Manifest) -> str:
    """Write the manifest of a finished directory and publish it. Returns the manifest's sha256."""
    write_json(temporary / MANIFEST, asdict(manifest))
    digest = sha256_of(temporary / MANIFEST)
    publish_directory(temporary, final)
    return digest


def describe_files(directory: Path) -> dict[str, FileEntry]:
    """Size and hash of every file in a directory, without the manifest."""
    return {
        path.name: FileEntry(path.stat().st_size, sha256_of(path))
        for path in sorted(directory.iterdir())
        if path.name != MANIFEST
    }


def verify(ref: WeightsRef, between: Callable[[], None] = lambda: None) -> Snapshot:
    """Read a snapshot and check every hash; `between` is called every few megabytes, since that may take long.

    Raises SnapshotCorrupt if a file is not what it should be, SnapshotError if one is missing.
    """
    path = Path(ref.path)
    if _digest(path / MANIFEST, between) != ref.manifest_sha256:
        raise SnapshotCorrupt(f"{path / MANIFEST} is not the manifest that was announced for v{ref.version}")
    snapshot = read(path)
    if snapshot.manifest.version != ref.version:
        raise SnapshotCorrupt(f"{path} holds version {snapshot.manifest.version}, announced as {ref.version}")
    for name, entry in snapshot.manifest.files.items():
        if _digest(path / name, between) != entry.sha256:
            raise SnapshotCorrupt(f"{path / name} does not hash to what its manifest says")
    return snapshot


def read(path: Path) -> Snapshot:
    """Read a manifest without checking the files it names. Raises SnapshotError."""
    try:
        manifest = _parse(json.loads((path / MANIFEST).read_text(encoding="utf-8")))
    except OSError as error:
        raise SnapshotError(f"{path / MANIFEST}: {error.strerror}: not a snapshot, or already collected") from error
    except (ValueError, TypeError, KeyError) as error:
        raise SnapshotCorrupt(f"{path / MANIFEST} is malformed: {error}") from error
    weights = [path / name for name in manifest.files if name.endswith(".safetensors")]
    return Snapshot(path, manifest, weights)


def list_snapshots(directory: Path) -> list[Path]:
    """The published snapshots under a directory, oldest first."""
    return sorted(path for path in directory.glob("v????????") if (path / MANIFEST).is_file())


def choose_snapshots(directory: Path, one: Path | None, *, every: bool) -> list[Path]:
    """The named snapshot, all, or the newest of a directory. Raises UsageError if there is none."""
    if one is not None:
        if not (one / MANIFEST).is_file():
            raise UsageError(f"{one} is no snapshot: it has no {MANIFEST}")
        return [one]
    found = list_snapshots(directory)
    if not found:
        raise UsageError(f"{directory} has no snapshots: train first, or name one with --snapshot")
    return found if every else found[-1:]


def collect(directory: Path, *, keep_last: int, keep_every: int) -> list[Path]:
    """Delete old snapshots: all but the newest `keep_last`, the first, and those of every `keep_every`-th step.

    The first is what a run is compared with. `keep_every` 0 keeps no others. The manifest goes first, so that
    a half-deleted directory is no snapshot; one that cannot be read is left for a person. Returns what was
    deleted.
    """
    deleted = []
    for path in list_snapshots(directory)[1 : -max(keep_last, 1)]:
        try:
            step = read(path).manifest.step
        except SnapshotError as error:
            log.warning("snapshot not collected", path=path, reason=str(error))
            continue
        if keep_every and step % keep_every == 0:
            continue
        try:
            (path / MANIFEST).unlink()
            shutil.rmtree(path)
        except OSError as error:  # a network file system keeps what a searcher has open
            log.warning("snapshot not deleted", path=path, reason=str(error))
            continue
        deleted.append(path)
    return deleted


def _digest(path: Path, between: Callable[[], None]) -> str:
    try:
        return sha256_of(path, between)
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror}: the snapshot was collected or never complete") from error


def _parse(fields: dict[str, Any]) -> Manifest:
    if fields.get("format") != FORMAT:
        raise SnapshotError(f"snapshot format {fields.get('format')!r}, this release reads {FORMAT}")
    files = {name: FileEntry(**entry) for name, entry in fields["files"].items()}
    for name in files:
        if Path(name).name != name:
            raise SnapshotCorrupt(f"a manifest names a file outside its directory: {name!r}")
    return Manifest(**{**fields, "files": files, "canary": Canary(**fields["canary"])})
