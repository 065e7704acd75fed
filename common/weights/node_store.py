"""The directories of snapshots on one node, shared by its trainer and its searchers.

    WEIGHTS/v00000042-1a2b3c4d5e6f7a8b/         complete; never changes. Its users hold a shared lock on it
    WEIGHTS/.v00000043-8b7a6f5e4d3c2b1a.part/   being written or assembled under an exclusive lock

A name has the version and the first digits of the manifest's sha256. The locks are flock locks on the directories
themselves: they end with the process that holds them, and stay on a finished directory when it is renamed.
`durable.exclusive_lock` does neither. The directory must therefore be on a local file system.

Who makes a directory knows its content, from hashing it, and records that before it gets its name: the other processes
of the same user do not hash it again. Nothing here is synced to disk, so a record is only valid until the next boot.
"""

import contextlib
import fcntl
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from tba.common.errors import ConfigError
from tba.common.system.durable import open_regular
from tba.common.weights import delta

# Exactly the names that this module creates: search.weights_dir may be a directory that holds other things too.
SNAPSHOT = f"v[0-9]*-{'[0-9a-f]' * 16}"
DELETED = f".deleted-[0-9]*-{SNAPSHOT}*"

# The mark of a directory whose files were verified. Not named by any manifest.
VERIFIED = "verified"

_BOOT = Path("/proc/sys/kernel/random/boot_id")
# The newest, the one before, which may be served while the next one is written, and one that a slow searcher reads.
COPIES = 4
_POLL_SECONDS = 0.01
# What a name leads to that is deleted, or whose directory was replaced by a file.
_GONE = (FileNotFoundError, NotADirectoryError)


@dataclass(slots=True)
class PinnedSnapshot:
    """A snapshot directory that is kept until released, by a shared lock on `_descriptor`; on disk without one."""

    path: Path
    _descriptor: int | None = None

    def release(self) -> None:
        """Allow the directory to be deleted. May be called twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def pin_path(path: Path) -> PinnedSnapshot | None:
    """Keep a directory from being deleted or written again; None if it is not here."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except _GONE:
        return None
    # Under an exclusive lock it is about to lose its name, and may keep the lock under the next one.
    while not (locked := try_lock(descriptor, fcntl.LOCK_SH)) and is_named(descriptor, path):
        time.sleep(_POLL_SECONDS)
    if locked and is_named(descriptor, path):
        return PinnedSnapshot(path, descriptor)
    os.close(descriptor)
    return None


def mark_verified(directory: Path, manifest_sha256: str) -> None:
    """Record that every file in a directory has the hash in its manifest. Called before it gets its final name."""
    (directory / VERIFIED).write_text(_mark(manifest_sha256), encoding="ascii")


def is_verified(directory: Path, manifest_sha256: str) -> bool:
    """Whether a process of this user has recorded, since the last boot, that the files are those of this manifest."""
    try:
        own = all(path.lstat().st_uid == os.getuid() for path in (directory, directory / VERIFIED))
        with open_regular(directory / VERIFIED) as file:
            return own and file.read() == _mark(manifest_sha256).encode()
    except (OSError, ValueError):
        return False


def _mark(manifest_sha256: str) -> str:
    return f"{_BOOT.read_text(encoding='ascii').strip()} {manifest_sha256}\n"


def make_directory(directory: Path) -> None:
    """Create a cache directory. Raises ConfigError if it cannot be used."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = directory.stat().st_uid == os.getuid()
    except OSError as error:
        raise ConfigError(f"search.weights_dir {directory} cannot be created: {error.strerror}") from error
    if not own:
        raise ConfigError(f"search.weights_dir {directory} belongs to another user: set another one")


def clear(directory: Path) -> None:
    """The run is finished: delete this node's cached weights that are not in use, and the directory if it is empty."""
    for path in [*directory.glob(SNAPSHOT), *directory.glob(f".{SNAPSHOT}.part")]:
        delete(path)
    for rest in (*directory.glob(DELETED), directory / delta.FOLDER):
        shutil.rmtree(rest, ignore_errors=True)
    with contextlib.suppress(OSError):
        directory.rmdir()


def modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except _GONE:
        return 0.0


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open directory unless that would mean waiting. False if it would."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_named(descriptor: int, path: Path) -> bool:
    """Whether an open directory still has this name: it may have been renamed or deleted before it was locked."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except _GONE:
        return False


def delete(path: Path) -> bool:
    """Delete a directory, renamed first. Returns False if a process uses it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except _GONE:
        return True
    try:
        if not try_lock(descriptor) or not is_named(descriptor, path):
            return False
        deleted = path.with_name(f".deleted-{os.getpid()}-{path.name.lstrip('.')}")
        with contextlib.suppress(*_GONE):
            os.rename(path, deleted)
            shutil.rmtree(deleted, ignore_errors=True)
        return True
    finally:
        os.close(descriptor)
