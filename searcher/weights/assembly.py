"""Assemble the complete weights of a published snapshot on this node.

    full     link its files, or fetch them: newest base that is complete here ──► copy ──► apply each delta since
    adapter  its base ──► link

What the trainer wrote into the directory of this node is complete already. Everything else is written to new files that
never change, so that an engine can reload the weights it served before. Deltas are fetched if they are fewer bytes than
the weights. If one is missing or damaged, or the result has another hash, the weights are fetched. The base of the
newest adapters is kept however old it is: every one of them needs it.
"""

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tba.common.clock import Clock
from tba.common.errors import DamagedInUse, SnapshotCorrupt, SnapshotError, SnapshotOutdated
from tba.common.log import get_logger
from tba.common.system.durable import copy_file, link_or_copy
from tba.common.weights import delta
from tba.common.weights.node_store import MEMORY, PinnedSnapshot, pin
from tba.common.weights.snapshot import (
    MANIFEST,
    FileEntry,
    Manifest,
    Snapshot,
    SnapshotKey,
    check_file,
    check_hash,
    check_manifest,
    directory_name,
    read,
    read_error,
)
from tba.common.weights.tensor_file import map_tensors
from tba.common.wire.keys import KeyPair
from tba.common.wire.messages import WeightsRef
from tba.searcher.weights.fetch import Nodes
from tba.searcher.weights.node_cache import NodeCache
from tba.searcher.weights.progress import Progress

log = get_logger(__name__)

_CHAIN = "chain"
# Fetches a snapshot's file to a path, which may hold a prefix of it already: version, name, path, and the size in bytes
# if it is known. Returns the BLAKE3 of the file if that was computed on the way. Raises SnapshotError.
Fetch = Callable[[int, str, Path, int | None], str | None]


@dataclass(frozen=True, slots=True)
class Source:
    """Where the files of snapshots come from. A remote one may have deltas."""

    fetch: Fetch
    remote: bool


