"""Puts on disk until they are acknowledged: append-only segments of checksummed records. Files only, no sockets.

    spool/SENDER/   lock   owner.json   00000000.puts   00000001.puts ...
    spool/aside/    segments that hold something damaged or refused, for people

Invariant: the records of a segment are there until the puts of all of them are acknowledged. A directory whose lock
nobody holds belongs to a searcher that has died: who takes the lock may deliver what is in it, in its name.

Nothing is synced: what was appended survives the death of the process, and a power cut only as far as the system had
written its pages back, some 30 s. What a power cut takes was never acknowledged; its prompts are leased again.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from tba.common.errors import RecordLost, StorageError
from tba.common.log import get_logger
from tba.searcher.spool_records import Record, encode, scan

log = get_logger(__name__)

_SEGMENT_BYTES = 8 << 20
_SEGMENTS = 8  # at least so many within the limit, so that space is given back in parts
_SUFFIX = ".puts"
_LOCK, _OWNER, _ASIDE = "lock", "owner.json", "aside"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record is."""

    segment: int
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose puts a directory holds: the run's uuid and name, the sender of the puts, and its machine."""

    run: str
    run_name: str
    sender: str
    host: str


# ---------------------------------------------------------------- the spool of a living searcher


@dataclass(slots=True)
class _Segment:
    bytes: int = 0
    unacknowledged: int = 0
    damaged: bool = False  # it is put aside when it would be deleted


