"""Files and directories that exist completely or not at all, also after a power cut; and lock files."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import struct
import time
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, cast

from tba.common.errors import ConfigError, LockTaken

_KERNEL_COPY_BYTES = 1 << 30
_COPY_BYTES = 4 << 20
_LOCK_POLL_SECONDS = 0.01
# `is_locked` holds a lock for a moment.
_LOCK_SECONDS = 2 * _LOCK_POLL_SECONDS
_NO_KERNEL_COPY = frozenset({errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM})


def open_regular(path: Path, mode: str = "rb", buffering: int = -1) -> IO[bytes]:
    """Open a file as `open` does. Raises OSError for a FIFO or a device, which would stop this process.

    For files of runs, models, weights and keys. A configuration or data file may be a FIFO: `<(command)`.
    """
    file: IO[bytes] = open(  # noqa: SIM115
        path, mode, buffering, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, 0o666)
    )
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as a hex digest. Raises OSError as `open_regular`."""
    with open_regular(path) as file:
        return hashlib.file_digest(cast(BufferedReader, file), "sha256").hexdigest()


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file's content to a new file inside the kernel. A file system with reflinks shares the blocks.

    Raises FileExistsError if the target exists.
    """
    with source.open("rb") as reader, target.open("xb") as writer:
        try:
            while os.copy_file_range(reader.fileno(), writer.fileno(), _KERNEL_COPY_BYTES):
                pass
        except OSError as error:
            if error.errno not in _NO_KERNEL_COPY:
                raise
            reader.seek(0)
            writer.seek(0)
            writer.truncate()
            shutil.copyfileobj(reader, writer, _COPY_BYTES)


def link_or_copy(source: Path, target: Path) -> str:
    """Create a hard link to a file that never changes, else a copy. Returns "" for a link, or why it is a copy."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP):
            raise
        copy_file(source, target)
        return str(error.strerror)
    return ""


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees the old text or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    with temporary.open("x", encoding="utf-8") as file:
        file.write(text)
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace a file atomically with indented JSON."""
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    """Return indented JSON for a file: equal values give equal bytes."""
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def publish_directory(temporary: Path, final: Path) -> None:
    """Rename a finished directory to its final name, which must not exist: a published directory never changes.

    All files are synced before the rename, so that a directory under its final name is complete after a power cut.
    """
    for path in sorted(temporary.rglob("*")):
        sync(path)
    sync(temporary)
    os.rename(temporary, final)
    sync(final.parent)


def open_lock(path: Path) -> IO[bytes]:
    """Open a lock file, made if needed. Raises ConfigError if it cannot be, or is a link or no regular file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise ConfigError(f"{path} is no regular file, as a lock is: remove it")
        # Not truncated: the holder may have written into it.
        return open_regular(path, "ab")
    except OSError as error:
        raise ConfigError(f"{path.parent} is not a writable directory: {error.strerror}") from error


def lock_within(descriptor: int, seconds: float) -> None:
    """Lock an open file or directory. Raises BlockingIOError if another process keeps the lock, or another OSError."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_LOCK_POLL_SECONDS)


@contextlib.contextmanager
def exclusive_lock(path: Path, sentence: str) -> Iterator[None]:
    """Hold a lock file in the block. Raises LockTaken with the sentence if it is held, ConfigError as `open_lock`."""
    with open_lock(path) as file:
        try:
            lock_within(file.fileno(), _LOCK_SECONDS)
        except BlockingIOError:
            raise LockTaken(sentence) from None
        # The previous holder has removed the file, and another process may have created a new one: a lock on the
        # removed file would exclude no one.
        if not os.fstat(file.fileno()).st_nlink:
            raise LockTaken(sentence)
        yield


def is_locked(path: Path) -> bool:
    """Return whether a process holds `exclusive_lock` of a file. False for a file that is not there or not readable."""
    try:
        with open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def lock_bytes(file: int, start: int, length: int, sentence: str) -> None:
    """Lock bytes of an open file, which need not exist, until its descriptor is closed. Raises LockTaken.

    Unlike flock() on network file systems, it leaves other bytes to the locks of SQLite.
    """
    # struct flock: type, whence, start, length, process id.
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise LockTaken(sentence) from None


def temporary_directory(final: Path) -> Path:
    """Create an empty directory next to `final`, in place of one that a crashed writer left behind."""
    temporary = final.with_name(f".{final.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def require_space(directory: Path, needed: int, floor: int) -> None:
    """Raise OSError if `needed` bytes would leave less than `floor`, `train.min_free_mib` in bytes; 0 is no limit."""
    free = shutil.disk_usage(directory).free
    if floor and free - needed < floor:
        must = f"writing {needed >> 20} MiB must leave train.min_free_mib = {floor >> 20}"
        raise OSError(errno.ENOSPC, f"{free >> 20} MiB are free, and {must}", str(directory))


@contextlib.contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """Fill a directory in the block; at its end `publish_directory`. After an error no file is left."""
    temporary = temporary_directory(final)
    try:
        yield temporary
        publish_directory(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