class SnapshotAssembler:
    """Complete snapshots in the cache of this node. Used by one thread. `own` is the key pair of the node, if any."""

    def __init__(
        self,
        directory: Path,
        weights_from: Literal["auto", "path", "trainer"],
        clock: Clock,
        progress: Progress | None = None,
        own: KeyPair | None = None,
    ) -> None:
        self._own = own
        self._progress = progress or Progress()
        self._cache = NodeCache(directory, self._progress)
        self._weights_from = weights_from
        self._clock = clock
        # The base of the newest adapters.
        self._base: PinnedSnapshot | None = None

    def assemble(
        self, ref: WeightsRef, *, refresh: bool = False, nodes: Sequence[str] = ()
    ) -> tuple[Snapshot, PinnedSnapshot]:
        """Return the complete, verified files of an announced snapshot, and the pin that keeps them.

        `nodes` are the addresses to ask for files before the trainer. `refresh` hashes what is here again, with or
        without a record, and fetches from the trainer and without deltas. Raises SnapshotError; what was fetched until
        then is kept for the next attempt.
        """
        nodes = () if refresh else nodes
        with _open_source(ref, self._weights_from, nodes, self._clock, self._progress, self._own) as source:
            try:
                pinned = self._complete(source, SnapshotKey(ref.version, ref.manifest_sha256), refresh=refresh)
            except OSError as error:
                raise SnapshotError(
                    f"v{ref.version} cannot be assembled in {self._cache.directory}: {error}"
                ) from error
        snapshot = read(pinned.path)
        self._keep_base(snapshot.manifest)
        self._cache.collect()
        return snapshot, pinned

    def remove_created(self) -> None:
        """Delete the files that were created here, except those that another process uses by now."""
        self.close()
        self._cache.remove_created()

    def close(self) -> None:
        """Release the base that is kept for later adapters."""
        if self._base is not None:
            self._base.release()
            self._base = None

    def _keep_base(self, manifest: Manifest) -> None:
        """Pin the base of adapters, if it is here: another searcher of the node may have assembled this snapshot."""
        base = manifest.base_key
        if base is not None and (pinned := pin(self._cache.directory, base)) is not None:
            self.close()
            self._base = pinned

    def _complete(self, source: Source, key: SnapshotKey, *, refresh: bool) -> PinnedSnapshot:
        trust = not refresh
        while (pinned := self._cache.find(key, trust=trust)) is None:
            with self._cache.assembling(key) as part:
                if part is not None:
                    self._assemble(source, key, part, refresh=refresh)
                    trust = True
        return pinned

    def _assemble(self, source: Source, key: SnapshotKey, part: Path, *, refresh: bool) -> None:
        published = _fetch_manifest(source, key, part)
        changed = source.remote and not refresh and self._apply_deltas(source, published)
        shutil.rmtree(part / _CHAIN, ignore_errors=True)
        if changed:
            return
        for name, entry in published.manifest.files.items():
            _fetch_verified(source, key.version, name, part / name, entry)
        if published.manifest.base is None:
            return
        self._link_base(source, published, refresh=refresh)

    def _apply_deltas(self, source: Source, published: Snapshot) -> bool:
        """Assemble a full snapshot from one that is complete here. False without deltas that are fewer bytes."""
        try:
            found = self._chain(source, published)
            if found is None:
                return False
            base, changes = found
            try:
                for change in changes:
                    self._fetch_delta(source, published.path, change)
                _patch(base.path, published, changes)
            finally:
                base.release()
        except SnapshotOutdated:
            raise
        except (SnapshotError, FileNotFoundError) as error:
            version = published.manifest.version
            log.warning("deltas not applied, fetching all weights", version=version, reason=str(error))
            return False
        return True

    def _chain(self, source: Source, newest: Snapshot) -> tuple[PinnedSnapshot, list[Snapshot]] | None:
        """The newest base that is complete here, and the snapshots whose deltas lead from it, oldest first."""
        changes, size = [newest], 0
        whole = sum(entry.bytes for entry in newest.manifest.files.values())
        while (change := changes[0].manifest.delta) is not None:
            size += change.file.bytes
            if size >= whole:
                return None
            if pinned := self._cache.find(change.base_key):
                return pinned, changes
            directory = newest.path / _CHAIN / directory_name(change.base)
            directory.mkdir(parents=True, exist_ok=True)
            changes.insert(0, _fetch_manifest(source, change.base_key, directory))
        return None

    def _fetch_delta(self, source: Source, part: Path, change: Snapshot) -> None:
        assert change.manifest.delta is not None
        version, unpacked = change.manifest.version, _unpacked(part, change)
        unpacked.parent.mkdir(exist_ok=True)
        packed = unpacked.with_suffix(".zst")
        _fetch_verified(source, version, delta.FILE, packed, change.manifest.delta.file)
        delta.unpack_delta(packed, unpacked, change.manifest.delta.bytes)
        packed.unlink()

    def _link_base(self, source: Source, published: Snapshot, *, refresh: bool) -> None:
        """Put the files of an adapter's base next to its own."""
        manifest, part = published.manifest, published.path
        assert manifest.base_key is not None
        base = self._base_of(source, manifest.base_key, part, refresh=refresh)
        try:
            if read(base.path).manifest.files != manifest.complete:
                raise SnapshotCorrupt(f"the manifest of v{manifest.version} names other files than its base has")
            # They were verified with the base.
            for name in manifest.complete:
                (part / name).unlink(missing_ok=True)
                link_or_copy(base.path / name, part / name)
        except FileNotFoundError as error:
            raise SnapshotCorrupt(f"v{manifest.version} needs a file that its base lacks: {error}") from error
        finally:
            base.release()
        shutil.rmtree(part / _CHAIN, ignore_errors=True)

    def _base_of(self, source: Source, key: SnapshotKey, part: Path, *, refresh: bool) -> PinnedSnapshot:
        """The base in the cache; if that one is damaged and in use, a private copy."""
        for _ in range(2):
            try:
                return self._complete(source, key, refresh=refresh)
            except DamagedInUse as error:
                log.warning("base of adapters is damaged", version=key.version, reason=str(error))
                # This process may be the one that uses it.
                self.close()
        directory = part / _CHAIN / directory_name(key.version)
        directory.mkdir(parents=True, exist_ok=True)
        base = _fetch_manifest(source, key, directory)
        for name, entry in base.manifest.files.items():
            _fetch_verified(source, key.version, name, directory / name, entry)
        return PinnedSnapshot(directory)


def _patch(base: Path, published: Snapshot, changes: list[Snapshot]) -> None:
    """Write the files of a full snapshot: the base's weights with the deltas of `changes`, and what is unchanged."""
    before = read(base).manifest.files
    for name, entry in published.manifest.files.items():
        target = published.path / name
        target.unlink(missing_ok=True)
        if before.get(name) == entry:
            link_or_copy(base / name, target)
            continue
        # Under a name of its own: what has its final name may be passed on to other nodes.
        patched = published.path / _CHAIN / name
        patched.unlink(missing_ok=True)
        copy_file(base / name, patched)
        if name.endswith(".safetensors"):
            tensors = map_tensors(patched, writable=True)
            for change in changes:
                delta.apply_delta(_unpacked(published.path, change), tensors)
        check_file(patched, entry)
        patched.rename(target)


