"""The weights that the searchers of a node share: each snapshot is made once, kept while it serves, then deleted.

    CACHE/v00000042-1a2b3c4d5e6f7a8b/         complete and proved; never changes. Who serves it holds a shared lock
    CACHE/.v00000043-8b7a6f5e4d3c2b1a.part/   being made, under an exclusive lock; goes on from a killed maker

The locks are flock's, on the directories themselves: they end with the process that holds them, and go along when a
finished directory gets its name. The directory must therefore be on a local file system.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tba.common.errors import ConfigError, DamagedInUse, SnapshotError, SnapshotOutdated
from tba.common.log import get_logger

log = get_logger(__name__)

# Besides those in use: the base of the next delta, and the one before, in case that a swap is undone.
# Our own names and no others: search.weights_dir may be a directory that has more in it.
_SNAPSHOT = f"v[0-9]*-{'[0-9a-f]' * 16}"
_DELETED = f".deleted-[0-9]*-{_SNAPSHOT}*"
_KEPT = 2
_POLL_SECONDS = 0.1


@dataclass(slots=True)
class Held:
    """A snapshot that stays where it is until it is released."""

    path: Path
    _descriptor: int

    @classmethod
    def within(cls, path: Path) -> "Held":
        """A directory in one that is being made: nobody else takes that away, and it has no lock of its own."""
        return cls(path, -1)

    def release(self) -> None:
        """Let it be collected. Releasing twice is fine."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class NodeCache:
    """The cache of one searcher process; others of the node use the same directory. Used by one thread.

    Raises ConfigError if the directory cannot be used.
    """

    def __init__(self, directory: Path, *, wanted: Callable[[], bool], tell: Callable[[str], None]) -> None:
        self.directory = directory
        self._wanted = wanted
        self._tell = tell
        self._proved: set[str] = set()  # names this process has made or checked
        self._made: set[Path] = set()  # what this process has made, or begun
        make_directory(directory)

    def find(self, name: str, check: Callable[[Path], None]) -> Held | None:
        """A snapshot that is there, held; None if it is not, or fails its check (then it is deleted).

        Raises DamagedInUse if it fails its check and cannot be deleted.
        """
        held = self._hold(self.directory / name)
        if held is None or name in self._proved:
            return held
        try:
            check(held.path)
        except BaseException as error:
            held.release()
            if not isinstance(error, SnapshotError):
                raise
            log.warning("cached weights are damaged", path=held.path, reason=str(error))
            if not _delete(held.path):
                raise DamagedInUse(f"{error}, and a searcher serves it") from error
            return None
        self._proved.add(name)
        return held

    def hold(self, name: str) -> Held | None:
        """A snapshot that is there, kept from being collected and not checked; None if it is not there."""
        return self._hold(self.directory / name)

    def acquire(self, name: str, make: Callable[[Path], None], check: Callable[[Path], None]) -> Held:
        """The snapshot of that name, made by `make` in a directory of its own unless it is there.

        `make` may find what an earlier maker left. If another process is at it, waits for that one. Raises what
        `make` raises, and SnapshotOutdated if the snapshot is no longer wanted while waiting.
        """
        while True:
            if held := self.find(name, check):
                return held
            part = self._lock_part(name)
            try:
                if part is not None and not (self.directory / name).exists():
                    self._made |= {self.directory / name, part.path}
                    make(part.path)
                    os.rename(part.path, self.directory / name)
                    self._proved.add(name)
            finally:
                if part is not None:
                    part.release()

    def forget(self, name: str) -> None:
        """Have a snapshot checked again before it is next used."""
        self._proved.discard(name)

    def collect(self) -> None:
        """Delete what nobody uses: all but the last few snapshots, and what was begun before the last one."""
        # By age, not by version: another run of this name may have had higher ones.
        finished = sorted(self.directory.glob(_SNAPSHOT), key=_made_at)
        begun = [
            path
            for path in self.directory.glob(f".{_SNAPSHOT}.part")
            if finished and _made_at(path) < _made_at(finished[-1])
        ]
        for path in [*finished[:-_KEPT], *begun]:
            if _delete(path):
                self._proved.discard(path.name)
        for rest in self.directory.glob(_DELETED):
            shutil.rmtree(rest, ignore_errors=True)

    def remove_made(self) -> None:
        """Delete what this process has made, unless somebody holds it, and the directory if nothing is left of it."""
        for path in self._made:
            _delete(path)
        with contextlib.suppress(OSError):
            self.directory.rmdir()

    def _hold(self, path: Path) -> Held | None:
        """A shared lock on a directory that has its name."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits at most for a deletion
        if _is(descriptor, path):
            return Held(path, descriptor)
        os.close(descriptor)
        return None

    def _lock_part(self, name: str) -> Held | None:
        """The directory where a snapshot is made, locked; None if somebody else has just finished it."""
        part = self.directory / f".{name}.part"
        make_directory(self.directory)  # it goes with a run that finished, and may be back with more steps
        part.mkdir(exist_ok=True)
        try:
            descriptor = os.open(part, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # it got its name, or was collected, this very moment
            return None
        held = Held(part, descriptor)
        try:
            # Once it has its name it is in use, and will not be free for long: there is nothing left to wait for.
            while _is(descriptor, part) and not _try_lock(descriptor):
                self._tell(f"waiting for another searcher of this node to get {name.partition('-')[0]}")
                if not self._wanted():
                    raise SnapshotOutdated(f"{name} is no longer wanted")
                time.sleep(_POLL_SECONDS)
        except BaseException:
            held.release()
            raise
        self._tell("")
        if _is(descriptor, part):
            return held
        held.release()
        return None


def make_directory(directory: Path) -> None:
    """Make the directory of a cache. Raises ConfigError if it cannot be used."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        mine = directory.stat().st_uid == os.getuid()
    except OSError as error:
        raise ConfigError(f"search.weights_dir {directory} cannot be made: {error.strerror}") from error
    if not mine:
        raise ConfigError(f"search.weights_dir {directory} belongs to another user: set another one")


def clear(directory: Path) -> None:
    """Delete all that no process holds, and the directory if nothing is left of it."""
    for path in [*directory.glob(_SNAPSHOT), *directory.glob(f".{_SNAPSHOT}.part")]:
        _delete(path)
    for rest in directory.glob(_DELETED):
        shutil.rmtree(rest, ignore_errors=True)
    with contextlib.suppress(OSError):  # somebody else still serves from here
        directory.rmdir()


def _made_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is(descriptor: int, path: Path) -> bool:
    """Whether an open directory still has this name: it may have been renamed or deleted before it was locked."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _delete(path: Path) -> bool:
    """Delete a directory unless somebody holds it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return True
    try:
        if not _try_lock(descriptor) or not _is(descriptor, path):
            return False
        deleted = path.with_name(f".deleted-{os.getpid()}-{path.name.lstrip('.')}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, deleted)
            shutil.rmtree(deleted, ignore_errors=True)
        return True
    finally:
        os.close(descriptor)
