"""Delivery: complete groups are spooled, posted to the buffer, and released when it acknowledges them.

    submit ──► spool ──► window ──► acknowledged
                  └── while the buffer is away, puts beyond the window wait on disk, in order

A put is identified by its sender id and sequence numbers, so delivering it twice, or on behalf of a dead searcher, has
the effect of once. Memory holds only the window, however long the buffer is away.
"""

import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from tba.common.errors import RecordLost, StorageError
from tba.common.log import get_logger
from tba.common.wire import fields, messages
from tba.common.wire.client import BufferClient
from tba.common.wire.codec import Frames, Reply
from tba.common.wire.trajectory import Trajectory, pack
from tba.searcher.delivery.spool import Owner, Spool, quarantined, read_put
from tba.searcher.delivery.takeover import DeadSpool, find_dead_spools, left_by_other_hosts
from tba.searcher.delivery.window import Put, Window

log = get_logger(__name__)

# Longer than a busy buffer takes: it answers lease requests within a second, and heartbeats before everything else.
_AWAY_SECONDS = 5.0


class Delivery:
    """The puts of one searcher, and those of dead searchers of its run on this machine."""

    def __init__(self, client: BufferClient, *, run_name: str, root: Path, limit_mib: float) -> None:
        self._client = client
        self._run_name = run_name
        self._root = root
        self._limit_mib = limit_mib
        self._spool: Spool | None = None
        self._window = Window(client)
        self._dead: deque[DeadSpool] = deque()
        self._logged = ""
        self._disk_trouble = ""
        self._damaged = 0
        # Rows put by this start, which is the next sequence number.
        self.rows = 0
        # Acknowledged puts that the disk refused to delete.
        self.undeleted = 0
        # Whether the buffer has left a request unanswered for `_AWAY_SECONDS`.
        self.away = False

    def open(self) -> None:
        """Create the spool and take over those of dead searchers. The client must know the run's uuid by now.

        Raises StorageError if the spool cannot be created.
        """
        host = socket.gethostname()
        dead = find_dead_spools(self._root, host)
        for directory, other in left_by_other_hosts(self._root, host, time.time()).items():
            log.warning(
                "spool of another host left alone: start a searcher there, or, if it is this machine under an earlier "
                f'name, write "host": "{host}" into its owner.json',
                directory=directory,
                host=other,
            )
        owner = Owner(self._client.run, self._run_name, self._client.sender, host, self._client.secret.hex())
        self._spool = Spool(self._root, owner, limit_bytes=int(self._limit_mib * (1 << 20)))
        for spool in dead:
            if spool.owner.run == self._client.run:
                self._dead.append(spool)
                continue
            log.warning(
                "spool of another run left alone: start its buffer and a searcher of it, or remove the directory",
                directory=spool.directory,
                run=f"{spool.owner.run_name} ({spool.owner.run})",
                ours=f"{self._run_name} ({self._client.run})",
            )
            spool.close()

    @property
    def groups(self) -> int:
        """Groups that are not acknowledged."""
        return len(self._window)

    @property
    def leases(self) -> Iterator[int]:
        """The leases of the groups that are not acknowledged."""
        return (put.lease for put in self._window if put.lease != fields.NO_VISIT)

    @property
    def pause(self) -> str:
        """Why generation has to pause; empty if it need not."""
        buffer = f"waiting for the buffer at {self._client.address}"
        if self._disk_trouble and self.groups:
            return f"{self._disk_trouble}: {buffer}"
        if self._spool is not None and self._spool.is_full:
            return f"the spool is full ({self._limit_mib:g} MiB): {buffer}"
        return ""

    @property
    def metrics(self) -> dict[str, float]:
        """Figures for the heartbeat."""
        return {
            "unacknowledged_groups": float(self.groups),
            "spool_bytes": float(self._spool_bytes),
            "spool_damaged": float(self._damaged + sum(spool.damaged for spool in self._dead)),
            "spool_undeleted": float(self.undeleted),
            "paused": float(bool(self.pause)),
        }

    @property
    def is_done(self) -> bool:
        """Whether everything is acknowledged, including the puts of dead searchers."""
        return not (self.groups or self._dead)

    def submit(self, trajectories: Sequence[Trajectory], lease: int) -> None:
        """Spool a complete group, and post it if the window has room. Raises StorageError like `step`."""
        assert self._spool is not None, "nothing is generated before `open`"
        columns, arrays = pack(trajectories)
        message = messages.PutTrajectories(first_sequence=self.rows, rows=messages.Rows(**columns))
        self.rows += len(trajectories)
        id_, frames = self._client.encode(message, arrays)
        spooled = self._append(self._spool, id_, frames)
        put = Put(id_, sum(map(len, frames)), lease, frames, spooled)
        self._window.add(put)
        self._window.post(self._read)
        if spooled:
            put.frames = None

    def acknowledge(self, reply: Reply) -> None:
        """Release the put that the buffer has stored."""
        if self._window.acknowledge(reply.header.id).spooled:
            self._release(reply.header.id)

    def step(self) -> None:
        """Post what the window has room for. Call it after each `poll` of the client.

        Raises StorageError if the disk does not read a put back. It stays: the next searcher delivers everything.
        """
        self.away = self._client.unanswered_seconds > _AWAY_SECONDS
        self._window.post(self._read)
        # One dead spool at a time: each has a window of its own.
        if self._dead and self._dead[0].step(self._client.address, self._client.keys):
            self._damaged += self._dead.popleft().damaged
        self._log_change()

    def close(self) -> None:
        """Leave what is not acknowledged to the next searcher."""
        for dead in self._dead:
            dead.close()
        if self._spool is None:
            return
        if self.groups:
            log.warning(
                "left in the spool, for the next searcher that starts here",
                groups=self.groups,
                directory=self._spool.directory,
            )
        self._spool.close()

    @property
    def _spool_bytes(self) -> int:
        return 0 if self._spool is None else self._spool.bytes

    def _append(self, spool: Spool, id_: int, frames: Frames) -> bool:
        """Write a put to disk. False if the disk refuses it: then the put waits in memory, and generation pauses."""
        try:
            spool.append(id_, frames)
        except StorageError as error:
            if not self._disk_trouble:
                log.error("the spool cannot be written", reason=str(error))
            self._disk_trouble = str(error)
            return False
        self._disk_trouble = ""
        return True

    def _read(self, put: Put) -> Frames | None:
        """The frames of a put. None if it is lost: its lease is then no longer reported, so the prompt is leased again.

        Raises StorageError if the disk does not read it now.
        """
        assert self._spool is not None
        try:
            return put.frames or read_put(self._spool.path(put.id))
        except RecordLost as error:
            self._damaged += 1
            kept = quarantined(self._spool.path(put.id))
            log.warning("a put is lost, and kept aside", reason=str(error), kept=kept)
            self._release(put.id, lost=True)
            return None

    def _release(self, id_: int, *, lost: bool = False) -> None:
        """Remove a put from the spool. A disk that refuses costs space only: the put is stored, or lost anyway."""
        assert self._spool is not None
        try:
            if lost:
                self._spool.quarantine(id_)
            else:
                self._spool.acknowledge(id_)
        except StorageError as error:
            self.undeleted += 1
            log.error("acknowledged puts stay on the disk", reason=str(error), files=self.undeleted)

    def _log_change(self) -> None:
        """Log when a pause or an absence of the buffer begins or ends."""
        news = self.pause or ("the buffer is away: what is generated goes into the spool" if self.away else "")
        if news == self._logged:
            return
        size = {"groups": self.groups, "mebibytes": self._spool_bytes / (1 << 20)}
        if news:
            log.warning(news, **size)
        else:
            log.info("delivery to the buffer goes on", **size)
        self._logged = news
