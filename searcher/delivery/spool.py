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
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgpack
import xxhash

from tba.common.errors import ConfigError, RecordLost, StorageError
from tba.common.log import get_logger
from tba.common.system.durable import exclusive_lock, open_regular
from tba.common.wire.codec import Frames

log = get_logger(__name__)

_LOCK, _OWNER, _ASIDE = "lock", "owner.json", "aside"
_PUT_SUFFIX = ".put"
# A file takes whole blocks of the file system; counting them keeps the limit honest for small puts.
_BLOCK_BYTES = 4096
# The first bytes of a file: xxh3 of the rest, which are the frames in msgpack.
_CHECKSUM_BYTES = 8
# A put this old was not delivered, though a searcher delivers within seconds, unless the buffer is away.
_UNDELIVERED_SECONDS = 600.0


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


@dataclass(eq=False, slots=True)
class Spool:
    """The puts of one start of a searcher: `create` it, or `find_dead_spools`. Used by one thread."""

    directory: Path
    owner: Owner
    _lock: contextlib.ExitStack
    # Bytes on disk of the puts that are not acknowledged.
    bytes: int = 0
    # Puts that were damaged or missing.
    damaged: int = 0
    _sizes: dict[int, int] = field(default_factory=dict)

    @classmethod
    def create(cls, root: Path, owner: Owner) -> "Spool":
        """Create a directory that is owned and locked from the moment it has its name. Raises StorageError."""
        directory, lock = root / owner.sender, contextlib.ExitStack()
        temporary = root / f".{owner.sender}.tmp"
        with _storage_errors(root):
            temporary.mkdir(parents=True, exist_ok=True)
            # A full disk is found here, as an OSError: `exclusive_lock` reports it as a mistake of the configuration.
            (temporary / _LOCK).touch()
            lock.enter_context(exclusive_lock(temporary / _LOCK, f"another process holds the spool {directory}"))
            (temporary / _OWNER).write_text(json.dumps(asdict(owner)), encoding="utf-8")
            temporary.rename(directory)
        return cls(directory, owner, lock)

    def load(self) -> dict[int, int]:
        """Find the puts that an earlier process left: size in bytes by id, in order. Raises StorageError."""
        with _storage_errors(self.directory):
            files = sorted(path for path in self.directory.glob(f"*{_PUT_SUFFIX}") if path.stem.isdigit())
            sizes = {int(path.stem): path.stat().st_size for path in files}
        for id_, size in sizes.items():
            self._count(id_, size)
        return sizes

    def path(self, id_: int) -> Path:
        return self.directory / f"{id_:016}{_PUT_SUFFIX}"

    def append(self, id_: int, frames: Frames) -> None:
        """Write a put under its request id. Raises StorageError and leaves no trace if the disk refuses it."""
        body = msgpack.packb(frames)
        parts = [xxhash.xxh3_64_digest(body), body]
        path = self.path(id_)
        temporary = f"{path}.tmp"
        size = sum(map(len, parts))
        with _storage_errors(self.directory):
            try:
                with open_regular(Path(temporary), "wb", buffering=0) as file:
                    if os.writev(file.fileno(), parts) != size:
                        raise OSError("the disk took only a part of a put: it is full, or a limit is reached")
                os.rename(temporary, path)
            except OSError:
                # A half-written file would keep space that the disk may lack.
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        self._count(id_, size)

    def read(self, id_: int) -> Frames | None:
        """Return a put's frames; None for a lost one, which moves to `spool/aside`. Raises StorageError."""
        try:
            return read_put(self.path(id_))
        except RecordLost as error:
            self.damaged += 1
            log.warning("a put is lost, and kept aside", reason=str(error), kept=self.aside(id_))
        # Where it cannot be moved, the next searcher finds it again.
        try:
            self.quarantine(id_)
        except StorageError as error:
            log.error("a damaged put stays where it is", reason=str(error))
        return None

    def acknowledge(self, id_: int) -> None:
        """Delete a stored put. Raises StorageError if the disk refuses: it is delivered again then, as a duplicate."""
        self.bytes -= self._sizes.pop(id_)
        with _storage_errors(self.directory):
            self.path(id_).unlink(missing_ok=True)

    def quarantine(self, id_: int) -> None:
        """Move a put to `spool/aside`; a missing file is ignored. Raises StorageError if the disk refuses."""
        target = self.aside(id_)
        with _storage_errors(self.path(id_)), contextlib.suppress(FileNotFoundError):
            target.parent.mkdir(exist_ok=True)
            self.path(id_).rename(target)
        self.bytes -= self._sizes.pop(id_)

    def close(self) -> None:
        """Release the lock. Puts that are left wait for the next searcher; without any, the directory is deleted."""
        if not self._sizes:
            shutil.rmtree(self.directory, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Release the lock and leave the directory as it is. Releasing twice is fine."""
        self._lock.close()

    def aside(self, id_: int) -> Path:
        """The file of a put once it is quarantined."""
        return self.directory.parent / _ASIDE / f"{self.directory.name}-{self.path(id_).name}"

    def _count(self, id_: int, size: int) -> None:
        self._sizes[id_] = -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
        self.bytes += self._sizes[id_]


def read_put(path: Path) -> Frames:
    """Return a put's frames. Raises RecordLost if it is damaged or missing, StorageError if the disk fails."""
    with _storage_errors(path):
        try:
            with open_regular(path) as file:
                content = file.read()
        except FileNotFoundError:
            raise RecordLost(f"the spool {path}: there is no such file") from None
    digest, body = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
    if digest != xxhash.xxh3_64_digest(body):
        raise RecordLost(f"the spool {path}: the put is damaged")
    frames: Frames = msgpack.unpackb(body)
    return frames


def find_dead_spools(root: Path, host: str) -> list[Spool]:
    """Lock and return the spools of dead searchers of a host, oldest name first.

    Those of other hosts are left alone, because their locks may be invisible here. Logs a warning of one with old puts:
    a container that starts under another host name does not find its own spool.
    """
    found = []
    for directory in sorted(path for path in root.glob("*") if path.name != _ASIDE):
        owner = _read_owner(directory)
        if owner is None:
            continue
        if owner.host != host:
            with contextlib.suppress(OSError):
                written = [put.stat().st_mtime for put in directory.glob(f"*{_PUT_SUFFIX}")]
                if written and min(written) < time.time() - _UNDELIVERED_SECONDS:
                    log.warning(
                        "spool of another host left alone: start a searcher there, or, if it is this machine under an "
                        f'earlier name, write "host": "{host}" into its owner.json',
                        directory=directory,
                        host=owner.host,
                    )
            continue
        lock = contextlib.ExitStack()
        with contextlib.suppress(OSError, ConfigError):
            lock.enter_context(exclusive_lock(directory / _LOCK, f"another process holds the spool {directory}"))
            if (directory / _OWNER).is_file():
                found.append(Spool(directory, owner, lock))
            else:
                # Delivered and deleted since it was read; locking may have created the directory again.
                shutil.rmtree(directory, ignore_errors=True)
                lock.close()
    return found


def _read_owner(directory: Path) -> Owner | None:
    try:
        with open_regular(directory / _OWNER) as file:
            owner = Owner(**json.load(file))
        bytes.fromhex(owner.secret)
    # Just deleted by the searcher that delivered it, damaged, or not a spool.
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return owner


@contextlib.contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    """Raise OSError as StorageError that names the spool."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"the spool {path}: {error.strerror or error}") from error