def _unpacked(part: Path, change: Snapshot) -> Path:
    """Where the delta of a snapshot lies while `part` is assembled."""
    return part / _CHAIN / f"{directory_name(change.manifest.version)}.safetensors"


@contextlib.contextmanager
def _open_source(
    ref: WeightsRef,
    weights_from: Literal["auto", "path", "trainer"],
    nodes: Sequence[str],
    clock: Clock,
    progress: Progress,
    own: KeyPair | None,
) -> Iterator[Source]:
    """The source of an announced snapshot and of its ancestors. Raises SnapshotError if there is none."""
    path = Path(ref.path)
    if weights_from == "path" or (weights_from == "auto" and ((path / MANIFEST).is_file() or not ref.address)):
        key = SnapshotKey(ref.version, ref.manifest_sha256)
        # A trainer on this machine writes to the files of old snapshots again, unless they are held.
        pinned = pin(path.parent, key) if path.name == key.name else None
        try:
            yield Source(functools.partial(_link, path), remote=False)
        finally:
            if pinned is not None:
                pinned.release()
        return
    if not ref.address:
        raise SnapshotError(
            f'v{ref.version} cannot be fetched: search.weights_from = "trainer", and the trainer serves no snapshots; '
            "set train.serve_snapshots"
        )
    with contextlib.closing(Nodes(nodes, ref.address, clock, progress, own)) as fetched:
        yield Source(fetched.fetch, remote=True)


def _link(path: Path, version: int, name: str, target: Path, _size: int | None) -> None:
    """Hard-link a file of the trainer's directory, so that it outlives the original, or else copy it.

    `path` is the directory of the announced snapshot. Its base has the plain name of its version.
    """
    own = path.name.split("-")[0] == directory_name(version)
    source = (path if own else path.with_name(directory_name(version))) / name
    target.unlink(missing_ok=True)
    try:
        obstacle = link_or_copy(source, target)
    except OSError as error:
        raise read_error(
            error,
            f"{source}: {error.strerror}: already deleted, or not on this machine: searchers on others need "
            "a shared file system, or train.serve_snapshots in the trainer's configuration",
        ) from error
    # Where searchers read weights from memory, a copy of those that are on disk is due.
    if obstacle and name.endswith(".safetensors") and not target.is_relative_to(MEMORY):
        _log_copy(source.parent.parent, target.parent.parent, obstacle)


@functools.cache
def _log_copy(source: Path, target: Path, obstacle: str) -> None:
    """Log once why weights are copied."""
    log.warning(
        "weights are copied, not linked: a search.weights_dir on the file system of the snapshots would save that",
        snapshots=source,
        weights_dir=target,
        reason=obstacle,
    )


def _fetch_verified(source: Source, version: int, name: str, target: Path, entry: FileEntry) -> None:
    """Fetch a file and check its hash; on a mismatch, fetch it once more from the start. Raises SnapshotError."""
    try:
        _fetch_once(source, version, name, target, entry)
    except SnapshotCorrupt as error:
        log.warning("fetched again", file=name, version=version, reason=str(error))
        target.unlink(missing_ok=True)
        _fetch_once(source, version, name, target, entry)


def _fetch_once(source: Source, version: int, name: str, target: Path, entry: FileEntry) -> None:
    found = source.fetch(version, name, target, entry.bytes)
    if found is None:
        check_file(target, entry)
    else:
        check_hash(target, found, entry.blake3)


def _fetch_manifest(source: Source, key: SnapshotKey, directory: Path) -> Snapshot:
    """Read the manifest of a snapshot in `directory`, fetched unless it is there. Raises SnapshotError."""
    path = directory / MANIFEST
    try:
        check_manifest(directory, key.manifest_sha256)
    except SnapshotError:
        path.unlink(missing_ok=True)
        source.fetch(key.version, MANIFEST, path, None)
        check_manifest(directory, key.manifest_sha256)
    snapshot = read(directory)
    if snapshot.manifest.version != key.version:
        raise SnapshotCorrupt(f"the manifest of v{key.version} is that of v{snapshot.manifest.version}")
    return snapshot
