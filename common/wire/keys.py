"""Key pairs of nodes, and the keys that a server admits.

`security.keys` is a directory:

    node.key               the key pair of this node, for its clients and its servers; only this user may read it
    buffer.pub             the public key of the buffer's node; without this file the buffer is on this node
    authorized/NAME.pub    the public keys that this node's servers admit, and their roles

Where systemd passes `node.key` as a credential (`LoadCredential=`, systemd.exec(5)), only root need read that file.
A key is 32 bytes, in hex. ZeroMQ encrypts with CURVE (https://rfc.zeromq.org/spec/26).
"""

import contextlib
import json
import os
import re
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from tba.common.errors import ConfigError, first_line
from tba.common.log import get_logger
from tba.common.system.durable import open_regular
from tba.common.wire.fields import Role
from tba.common.wire.socket_files import is_private

log = get_logger(__name__)

KeyRole = Literal["searcher", "trainer", "importer", "monitor"]
KEY_ROLES: tuple[KeyRole, ...] = get_args(KeyRole)
# The roles of messages that a key may use. Every node may ask for the status.
_ROLES_OF_MESSAGES: dict[KeyRole, tuple[Role, ...]] = {
    "searcher": ("searcher", "evaluator", "monitor"),
    "trainer": ("trainer", "publisher", "monitor"),
    "importer": ("importer", "monitor"),
    "monitor": ("monitor",),
}
OWN, BUFFER, AUTHORIZED = "node.key", "buffer.pub", "authorized"
# Modes that a file may not have: a user who can write to a key could exchange it. Of a credential systemd lists its
# reader in an access control list, whose mask is shown as the mode of the group.
_SECRET, _CREDENTIAL, _PUBLIC = 0o077, 0o037, 0o022
# A revoked key is refused after this time.
_RELOAD_SECONDS = 1.0
_HEX = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
# How an address on the wire names the public key of its server.
_KEY_MARK = "#"


@dataclass(frozen=True, slots=True)
class KeyPair:
    name: str
    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a client needs for an encrypted connection: its own pair and the public key that the server must have."""

    own: KeyPair
    server: str


@dataclass(frozen=True, slots=True)
class Authorized:
    name: str
    roles: tuple[KeyRole, ...]

    def speaks_as(self, role: Role) -> bool:
        return any(role in _ROLES_OF_MESSAGES[own] for own in self.roles)


class AuthorizedKeys:
    """The files of a directory of authorised keys, read again when they change. Used by several threads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._by_key: dict[str, Authorized] = {}
        self._seen: dict[str, tuple[int, int]] = {}
        self._read_at = float("-inf")

    def find(self, public: str) -> Authorized | None:
        """Return who has this key, None if it is not authorised, or no longer."""
        now = time.monotonic()
        if now - self._read_at >= _RELOAD_SECONDS:
            self._read_at = now
            self._reload()
        return self._by_key.get(public)

    def _reload(self) -> None:
        seen = {}
        try:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.directory) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        state = entry.stat()
                        # Its ctime changes with its mode and owner, too, which decide whether it is admitted.
                        seen[entry.name] = state.st_ctime_ns, state.st_ino
            if seen != self._seen:
                self._by_key = {public: known for known, public in read_authorized(self.directory)}
                self._seen = seen
        # Many connections may have used up the descriptors of the process. The next look is a second later.
        except OSError as error:
            reason = f"{self.directory} cannot be read: {error.strerror}"
            log.warning("the keys that were read last are used", reason=reason)


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """What a server needs for encrypted connections: its own pair, and whom to admit."""

    own: KeyPair
    admitted: AuthorizedKeys

    def refusal(self, public: str, roles: Sequence[KeyRole]) -> str:
        """Return why a client with this key, which must have one of the roles, is refused; empty if it is not."""
        known = self.admitted.find(public)
        if known is None:
            return f"the key {public} is not authorised"
        if not set(roles) & set(known.roles):
            return f"the key of {known.name} is for {', '.join(known.roles)}, not for {' or '.join(roles)}"
        return ""


def key_role_for(role: Role) -> KeyRole:
    """Return the role that a key must have to send messages of a role."""
    return next(own for own, roles in _ROLES_OF_MESSAGES.items() if role in roles)


def read_authorized(directory: Path) -> list[tuple[Authorized, str]]:
    """Return the authorised keys of a directory, each with its public key. A file that is not valid is left out."""
    found = []
    for path in sorted(directory.glob("*.pub")):
        try:
            values = _read(path, _PUBLIC)
            roles = values.get("roles")
            if not isinstance(roles, list) or not all(role in KEY_ROLES for role in roles):
                raise ConfigError(f"{path}: roles must be a list of {', '.join(KEY_ROLES)}")
            found.append((Authorized(path.stem, tuple(roles)), _hex(values, "public", path)))
        except ConfigError as error:
            log.warning("a key is not admitted", reason=str(error))
    return found


