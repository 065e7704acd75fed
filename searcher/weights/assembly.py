"""Assemble the complete weights of a published snapshot on this node.

    full     link its files, or fetch them: newest base that is complete here ──► copy ──► apply each delta since
    adapter  its base ──► link

What the trainer wrote into the directory of this node is complete already. Everything else is written to new files that
never change, so that an engine can reload the weights it served before. Deltas are fetched if they are fewer bytes than
the weights. If one is missing or damaged, or the result has another hash, the weights are fetched. The base of the
newest adapters is kept however old it is: every one of them needs it.

The searchers of one node share the snapshots: each is assembled once, in a `.part` directory that is resumed after a
crash, kept while in use, then deleted. Names and locks: `tba.common.weights.node_store`.
"""

import contextlib
import functools
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tba.common.clock import Clock
from tba.common.errors import DamagedInUse, SnapshotCorrupt, SnapshotError, SnapshotOutdated
from tba.common.log import get_logger
from tba.common.run_snapshots import MEMORY
from tba.common.system.durable import copy_file, link_or_copy
from tba.common.weights import delta, node_store
from tba.common.weights import snapshot as snapshots
from tba.common.weights.snapshot import DELTA, MANIFEST, FileEntry, Snapshot, SnapshotKey, directory_name
from tba.common.weights.tensor_file import map_tensors
from tba.common.wire.keys import KeyPair
from tba.common.wire.messages import WeightsRef
from tba.searcher.weights.fetch import Nodes, Progress

log = get_logger(__name__)

_CHAIN = "chain"
# Unused snapshots to keep: the base of the next delta, and the one before it in case a swap is rolled back.
_KEPT = 2
_POLL_SECONDS = 0.1


