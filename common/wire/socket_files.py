"""The files of ipc sockets, where only one server listens and only its user connects; and who can reach an address."""

import contextlib
import errno
import hashlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from tba.common.errors import ConfigError
from tba.common.system.durable import lock_within

# Binding holds the directory lock for milliseconds; another program may hold it indefinitely.
_LOCK_SECONDS = 2.0
# Of struct sockaddr_un, without the terminating zero (unix(7)).
_LONGEST_PATH = 107
# Every user writes there; the directory below it is checked.
_MEMORY = Path("/dev/shm")  # noqa: S108


def socket_of(run_dir: Path) -> Path:
    """Return the socket file of a run's buffer: in its directory, or in memory if that path is too long."""
    path = run_dir.absolute() / "buffer.socket"
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        return path
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return _MEMORY / f"tba-{os.getuid()}" / f"{name}.socket"


def make_socket_directory(address: str, *, in_memory_alone: bool = False) -> None:
    """Create the directory of an ipc address. Raises ConfigError if it cannot be used.

    A client needs it `in_memory_alone`, where another user could take it first.
    """
    directory = _path_of(address).parent
    if not has_file(address) or (in_memory_alone and directory.parent != _MEMORY):
        return
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the directory of {address} cannot be created: {error.strerror}: set buffer.address"
        ) from error
    state = directory.lstat()
    if directory.parent == _MEMORY and (state.st_uid != os.getuid() or state.st_mode & 0o077):
        raise ConfigError(f"other users have access to {directory}: set buffer.address, or remove the directory")


def has_file(address: str) -> bool:
    """Whether a ZeroMQ endpoint names a socket file: an abstract address has none, a wildcard gets a new one."""
    return address.startswith("ipc://") and not address.startswith(("ipc://@", "ipc://*"))


def keep_private(address: str) -> None:
    """Let only this user connect to the socket file of a bound address. Raises OSError."""
    if has_file(address):
        _path_of(address).chmod(0o600)


def _path_of(address: str) -> Path:
    return Path(address.removeprefix("ipc://"))


@contextlib.contextmanager
def free_socket_file(address: str) -> Iterator[None]:
    """Ensure that no program listens at an ipc address while the block binds it. Raises OSError.

    ZeroMQ would take the name from it. The lock is for two servers that start at the same time.
    """
    if not has_file(address):
        yield
        return
    path = _path_of(address)
    with _locked(path.parent):
        if path.exists() and not path.is_socket():
            raise FileExistsError(errno.EEXIST, "the file is not a socket")
        if _listens(path):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        yield


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lock a directory, if the file system supports it. Raises BlockingIOError if another program keeps the lock.

    A directory and not a lock file, as `durable.exclusive_lock` would make: it stays clean. Other OSErrors pass.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    # An unreadable directory may still be writable: binding will tell.
    except PermissionError:
        yield
        return
    try:
        try:
            lock_within(descriptor, _LOCK_SECONDS)
        # Some network file systems cannot lock directories.
        except OSError as error:
            if isinstance(error, BlockingIOError):
                raise
        yield
    finally:
        os.close(descriptor)


def _listens(path: Path) -> bool:
    """Whether a program accepts connections at a socket file. If that cannot be determined, assume that it does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # A blocking connect would wait if the listener's backlog is full.
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except OSError as error:
            # An error without a number: the path is too long for a socket, and binding will fail with that.
            return error.errno not in (None, errno.ENOENT, errno.ECONNREFUSED)
    return True


# The names of the loopback interface in addresses of HTTP servers, and the least length of a token for others.
LOOPBACK = ("127.0.0.1", "::1", "localhost")
LEAST_TOKEN = 16


def host_name(host: str) -> str:
    """Return the name or address of a Host header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


_LOOPBACK = re.compile(r"tcp://(127\.|localhost:|\[::1\]:)")


def is_local(address: str) -> bool:
    """Whether an endpoint can be reached only from this machine."""
    return address.startswith("ipc://") or _LOOPBACK.match(address) is not None


def is_private(address: str) -> bool:
    """Whether no other user or machine reaches an endpoint but by its file's mode; abstract sockets have none."""
    return is_local(address) and not address.startswith("ipc://@")