class Spool:
    """The puts of this start of a searcher. Used by one thread.

    Raises StorageError if the directory cannot be made.
    """

    def __init__(self, root: Path, owner: Owner, *, limit_bytes: int) -> None:
        self.directory = root / owner.sender
        self.limit_bytes = limit_bytes
        self._segment_bytes = min(_SEGMENT_BYTES, max(1, limit_bytes // _SEGMENTS))
        self._segments: dict[int, _Segment] = {}
        self._current = -1
        self._file: int | None = None
        self._aside_failed = False
        with _storage_errors(root):
            self._lock = _make(self.directory, owner)

    @property
    def bytes(self) -> int:
        """Bytes on disk, of segments that are not all acknowledged and of the one that is written."""
        return sum(segment.bytes for segment in self._segments.values())

    @property
    def is_full(self) -> bool:
        """Whether no more should be appended; what is appended all the same is kept."""
        return self.bytes >= self.limit_bytes

    def append(self, record: Record) -> Place:
        """Write a record. Raises StorageError if the disk does not take it; the spool is then as before."""
        parts = encode(record)
        size = sum(map(len, parts))
        with _storage_errors(self.directory):
            file, segment = self._open_segment()
            _write(file, parts, at=segment.bytes)
        place = Place(self._current, segment.bytes, size)
        segment.bytes += size
        segment.unacknowledged += 1
        return place

    def read(self, place: Place) -> Record:
        """A record that was appended.

        Raises StorageError if the disk does not read it now, which may pass, and RecordLost if what it reads is no
        record, or there is no file. The segment is then put aside, once the puts of all others in it are acknowledged:
        to copy it now would take space, which a spool is short of, and the disk may not give it at all.
        """
        path = self._path(place.segment)
        with _storage_errors(path):
            try:
                with path.open("rb") as file:
                    file.seek(place.offset)
                    found = next(scan(file.read(place.bytes)), None)
            except FileNotFoundError:
                reason = "there is no such file"
            else:
                if isinstance(found, Record):
                    return found
                reason = f"the record at byte {place.offset} is damaged"
        self._segments[place.segment].damaged = True
        raise RecordLost(f"the spool {path}: {reason}")

    def aside(self, place: Place) -> Path:
        """Where the segment of a damaged record will be."""
        return _aside(self._path(place.segment))

    def acknowledge(self, place: Place) -> None:
        """The put of this record is in the database: a segment without any other goes, the current one if it is full.

        That is now and not at the next append, which a full spool would never see. Raises StorageError if the disk does
        not give it back; then nothing is lost, and what is left there is delivered twice with the effect of once.
        """
        segment = self._segments[place.segment]
        segment.unacknowledged -= 1
        if segment.unacknowledged:
            return
        path = self._path(place.segment)
        with _storage_errors(path):
            if place.segment == self._current and self._file is not None and not segment.damaged:
                if segment.bytes >= self._segment_bytes:
                    segment.bytes = 0  # it is written over, also where it cannot be cut off
                    os.ftruncate(self._file, 0)
                return
            del self._segments[place.segment]
            if not segment.damaged:
                path.unlink(missing_ok=True)
                return
            try:
                _set_aside(path)
            except OSError:
                self._aside_failed = True
                raise

    def close(self) -> None:
        """Leave what is not acknowledged, or not put aside, to the next searcher; if that is nothing, no directory."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if not self._aside_failed and not any(segment.unacknowledged for segment in self._segments.values()):
            shutil.rmtree(self.directory, ignore_errors=True)
        self._lock.close()

    def _open_segment(self) -> tuple[int, _Segment]:
        """The segment to append to: the current one, or a new one."""
        segment = self._segments.get(self._current)
        if self._file is not None:
            if segment is not None and segment.bytes < self._segment_bytes:
                return self._file, segment
            os.close(self._file)
            self._file = None
        self._current += 1
        self._file = os.open(self._path(self._current), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        segment = self._segments[self._current] = _Segment()
        return self._file, segment

    def _path(self, segment: int) -> Path:
        return self.directory / f"{segment:08}{_SUFFIX}"


def _write(file: int, parts: Sequence[bytes], *, at: int) -> None:
    """Write all parts at a place, or nothing: what came of them is cut off again."""
    size = sum(map(len, parts))
    try:
        if os.pwritev(file, parts, at) != size:
            raise OSError("the disk took a part of it: it is full, or a limit is reached")
    except OSError:
        with contextlib.suppress(OSError):  # the torn record is skipped by who reads it
            os.ftruncate(file, at)
        raise


def _make(directory: Path, owner: Owner) -> IO[str]:
    """A directory with its owner and lock in it from the moment that it has its name."""
    temporary = directory.with_name(f".{directory.name}.tmp")
    temporary.mkdir(parents=True, exist_ok=True)
    lock = (temporary / _LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    (temporary / _OWNER).write_text(json.dumps(asdict(owner)), encoding="utf-8")
    temporary.rename(directory)
    return lock


# ---------------------------------------------------------------- the spools of dead ones


class Orphan:
    """The spool of a searcher that has died, locked by us."""

    def __init__(self, directory: Path, owner: Owner, lock: IO[str]) -> None:
        self.directory = directory
        self.owner = owner
        self.damaged = 0
        self._lock = lock
        self._aside: set[Path] = set()
        self._unread: list[Path] = []

    def records(self) -> Iterator[tuple[Path, Record]]:
        """Its records in the order of writing, each with its segment. Counts and tells what is damaged.

        A segment that the disk does not read now is told and passed over. Raises StorageError if it does not list them.
        """
        with _storage_errors(self.directory):
            paths = sorted(self.directory.glob(f"*{_SUFFIX}"))
        for path in paths:
            try:
                segment = path.read_bytes()
            except OSError as error:
                self._unread.append(path)
                log.warning("a segment of a dead searcher's spool was not read", path=path, reason=error.strerror)
                continue
            for found in scan(segment):
                if isinstance(found, Record):
                    yield path, found
                elif not found.torn:
                    self._damage(path, f"bytes {found.start} to {found.stop} are no record")

    def _damage(self, path: Path, reason: str) -> None:
        self.damaged += 1
        self.keep(path)
        log.warning("a part of a dead searcher's spool is damaged", path=path, reason=reason, kept=_aside(path))

    def keep(self, segment: Path) -> None:
        """Something of this segment was not delivered: it is put aside when the spool is removed."""
        self._aside.add(segment)

    @property
    def kept(self) -> list[Path]:
        """Where the segments are, or will be, that were put aside."""
        return [_aside(path) for path in sorted(self._aside)]

    def remove(self) -> None:
        """All that is sound is delivered. Raises StorageError, and removes nothing if a segment was not read."""
        if self._unread:
            names = ", ".join(path.name for path in self._unread)
            raise StorageError(f"the spool {self.directory}: {names} could not be read; the next start tries again")
        with _storage_errors(self.directory):
            for path in self._aside:
                _set_aside(path)
            shutil.rmtree(self.directory)
        self._lock.close()

    def close(self) -> None:
        """Leave it, with what is in it, to another searcher."""
        self._lock.close()


def find_orphans(root: Path, host: str) -> list[Orphan]:
    """The spools of dead searchers of this machine, whatever their run, locked. Oldest first."""
    directories = [path for path in root.glob("*") if path.name != _ASIDE and (path / _OWNER).is_file()]
    found = [_take(path, host) for path in sorted(directories, key=_age)]
    return [orphan for orphan in found if orphan is not None]


def _age(directory: Path) -> float:
    with contextlib.suppress(OSError):
        return (directory / _OWNER).stat().st_mtime
    return 0.0


def _take(directory: Path, host: str) -> Orphan | None:
    """Lock a directory. None if its searcher lives, or is of another machine, whose locks we may not see."""
    try:
        owner = Owner(**json.loads((directory / _OWNER).read_text(encoding="utf-8")))
        lock = (directory / _LOCK).open("r+")
    except (OSError, ValueError, TypeError):  # just removed, or not ours
        return None
    try:
        if owner.host == host:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (directory / _OWNER).is_file():  # nobody delivered and removed it meanwhile
                return Orphan(directory, owner, lock)
    except OSError:
        pass
    lock.close()
    return None


def _aside(segment: Path) -> Path:
    return segment.parent.parent / _ASIDE / f"{segment.parent.name}-{segment.name}"


def _set_aside(segment: Path) -> None:
    kept = _aside(segment)
    kept.parent.mkdir(exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # somebody has removed it
        segment.rename(kept)


@contextlib.contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"the spool {path}: {error.strerror or error}") from error