class NodeCache:
    """The cache of a node, as one thread of a process uses it. Raises ConfigError if the directory cannot be used."""

    def __init__(self, directory: Path, progress: Progress) -> None:
        self.directory = directory
        self._progress = progress
        self._created: set[Path] = set()
        node_store.make_directory(directory)

    def find(self, key: SnapshotKey, *, trust: bool = True) -> node_store.PinnedSnapshot | None:
        """Pin a complete snapshot; None if it is not here, or is damaged (then it is deleted).

        Its files are hashed unless the process that made it has recorded their hashes and `trust` accepts that. Raises
        DamagedInUse if it is damaged and another process uses it.
        """
        pinned = node_store.pin_path(self.directory / key.name)
        if pinned is None:
            return None
        try:
            self._check(key, pinned.path, trust=trust)
        except SnapshotError as error:
            # If it is in use it stays, and no other process may trust it.
            (pinned.path / node_store.VERIFIED).unlink(missing_ok=True)
            pinned.release()
            log.warning("cached weights are damaged", path=pinned.path, reason=str(error))
            if not node_store.delete(pinned.path):
                raise DamagedInUse(f"{error}, and a process of this node uses it") from error
            return None
        return pinned

    def _check(self, key: SnapshotKey, path: Path, *, trust: bool) -> None:
        """Check a complete snapshot. Raises SnapshotError.

        The files that an adapter shares with its base are checked with the base, or each would cost a hash of them all.
        """
        snapshots.check_manifest(path, key.manifest_sha256)
        manifest = snapshots.read(path).manifest
        files = {**manifest.files, **manifest.model_files}
        if trust and node_store.is_verified(path, key.manifest_sha256):
            for name, entry in files.items():
                snapshots.check_size(path / name, entry)
            return
        base = self.find(manifest.base_key, trust=trust) if manifest.base_key else None
        try:
            for name, entry in files.items():
                with contextlib.suppress(OSError):
                    if base is not None and (base.path / name).samefile(path / name):
                        continue
                snapshots.check_file(path / name, entry)
        finally:
            if base is not None:
                base.release()
        # Without space for the record, the next one to use it hashes it again.
        with contextlib.suppress(OSError):
            node_store.mark_verified(path, key.manifest_sha256)

    @contextlib.contextmanager
    def assembling(self, key: SnapshotKey) -> Iterator[Path | None]:
        """Lock a directory to assemble a snapshot in, which becomes the complete one if the block succeeds.

        The block checks all hashes. The directory may hold what an interrupted process left. Waits while another
        process assembles the same snapshot, and yields None once that one has finished or given up: then `find` it, or
        try again. Raises SnapshotOutdated if another snapshot is wanted while waiting.
        """
        final = self.directory / key.name
        part = self.directory / f".{key.name}.part"
        # `clear` deletes the cache of a finished run, which may have been extended since.
        node_store.make_directory(self.directory)
        part.mkdir(exist_ok=True)
        try:
            descriptor = os.open(part, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            yield None
            return
        try:
            # A renamed directory stays locked as long as it is in use: waiting for that could take hours.
            while node_store.is_named(descriptor, part) and not node_store.try_lock(descriptor):
                self._progress.report(f"waiting for another searcher of this node to get v{key.version:08d}")
                self._progress.check(part.name)
                time.sleep(_POLL_SECONDS)
            self._progress.report("")
            # The name is checked again under the lock: the holder before us may have given the directory its final
            # name, and then this descriptor is the finished snapshot.
            if not node_store.is_named(descriptor, part) or final.exists():
                yield None
                return
            self._created |= {final, part}
            yield part
            node_store.mark_verified(part, key.manifest_sha256)
            os.rename(part, final)
        finally:
            os.close(descriptor)

    def collect(self) -> None:
        """Delete unused snapshots except the newest few, and abandoned parts older than the newest snapshot."""
        # By age, not by version: another run of this name may have had higher versions.
        finished = sorted(self.directory.glob(node_store.SNAPSHOT), key=node_store.modified_at)
        newest = node_store.modified_at(finished[-1]) if finished else 0.0
        parts = self.directory.glob(f".{node_store.SNAPSHOT}.part")
        abandoned = [path for path in parts if node_store.modified_at(path) < newest]
        for path in [*finished[:-_KEPT], *abandoned]:
            node_store.delete(path)
        for rest in self.directory.glob(node_store.DELETED):
            shutil.rmtree(rest, ignore_errors=True)
        self._created = {path for path in self._created if path.exists()}

    def remove_created(self) -> None:
        """Delete what this process has created and no process uses, and the directory if it is empty then."""
        for path in self._created:
            node_store.delete(path)
        with contextlib.suppress(OSError):
            self.directory.rmdir()


@dataclass(frozen=True, slots=True)
class _Trainer:
    """The trainer's directory of the announced snapshot, on this machine or a shared file system."""

    path: Path
    remote = False

    def fetch(self, version: int, name: str, target: Path, _size: int | None) -> str | None:
        """Hard-link a file, so that it outlives the original, or copy it. Raises SnapshotError.

        A base has the plain name of its version.
        """
        own = self.path.name.split("-")[0] == directory_name(version)
        source = (self.path if own else self.path.with_name(directory_name(version))) / name
        target.unlink(missing_ok=True)
        try:
            reason = link_or_copy(source, target)
        except OSError as error:
            raise snapshots.read_error(
                error,
                f"{source}: {error.strerror}: already deleted, or not on this machine: searchers on others need "
                "a shared file system, or train.serve_snapshots in the trainer's configuration",
            ) from error
        # Where searchers read weights from memory, a copy of those that are on disk is due.
        if reason and name.endswith(".safetensors") and not target.is_relative_to(MEMORY):
            _log_copy(source.parent.parent, target.parent.parent, reason)
        return None


# `fetch` brings a snapshot's file to a path, which may hold a prefix of it already. It returns the BLAKE3 of the file,
# if that was computed on the way. A `remote` source may have deltas.
Source = Nodes | _Trainer


@dataclass(eq=False)
class SnapshotAssembler:
    """Complete snapshots in the cache of this node. Used by one thread. `own` is the key pair of the node, if any."""

    directory: Path
    weights_from: Literal["auto", "path", "trainer"]
    clock: Clock
    progress: Progress = field(default_factory=Progress)
    own: KeyPair | None = None
    # The base of the newest adapters.
    _base: node_store.PinnedSnapshot | None = None

    def __post_init__(self) -> None:
        self._cache = NodeCache(self.directory, self.progress)

    def assemble(
        self, ref: WeightsRef, *, refresh: bool = False, nodes: Sequence[str] = ()
    ) -> tuple[Snapshot, node_store.PinnedSnapshot]:
        """Return the complete, verified files of an announced snapshot, and the pin that keeps them.

        `nodes` are the addresses to ask for files before the trainer. `refresh` hashes what is here again, and fetches
        from the trainer, without deltas. Raises SnapshotError; what was fetched is kept for the next attempt.
        """
        nodes = () if refresh else nodes
        with self._open_source(ref, nodes) as source:
            try:
                pinned = self._complete(source, SnapshotKey(ref.version, ref.manifest_sha256), refresh=refresh)
            except OSError as error:
                raise SnapshotError(f"v{ref.version} cannot be assembled in {self.directory}: {error}") from error
        snapshot = snapshots.read(pinned.path)
        base = snapshot.manifest.base_key
        # Absent if another searcher of the node has assembled this snapshot.
        if base is not None and (kept := node_store.pin_path(self._cache.directory / base.name)) is not None:
            self.close()
            self._base = kept
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

    @contextlib.contextmanager
    def _open_source(self, ref: WeightsRef, nodes: Sequence[str]) -> Iterator[Source]:
        """The source of an announced snapshot and of its ancestors. Raises SnapshotError if there is none."""
        path, way = Path(ref.path), self.weights_from
        if way == "path" or (way == "auto" and ((path / MANIFEST).is_file() or not ref.address)):
            with contextlib.ExitStack() as held:
                # A trainer on this machine writes to the files of old snapshots again, unless they are held.
                own = path.name == SnapshotKey(ref.version, ref.manifest_sha256).name
                if own and (pinned := node_store.pin_path(path)) is not None:
                    held.callback(pinned.release)
                yield _Trainer(path)
        elif ref.address:
            with contextlib.closing(Nodes([*nodes], ref.address, self.clock, self.progress, self.own)) as fetched:
                yield fetched
        else:
            raise SnapshotError(
                f'v{ref.version} cannot be fetched: search.weights_from = "trainer", and the trainer serves no '
                "snapshots; set train.serve_snapshots"
            )

    def _complete(self, source: Source, key: SnapshotKey, *, refresh: bool) -> node_store.PinnedSnapshot:
        trust = not refresh
        while (pinned := self._cache.find(key, trust=trust)) is None:
            with self._cache.assembling(key) as part:
                if part is not None:
                    self._assemble(source, key, part, refresh=refresh)
                    trust = True
        return pinned

    def _assemble(self, source: Source, key: SnapshotKey, part: Path, *, refresh: bool) -> None:
        published = _fetch_manifest(source, key, part)
        if refresh or not source.remote or not self._apply_deltas(source, published):
            for name, entry in published.manifest.files.items():
                _fetch_verified(source, key.version, name, part / name, entry)
            if published.manifest.base is not None:
                self._link_base(source, published, refresh=refresh)
        shutil.rmtree(part / _CHAIN, ignore_errors=True)

    def _apply_deltas(self, source: Source, published: Snapshot) -> bool:
        """Assemble a full snapshot from one that is complete here. False without deltas that are fewer bytes."""
        try:
            found = self._chain(source, published)
            if found is None:
                return False
            base, changes = found
            try:
                for change in changes:
                    _fetch_delta(source, published.path, change)
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

    def _chain(self, source: Source, newest: Snapshot) -> tuple[node_store.PinnedSnapshot, list[Snapshot]] | None:
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

    def _link_base(self, source: Source, published: Snapshot, *, refresh: bool) -> None:
        """Put the files of an adapter's base next to its own."""
        manifest, part = published.manifest, published.path
        assert manifest.base_key is not None
        base = self._base_of(source, manifest.base_key, part, refresh=refresh)
        try:
            if snapshots.read(base.path).manifest.files != manifest.complete:
                raise SnapshotCorrupt(f"the manifest of v{manifest.version} names other files than its base has")
            # They were verified with the base.
            for name in manifest.complete:
                (part / name).unlink(missing_ok=True)
                link_or_copy(base.path / name, part / name)
        except FileNotFoundError as error:
            raise SnapshotCorrupt(f"v{manifest.version} needs a file that its base lacks: {error}") from error
        finally:
            base.release()

    def _base_of(self, source: Source, key: SnapshotKey, part: Path, *, refresh: bool) -> node_store.PinnedSnapshot:
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
        return node_store.PinnedSnapshot(directory)


def _fetch_delta(source: Source, part: Path, change: Snapshot) -> None:
    assert change.manifest.delta is not None
    version, unpacked = change.manifest.version, _unpacked(part, change)
    unpacked.parent.mkdir(exist_ok=True)
    packed = unpacked.with_suffix(".zst")
    _fetch_verified(source, version, DELTA, packed, change.manifest.delta.file)
    delta.unpack_delta(packed, unpacked, change.manifest.delta.bytes)
    packed.unlink()


def _patch(base: Path, published: Snapshot, changes: list[Snapshot]) -> None:
    """Write the files of a full snapshot: the base's weights with the deltas of `changes`, and what is unchanged."""
    before = snapshots.read(base).manifest.files
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
        snapshots.check_file(patched, entry)
        patched.rename(target)


def _unpacked(part: Path, change: Snapshot) -> Path:
    return part / _CHAIN / f"{directory_name(change.manifest.version)}.safetensors"


@functools.cache
def _log_copy(source: Path, target: Path, reason: str) -> None:
    """Log once why weights are copied."""
    log.warning(
        "weights are copied, not linked: a search.weights_dir on the file system of the snapshots would save that",
        snapshots=source,
        weights_dir=target,
        reason=reason,
    )


def _fetch_verified(source: Source, version: int, name: str, target: Path, entry: FileEntry) -> None:
    """Fetch a file and check its hash; on a mismatch, fetch it once more from the start. Raises SnapshotError."""
    for last in (False, True):
        try:
            found = source.fetch(version, name, target, entry.bytes)
            if found is None:
                snapshots.check_file(target, entry)
            else:
                snapshots.check_hash(target, found, entry.blake3)
            return
        except SnapshotCorrupt as error:
            if last:
                raise
            log.warning("fetched again", file=name, version=version, reason=str(error))
            target.unlink(missing_ok=True)


def _fetch_manifest(source: Source, key: SnapshotKey, directory: Path) -> Snapshot:
    """Read the manifest of a snapshot in `directory`, fetched unless it is there. Raises SnapshotError."""
    path = directory / MANIFEST
    try:
        snapshots.check_manifest(directory, key.manifest_sha256)
    except SnapshotError:
        path.unlink(missing_ok=True)
        source.fetch(key.version, MANIFEST, path, None)
        snapshots.check_manifest(directory, key.manifest_sha256)
    return snapshots.read(directory)
