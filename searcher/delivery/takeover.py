"""Takeover: the spools that dead searchers of this machine left are delivered by the next searcher that starts."""

import contextlib
import json
import shutil
from pathlib import Path

from tba.common.errors import ConfigError, RecordLost, StorageError
from tba.common.log import get_logger
from tba.common.system.durable import exclusive_lock, open_regular
from tba.common.wire import messages
from tba.common.wire.client import BufferClient
from tba.common.wire.codec import Frames, Reply
from tba.common.wire.keys import ClientKeys
from tba.searcher.delivery.spool import (
    ASIDE,
    LOCK,
    OWNER,
    PUT_SUFFIX,
    Owner,
    quarantine,
    quarantined,
    read_put,
    storage_errors,
)
from tba.searcher.delivery.window import Put, Window

log = get_logger(__name__)

# A put this old was not delivered, though a searcher delivers within seconds.
_UNDELIVERED_SECONDS = 600.0


class DeadSpool:
    """Delivers a dead searcher's spool under its sender id.

        connect ──► post every put ──► all acknowledged ──► Goodbye ──► delete the directory

    The buffer knows each put by sender id and sequence number, so puts that were stored before the death count as
    duplicates. Deliveries keep the dead searcher's leases alive; the Goodbye releases them when everything is stored.
    """

    def __init__(self, directory: Path, owner: Owner, lock: contextlib.ExitStack) -> None:
        self.directory = directory
        self.owner = owner
        # Puts that were damaged or missing.
        self.damaged = 0
        self._lock = lock
        self._client: BufferClient | None = None
        self._window: Window | None = None
        self._goodbye: int | None = None
        self._unread: list[str] = []
        self._kept: list[Path] = []
        self._stored = self._duplicates = self._refused = 0

    def step(self, address: str, keys: ClientKeys | None) -> bool:
        """Post puts and collect replies. Returns True when the directory is deleted, or has to be left as it is."""
        try:
            if self._client is None or self._window is None:
                self._client, self._window = self._connect(address, keys)
            for reply in self._client.poll(0.0):
                if reply.header.id != self._goodbye:
                    self._accept(reply, self._window)
            self._window.post(self._read)
            if self._goodbye is None and not self._window:
                self._goodbye = self._client.post(messages.Goodbye())
            if self._goodbye is None or self._client.is_pending(self._goodbye):
                return False
            self._reap()
        except StorageError as error:
            log.error("a spool is left as it is", sender=self.owner.sender, reason=str(error))
        self.close()
        return True

    def close(self) -> None:
        """Release the lock. What is not delivered waits for another searcher."""
        if self._client is not None:
            self._client.close()
        self._lock.close()

    def _connect(self, address: str, keys: ClientKeys | None) -> tuple[BufferClient, Window]:
        sender = self.owner.sender
        log.info("delivering the spool of a searcher that died", sender=sender)
        with storage_errors(self.directory):
            files = sorted(self.directory.glob(f"*{PUT_SUFFIX}"))
            puts = [Put(int(path.stem), path.stat().st_size) for path in files if path.stem.isdigit()]
        secret = bytes.fromhex(self.owner.secret)
        client = BufferClient(
            address, role="searcher", name=sender, sender=sender, secret=secret, run=self.owner.run, keys=keys
        )
        return client, Window(client, puts)

    def _path(self, put: Put) -> Path:
        return self.directory / f"{put.id:016}{PUT_SUFFIX}"

    def _read(self, put: Put) -> Frames | None:
        """The frames of a put, or None if it is damaged, or not readable now: one bad put does not stop the others."""
        path = self._path(put)
        try:
            return read_put(path)
        except RecordLost as error:
            self.damaged += 1
            log.warning(
                "a part of a dead searcher's spool is damaged", path=path, reason=str(error), kept=quarantined(path)
            )
            self._quarantine(path)
        except StorageError as error:
            if not self._unread:
                log.warning("a put of a dead searcher's spool was not read", path=path, reason=str(error))
            self._unread.append(path.name)
        return None

    def _accept(self, reply: Reply, window: Window) -> None:
        put = window.acknowledge(reply.header.id)
        if isinstance(reply.message, messages.PutAck):
            self._stored += reply.message.stored
            self._duplicates += reply.message.duplicates
        elif isinstance(reply.message, messages.Failure):
            # Not the fault of the put: another searcher, or a later start, may deliver it.
            if reply.message.code in ("not_allowed", "other_sender"):
                raise StorageError(f"the buffer does not let this searcher deliver it: {reply.message.message}")
            self._refused += 1
            log.error("a put of a dead searcher was refused", reason=reply.message.message)
            self._quarantine(self._path(put))

    def _quarantine(self, path: Path) -> None:
        quarantine(path)
        self._kept.append(quarantined(path))

    def _reap(self) -> None:
        """Delete the directory. Raises StorageError, and leaves it to the next start, if a put was not readable."""
        if self._unread:
            raise StorageError(
                f"the spool {self.directory}: {len(self._unread)} of its puts could not be read, the first is "
                f"{self._unread[0]}; the next start tries again"
            )
        with storage_errors(self.directory):
            shutil.rmtree(self.directory)
        log.info(
            "delivered the spool of a searcher that died",
            sender=self.owner.sender,
            stored=self._stored,
            duplicates=self._duplicates,
            refused=self._refused,
            damaged=self.damaged,
        )
        if self._kept:
            log.warning("what was refused or damaged is kept", files=[str(path) for path in self._kept])


def find_dead_spools(root: Path, host: str) -> list[DeadSpool]:
    """Lock and return the spools of this machine's dead searchers, whatever their run."""
    directories = sorted(path for path in root.glob("*") if path.name != ASIDE)
    return [spool for directory in directories if (spool := _acquire(directory, host)) is not None]


def left_by_other_hosts(root: Path, host: str, now: float) -> dict[Path, str]:
    """Return the spools of other hosts, with their host, that hold a put older than `_UNDELIVERED_SECONDS`.

    A living searcher's puts are younger, unless the buffer is away. A container that starts under another host name
    does not find its own spool.
    """
    found = {}
    for directory in sorted(root.glob("*")):
        owner = _owner(directory)
        if owner is None or owner.host == host:
            continue
        with contextlib.suppress(OSError):
            if any(now - put.stat().st_mtime > _UNDELIVERED_SECONDS for put in directory.glob(f"*{PUT_SUFFIX}")):
                found[directory] = owner.host
    return found


def _owner(directory: Path) -> Owner | None:
    try:
        with open_regular(directory / OWNER) as file:
            return Owner(**json.load(file))
    # Just deleted by the searcher that delivered it, or not a spool.
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def _acquire(directory: Path, host: str) -> DeadSpool | None:
    """Lock a spool. None if its searcher lives, or is on another machine, whose locks may be invisible here."""
    owner = _owner(directory)
    if owner is None or owner.host != host:
        return None
    lock = contextlib.ExitStack()
    try:
        lock.enter_context(exclusive_lock(directory / LOCK, f"another process holds the spool {directory}"))
    except (OSError, ConfigError):
        return None
    if not (directory / OWNER).is_file():
        # Delivered and deleted since it was read; locking may have created the directory again.
        shutil.rmtree(directory, ignore_errors=True)
        lock.close()
        return None
    return DeadSpool(directory, owner, lock)