def own_pair(directory: Path) -> KeyPair:
    """Return the key pair of this node. Raises ConfigError if there is none, or if others may read it."""
    path = Path(os.environ.get("CREDENTIALS_DIRECTORY", "/nonexistent")) / OWN
    # The units pass one without values where the file does not exist.
    values = _read(path, _CREDENTIAL) if path.exists() else {}
    if not values:
        path = directory / OWN
        values = _read(path)
    return KeyPair(str(values.get("name", "")), _hex(values, "public", path), _hex(values, "secret", path))


def node_pair(directory: Path | None) -> KeyPair | None:
    """Return the key pair of this node, None without a directory of keys. Raises ConfigError."""
    return None if directory is None else own_pair(directory)


def buffer_key(directory: Path) -> str:
    """Return the public key of the buffer's node. Raises ConfigError."""
    path = directory / BUFFER
    return _hex(_read(path, _PUBLIC), "public", path) if path.exists() else own_pair(directory).public


def write_pair(directory: Path, pair: KeyPair) -> Path:
    """Write the key pair of a node, for this user alone. Raises ConfigError if it has one, or cannot be written."""
    path = directory / OWN
    with _write_errors(path):
        _make_directory(directory)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(_toml(name=pair.name, public=pair.public, secret=pair.secret))
    return path


def write_public(path: Path, **values: str | Sequence[str]) -> None:
    """Write a public key and what belongs to it, in one step. Raises ConfigError."""
    with _write_errors(path):
        _make_directory(path.parent)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(_toml(**values), encoding="ascii")
        # Root may write what another user's servers read, and no group may change it, whatever the umask.
        temporary.chmod(0o644)
        temporary.replace(path)


def check_name(name: str) -> str:
    """Return the name of a key. Raises ConfigError for one that is not a plain file name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be the name of a key: use letters, digits, dot, dash and underscore")
    return name


def check_public(public: str) -> str:
    """Return a public key. Raises ConfigError for anything else."""
    if not _HEX.fullmatch(public):
        raise ConfigError(f"{public!r} is not a public key, which has 64 hexadecimal digits: `tba keys new` prints it")
    return public


def buffer_client_keys(directory: Path | None, address: str) -> ClientKeys | None:
    """Return the keys of a client of the buffer; None without a directory, or for a socket file. Raises ConfigError."""
    if directory is None or not address.startswith("tcp://"):
        return None
    return ClientKeys(own_pair(directory), buffer_key(directory))


def server_keys(directory: Path | None, address: str, setting: str, *, insecure: bool) -> ServerKeys | None:
    """Return the keys of a server at an address, None if it needs none. Raises ConfigError, also if it needs some.

    `insecure` admits addresses that others can reach without keys. `setting` names the address in errors.
    """
    if directory is not None and address.startswith("tcp://"):
        return ServerKeys(own_pair(directory), AuthorizedKeys(directory / AUTHORIZED))
    if address.startswith("ipc://@") and not insecure:
        raise ConfigError(
            f"{setting} {address} is an abstract socket, to which every user of this machine can connect: name a "
            "socket file, such as ipc:///run/user/1000/buffer.socket"
        )
    if not (is_private(address) or insecure):
        raise ConfigError(
            f"{setting} {address} can be reached from other machines, and without keys any program there may read and"
            " change the run: create keys (docs/security.md), or set security.insecure = true in a trusted network"
        )
    return None


def with_key(address: str, keys: ServerKeys | None) -> str:
    """Return the address of a server with its public key, as it is announced to its clients."""
    return f"{address}{_KEY_MARK}{keys.own.public}" if keys else address


def announced(address: str, own: KeyPair | None) -> tuple[str, ClientKeys | None]:
    """Return the endpoint of an announced address, and the keys for it. Raises ConfigError without an own pair."""
    endpoint, mark, public = address.partition(_KEY_MARK)
    if not mark:
        return endpoint, None
    if own is None:
        raise ConfigError(f"the server at {endpoint} needs keys: set security.keys")
    return endpoint, ClientKeys(own, check_public(public))


def _read(path: Path, forbidden: int = _SECRET) -> dict[str, object]:
    """Return the values of a key file. Raises ConfigError if it is not there, not valid, or open to others."""
    try:
        with open_regular(path) as file:
            state = os.fstat(file.fileno())
            if state.st_mode & forbidden or state.st_uid not in (os.getuid(), 0):
                raise ConfigError(f"{path} is open to other users: it must belong to this user (chmod 600 {path})")
            return tomllib.load(file)
    except OSError as error:
        remedy = "run this as its owner" if isinstance(error, PermissionError) else "`tba keys new` creates keys"
        raise ConfigError(f"{path} cannot be read ({error.strerror}): {remedy}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a key file: {first_line(error)}") from error


def _hex(values: dict[str, object], name: str, path: Path) -> str:
    value = values.get(name)
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        raise ConfigError(f"{path} has no {name} key of 64 hexadecimal digits")
    return value


def _make_directory(path: Path) -> None:
    if not path.is_dir():
        path.mkdir(parents=True)
        # Servers of another user than root read the public keys.
        path.chmod(0o755)


def _toml(**values: str | Sequence[str]) -> str:
    # Names and hex need no escapes, so JSON is TOML here.
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())


@contextlib.contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError as error:
        raise ConfigError(f"{path} exists: this node has a key; remove it to make a new one") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
