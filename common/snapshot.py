"""The snapshot format: an immutable directory of safetensors plus a manifest that names and hashes every file.

    v00000040/              full
        manifest.json       version, step, run, sha256 and size of each file, canary
        model.safetensors   with config.json and the tokenizer: a complete Hugging Face model directory
    v00000041/              delta
        manifest.json       also the base (version, sha256 of its manifest), and the files it makes of the base's
        delta.safetensors   what changed since the base: `tba.common.delta`
    v00000042/              adapter
        manifest.json       as that of a delta; the base is full
        adapter.safetensors low-rank factors, which are merged into the base: `tba.common.adapter`

The manifest's own sha256 travels in the announcement, and a delta's manifest holds that of its base's: one hash
vouches for everything. Whoever wants the weights of a delta or an adapter makes the complete directory first; it looks
like a full snapshot with that file beside.
"""

import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tba.common import adapter, delta
from tba.common.durable import publish_directory, sha256_of, write_json
from tba.common.errors import SnapshotCorrupt, SnapshotError, UsageError
from tba.common.log import get_logger
from tba.common.wire import WeightsRef

log = get_logger(__name__)

# Of full snapshots and deltas; and of what releases that know only these cannot read.
_FIRST_FORMAT, _FORMAT_WITH_ADAPTERS = 1, 2
# What a snapshot that is not full has one of.
CHANGES = (delta.FILE, adapter.FILE)
MANIFEST = "manifest.json"
# No separator, and no leading dot: what a manifest names lies beside it and is no "..".
_FILE_NAME = re.compile(r"[A-Za-z0-9_][^/\\\0]{0,200}")


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
    """What `manifest.json` holds. `files` are those that were published.

    Of a delta or an adapter, `base` is the version it applies to, `base_manifest_sha256` says which snapshot of that
    version is meant, and `complete` are the files that come out: all that a full snapshot would have. A full one has
    None. `only_base`: adapters are based on it, and it was never announced as a policy; its step is 0, and those of
    snapshots before it may be later.
    """

    run: str
    version: int
    step: int
    created_at: float
    files: dict[str, FileEntry]
    canary: Canary
    base: int | None = None
    base_manifest_sha256: str | None = None
    complete: dict[str, FileEntry] | None = None
    only_base: bool = False

    @property
    def complete_files(self) -> dict[str, FileEntry]:
        """The files of a complete model directory, published as such or made from the base."""
        return self.files if self.complete is None else self.complete

    @property
    def change(self) -> str | None:
        """The file that makes the complete files of the base's, a delta or an adapter; None for a full snapshot."""
        return None if self.base is None else next(name for name in CHANGES if name in self.files)

    def as_json(self) -> dict[str, Any]:
        """What `manifest.json` holds. An older release says of what it cannot read which format it reads."""
        fields = asdict(self)
        if not self.only_base:
            del fields["only_base"]
        newer = self.only_base or self.change == adapter.FILE
        return fields | {"format": _FORMAT_WITH_ADAPTERS if newer else _FIRST_FORMAT}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot that has been found and verified.

    `weight_files` hold all weights of the version, also where it was published as a delta or an adapter: then they are
    what that makes of its base, and `delta` names the file that says which tensors differ from the base's. They are
    empty where only the change is there.
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
    write_json(temporary / MANIFEST, manifest.as_json())
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


def verify(ref: WeightsRef) -> Snapshot:
    """Read a published snapshot and check every hash.

    Raises SnapshotCorrupt if a file is not what it should be, SnapshotError if one is missing.
    """
    path = Path(ref.path)
    check_hash(path / MANIFEST, ref.manifest_sha256)
    snapshot = read(path)
    if snapshot.manifest.version != ref.version:
        raise SnapshotCorrupt(f"{path} holds version {snapshot.manifest.version}, announced as {ref.version}")
    for name, entry in snapshot.manifest.files.items():
        check_hash(path / name, entry.sha256)
    return snapshot


def check_hash(path: Path, sha256: str) -> None:
    """Raise SnapshotCorrupt if a file does not hash to this, SnapshotError if it cannot be read."""
    try:
        found = sha256_of(path)
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror}: the snapshot was collected or never complete") from error
    if found != sha256:
        raise SnapshotCorrupt(f"{path} does not hash to what was announced: {found[:12]}…, not {sha256[:12]}…")


