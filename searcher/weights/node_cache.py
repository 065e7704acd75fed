"""The snapshots that the searchers of one node share: each is assembled once, kept while in use, then deleted.

A `.part` directory is resumed after a crash. Names and locks: `tba.common.weights.node_store`.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from tba.common.errors import DamagedInUse, SnapshotError
from tba.common.log import get_logger
from tba.common.weights.node_store import (
    DELETED,
    SNAPSHOT,
    PinnedSnapshot,
    delete,
    is_named,
    is_verified,
    make_directory,
    mark_verified,
    modified_at,
    pin,
    try_lock,
    unmark_verified,
)
from tba.common.weights.snapshot import SnapshotKey, check_file, check_manifest, check_size, read
from tba.searcher.weights.progress import Progress

log = get_logger(__name__)

# Unused snapshots to keep: the base of the next delta, and the one before it in case a swap is rolled back.
_KEPT = 2
_POLL_SECONDS = 0.1


class NodeCache:
    """The cache as one searcher process uses it; others of the node use the same directory. Used by one thread.

    Raises ConfigError if the directory cannot be used.
    """

    def __init__(self, directory: Path, progress: Progress) -> None:
        self.directory = directory
        self._progress = progress
        self._created: set[Path] = set()
        make_directory(directory)

    def find(self, key: SnapshotKey, *, trust: bool = True) -> PinnedSnapshot | None:
        """Pin a complete snapshot; None if it is not here, or is damaged (then it is deleted).

        Its files are hashed unless the process that made it has recorded their hashes and `trust` accepts that. Raises
        DamagedInUse if it is damaged and another process uses it.
        """
        pinned = pin(self.directory, key)
        if pinned is None:
            return None
        try:
            self._check(key, pinned.path, trust=trust)
        except SnapshotError as error:
            # If it is in use it stays, and no other process may trust it.
            unmark_verified(pinned.path)
            pinned.release()
            log.warning("cached weights are damaged", path=pinned.path, reason=str(error))
            if not delete(pinned.path):
                raise DamagedInUse(f"{error}, and a process of this node uses it") from error
            return None
        return pinned

    def _check(self, key: SnapshotKey, path: Path, *, trust: bool) -> None:
        """Check a complete snapshot. Raises SnapshotError.

        The files that an adapter shares with its base are checked with the base: else each adapter would cost a hash of
        all weights.
        """
        check_manifest(path, key.manifest_sha256)
        manifest = read(path).manifest
        files = {**manifest.files, **manifest.model_files}
        if trust and is_verified(path, key.manifest_sha256):
            for name, entry in files.items():
                check_size(path / name, entry)
            return
        base = self.find(manifest.base_key, trust=trust) if manifest.base_key else None
        try:
            for name, entry in files.items():
                if base is None or not _same_file(base.path / name, path / name):
                    check_file(path / name, entry)
        finally:
            if base is not None:
                base.release()
        # Without space for the record, the next one to use it hashes it again.
        with contextlib.suppress(OSError):
            mark_verified(path, key.manifest_sha256)

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
        make_directory(self.directory)
        part.mkdir(exist_ok=True)
        try:
            descriptor = os.open(part, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            yield None
            return
        try:
            # A renamed directory stays locked as long as it is in use: waiting for that could take hours.
            while is_named(descriptor, part) and not try_lock(descriptor):
                self._progress.report(f"waiting for another searcher of this node to get {key.name.split('-')[0]}")
                self._progress.check(part.name)
                time.sleep(_POLL_SECONDS)
            self._progress.report("")
            # The name is checked again under the lock: the holder before us may have given the directory its final
            # name, and then this descriptor is the finished snapshot.
            if not is_named(descriptor, part) or final.exists():
                yield None
                return
            self._created |= {final, part}
            yield part
            mark_verified(part, key.manifest_sha256)
            os.rename(part, final)
        finally:
            os.close(descriptor)

    def collect(self) -> None:
        """Delete unused snapshots except the newest few, and abandoned parts older than the newest snapshot."""
        # By age, not by version: another run of this name may have had higher versions.
        finished = sorted(self.directory.glob(SNAPSHOT), key=modified_at)
        parts = [
            path
            for path in self.directory.glob(f".{SNAPSHOT}.part")
            if finished and modified_at(path) < modified_at(finished[-1])
        ]
        for path in [*finished[:-_KEPT], *parts]:
            delete(path)
        for rest in self.directory.glob(DELETED):
            shutil.rmtree(rest, ignore_errors=True)

    def remove_created(self) -> None:
        """Delete what this process has created and no process uses, and the directory if it is empty then."""
        for path in self._created:
            delete(path)
        with contextlib.suppress(OSError):
            self.directory.rmdir()


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
