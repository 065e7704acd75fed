"""A spool: puts on disk until the buffer has acknowledged them. Files only, no sockets.

    spool/SENDER/    lock   owner.json   0000000000000007.put   0000000000000008.put ...
    spool/aside/     quarantined puts: damaged, or refused by the buffer

    append: write ID.put.tmp ──► rename it to ID.put ──► acknowledge: delete it

Invariant: `ID.put` is complete as soon as it has its name, and keeps the name until the put is acknowledged. Request
ids ascend, so names sort in the order of the puts. A directory whose lock is free belongs to a dead searcher: the
process that acquires the lock may deliver the puts under that searcher's sender id.

Nothing is synced: a put survives the death of its process, and a power cut as far as the kernel had written its pages
back, about 30 s. What a power cut destroys was not acknowledged; its prompts are leased again.
"""

import contextlib
import itertools
import json
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from tba.common.errors import RecordLost, StorageError
from tba.common.system.durable import exclusive_lock, open_regular
from tba.common.wire.codec import Frames

LOCK, OWNER, ASIDE = "lock", "owner.json", "aside"
PUT_SUFFIX = ".put"
# A file takes whole blocks of the file system; counting them keeps the limit honest for small puts.
_BLOCK_BYTES = 4096
# The first bytes of a file: xxh3 of the rest, which is the number of frames (uint32), the length of each (uint64), and
# the frames.
_CHECKSUM_BYTES = 8


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose puts a directory holds: uuid and name of the run, sender id of the puts, and host.

    `secret` in hex is the right to use the sender id (`tba.common.wire.channels.Peer.owner`).
    """

    run: str
    run_name: str
    sender: str
    host: str
    secret: str = ""

    def __post_init__(self) -> None:
        # Raises ValueError for a file that is damaged.
        bytes.fromhex(self.secret)


class Spool:
    """The puts of one start of a searcher. Used by one thread.

    Raises StorageError if the directory cannot be created.
    """

    def __init__(self, root: Path, owner: Owner, *, limit_bytes: int) -> None:
        self.directory = root / owner.sender
        self.limit_bytes = limit_bytes
        # Bytes on disk of the puts that are not acknowledged.
        self.bytes = 0
        self._sizes: dict[int, int] = {}
        self._lock = contextlib.ExitStack()
        with storage_errors(root):
            _create(self.directory, owner, self._lock)

    @property
    def is_full(self) -> bool:
        """Whether generation has to pause. `append` still accepts puts, so that complete groups are not lost."""
        return self.bytes >= self.limit_bytes

    def path(self, id_: int) -> Path:
        """The file of a put."""
        return Path(self._name(id_))

    def append(self, id_: int, frames: Frames) -> None:
        """Write a put under its request id. Raises StorageError and leaves no trace if the disk refuses it."""
        parts = _encode(frames)
        name = self._name(id_)
        temporary = f"{name}.tmp"
        with storage_errors(self.directory):
            try:
                _write(temporary, parts)
                os.rename(temporary, name)
            except OSError:
                # A half-written file would keep space that the disk may lack.
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        self._sizes[id_] = -(-sum(map(len, parts)) // _BLOCK_BYTES) * _BLOCK_BYTES
        self.bytes += self._sizes[id_]

    def acknowledge(self, id_: int) -> None:
        """Release the file of a put that the buffer has stored.

        Raises StorageError if the disk refuses. Nothing is lost: a put that stays is delivered again as a duplicate.
        """
        self._forget(id_)
        with storage_errors(self.directory):
            self.path(id_).unlink(missing_ok=True)

    def quarantine(self, id_: int) -> None:
        """Move a put to `spool/aside`. Raises StorageError and leaves it to the next searcher if the disk refuses."""
        quarantine(self.path(id_))
        self._forget(id_)

    def close(self) -> None:
        """Release the lock. Puts that are left wait for the next searcher; without any, the directory is deleted."""
        if not self._sizes:
            shutil.rmtree(self.directory, ignore_errors=True)
        self._lock.close()

    def _name(self, id_: int) -> str:
        return f"{self.directory}/{id_:016}{PUT_SUFFIX}"

    def _forget(self, id_: int) -> None:
        self.bytes -= self._sizes.pop(id_)


def read_put(path: Path) -> Frames:
    """Return the frames of a put.

    Raises RecordLost if the file is damaged or missing, which is final, and StorageError if the disk cannot read it,
    which may be transient.
    """
    with storage_errors(path):
        try:
            with open_regular(path) as file:
                content = file.read()
        except FileNotFoundError:
            raise RecordLost(f"the spool {path}: there is no such file") from None
    if (frames := _decode(content)) is None:
        raise RecordLost(f"the spool {path}: the put is damaged")
    return frames


def quarantined(path: Path) -> Path:
    """Where `quarantine` moves the file of a put."""
    return path.parent.parent / ASIDE / f"{path.parent.name}-{path.name}"


def quarantine(path: Path) -> None:
    """Move the file of a put to `spool/aside`; a missing file is ignored. Raises StorageError if the disk refuses."""
    target = quarantined(path)
    with storage_errors(path), contextlib.suppress(FileNotFoundError):
        target.parent.mkdir(exist_ok=True)
        path.rename(target)


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Raise OSError as StorageError that names the spool."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"the spool {path}: {error.strerror or error}") from error


def _create(directory: Path, owner: Owner, lock: contextlib.ExitStack) -> None:
    """Create a spool directory that is owned and locked from the moment it has its name."""
    temporary = directory.with_name(f".{directory.name}.tmp")
    temporary.mkdir(parents=True, exist_ok=True)
    # A full disk is found here, as an OSError: `exclusive_lock` reports it as a mistake of the configuration.
    (temporary / LOCK).touch()
    lock.enter_context(exclusive_lock(temporary / LOCK, f"another process holds the spool {directory}"))
    (temporary / OWNER).write_text(json.dumps(asdict(owner)), encoding="utf-8")
    temporary.rename(directory)


def _write(name: str, parts: Sequence[bytes]) -> None:
    """Write `parts` to a new file. Raises OSError."""
    with open(name, "wb", buffering=0) as file:
        if os.writev(file.fileno(), parts) != sum(map(len, parts)):
            raise OSError("the disk took only a part of a put: it is full, or a limit is reached")


def _encode(frames: Frames) -> list[bytes]:
    """The content of a put's file in parts. The frames are not copied."""
    lengths = struct.pack(f"<I{len(frames)}Q", len(frames), *map(len, frames))
    digest = xxhash.xxh3_64(lengths)
    for frame in frames:
        digest.update(frame)
    return [digest.digest(), lengths, *frames]


def _decode(content: bytes) -> Frames | None:
    """The frames of a put; None if the content is damaged."""
    body = memoryview(content)[_CHECKSUM_BYTES:]
    if content[:_CHECKSUM_BYTES] != xxhash.xxh3_64_digest(body):
        return None
    (count,) = struct.unpack_from("<I", body)
    lengths = struct.unpack_from(f"<{count}Q", body, 4)
    ends = list(itertools.accumulate(lengths, initial=4 + 8 * count))
    return [bytes(body[start:end]) for start, end in itertools.pairwise(ends)]