def read(path: Path) -> Snapshot:
    """Read a manifest without checking the files it names. Raises SnapshotError."""
    try:
        manifest = _parse(json.loads((path / MANIFEST).read_text(encoding="utf-8")))
    except OSError as error:
        raise SnapshotError(f"{path / MANIFEST}: {error.strerror}: not a snapshot, or already collected") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SnapshotCorrupt(f"{path / MANIFEST} is malformed: {error}") from error
    complete = [path / name for name in manifest.complete_files if name.endswith(".safetensors")]
    weights = complete if all(file.is_file() for file in complete) or manifest.base is None else []
    return Snapshot(path, manifest, weights, path / manifest.change if manifest.change else None)


def list_snapshots(directory: Path) -> list[Path]:
    """The published snapshots under a directory, oldest first."""
    return sorted(path for path in directory.glob("v????????") if (path / MANIFEST).is_file())


def choose_snapshots(directory: Path, one: Path | None, *, every: bool) -> list[Path]:
    """The named snapshot, all policies, or the newest of a directory. Raises UsageError if there is none.

    The newest has the highest version, not the highest step: a run that was resumed from an older checkpoint goes on
    from there, and what it had reached before is given up.
    """
    if one is not None:
        if not (one / MANIFEST).is_file():
            raise UsageError(f"{one} is no snapshot: it has no {MANIFEST}")
        return [one]
    found = [path for path in list_snapshots(directory) if not _is_only_base(path)]
    if not found:
        raise UsageError(f"{directory} has no snapshots: train first, or name one with --snapshot")
    return found if every else found[-1:]


def collect(directory: Path, *, keep_last: int, keep_every: int, keep: Iterable[Path] = ()) -> list[Path]:
    """Delete old snapshots: all but the newest `keep_last`, the first, those of every `keep_every`-th step, those of
    `keep`, and whatever these are based on.

    The first is what a run is compared with. `keep_every` 0 keeps none by its step. The manifest goes first, so that
    a half-deleted directory is no snapshot; one that cannot be read is left for a person. Returns what was
    deleted.
    """
    found = list_snapshots(directory)
    manifests = {path: manifest for path in found if (manifest := _readable(path))}
    kept = {found[0], *found[-max(keep_last, 1) :], *keep} if found else set()
    kept |= {path for path, manifest in manifests.items() if keep_every and manifest.step % keep_every == 0}
    # A base is older than what is based on it: one pass from the newest finds whole chains.
    for path in reversed(found):
        if path in kept and path in manifests and (base := manifests[path].base) is not None:
            kept.add(directory / directory_name(base))
    # From the newest, so that nothing that can be read lacks its base meanwhile.
    return [path for path in reversed(found) if path in manifests and path not in kept and _delete(path)]


def _is_only_base(path: Path) -> bool:
    """False for one that cannot be read: whoever wants it hears why."""
    try:
        return read(path).manifest.only_base
    except SnapshotError:
        return False


def _readable(path: Path) -> Manifest | None:
    try:
        return read(path).manifest
    except SnapshotError as error:
        log.warning("snapshot not collected", path=path, reason=str(error))
        return None


def _delete(path: Path) -> bool:
    try:
        (path / MANIFEST).unlink()
        shutil.rmtree(path)
    except OSError as error:  # a network file system keeps what a searcher has open
        log.warning("snapshot not deleted", path=path, reason=str(error))
        return False
    return True


def _parse(fields: dict[str, Any]) -> Manifest:
    format_ = fields.pop("format", None)
    if format_ not in (_FIRST_FORMAT, _FORMAT_WITH_ADAPTERS):
        raise SnapshotError(
            f"snapshot format {format_!r}, this release reads {_FIRST_FORMAT} and {_FORMAT_WITH_ADAPTERS}"
        )
    complete = fields.get("complete")
    parsed = {
        "files": _parse_files(fields["files"]),
        "complete": None if complete is None else _parse_files(complete),
        "canary": Canary(**fields["canary"]),
    }
    manifest = Manifest(**{**fields, **parsed})
    if manifest.base is not None and not (
        0 <= manifest.base < manifest.version
        and manifest.base_manifest_sha256
        and manifest.complete
        and len(manifest.files.keys() & set(CHANGES)) == 1
    ):
        raise SnapshotCorrupt(f"v{manifest.version} is a change of v{manifest.base}, with no word of what it makes")
    return manifest


def _parse_files(files: dict[str, Any]) -> dict[str, FileEntry]:
    for name in files:
        if name == MANIFEST or not _FILE_NAME.fullmatch(name):
            raise SnapshotCorrupt(f"a manifest names a file outside its directory: {name!r}")
    return {name: FileEntry(**entry) for name, entry in files.items()}
