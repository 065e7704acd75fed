"""From a complete group to its acknowledgement: spooled, posted, and forgotten when the buffer has it.

    put ──► spool ──► window ──► acknowledged
                        └── the buffer is away: what is beyond the window waits on disk, in order

A put is known by its sender and sequence numbers, so that delivering it twice, or in the name of a searcher that has
died, has the effect of once. Memory holds the window only, however long the buffer is away.
"""

import socket
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tba.common import wire
from tba.common.client import BufferClient
from tba.common.clock import Clock
from tba.common.codec import Frames, Reply
from tba.common.errors import RecordLost, StorageError
from tba.common.log import get_logger
from tba.common.trajectory import Trajectory, pack
from tba.searcher.spool import Orphan, Owner, Place, Spool, find_orphans
from tba.searcher.spool_records import Record

log = get_logger(__name__)

# Longer than a busy buffer takes: it answers lease requests within a second, and heartbeats before all else.
AWAY_SECONDS = 5.0
# Longer than a disk over the network is away for a moment; then a new start, which delivers all, is the better try.
_UNREAD_SECONDS = 60.0
# One searcher that delivers what it has gathered while the buffer was away keeps all stages of the buffer at work.
_WINDOW_PUTS = 64
_WINDOW_BYTES = 32 << 20


@dataclass(slots=True)
class _Put:
    """A put that is not acknowledged. `frames` until it is posted, unless it can be read from `place`."""

    id: int
    lease: int
    size: int
    place: Place | None  # None: the disk did not take it
    frames: Frames | None


class Delivery:
    """The puts of one searcher, and those of dead searchers of its run on this machine."""

    def __init__(self, client: BufferClient, *, run_name: str, root: Path, limit_mib: float, clock: Clock) -> None:
        self._client = client
        self._run_name = run_name
        self._root = root
        self._limit_mib = limit_mib
        self._clock = clock
        self._spool: Spool | None = None
        self._waiting: deque[_Put] = deque()  # in order, after those that are posted
        self._posted: dict[int, _Put] = {}  # by request id
        self._posted_bytes = 0
        self.rows = 0  # put so far: the next sequence number
        self._estates: deque[_Estate] = deque()
        self._said = ""
        self._disk_trouble = ""
        self._unread_since: float | None = None  # monotonic: the disk has not read the first of the waiting puts
        self._damaged = 0  # what was damaged or gone when it was read back, of spools that are done with included
        self.undeleted = 0  # segments that the disk does not give back
        self.away = False  # the buffer has not answered for AWAY_SECONDS

    def open(self) -> None:
        """Make the spool, and take over those of dead searchers. After the buffer has told its run.

        Raises StorageError if the spool cannot be made.
        """
        host = socket.gethostname()
        orphans = find_orphans(self._root, host)
        owner = Owner(self._client.run, self._run_name, self._client.sender, host)
        self._spool = Spool(self._root, owner, limit_bytes=int(self._limit_mib * (1 << 20)))
        for orphan in orphans:
            if orphan.owner.run == self._client.run:
                self._estates.append(_Estate(orphan, self._client.address))
                continue
            log.warning(
                "spool of another run left alone: start its buffer and a searcher of it, or remove the directory",
                directory=orphan.directory,
                run=f"{orphan.owner.run_name} ({orphan.owner.run})",
                ours=f"{self._run_name} ({self._client.run})",
            )
            orphan.close()

    @property
    def groups(self) -> int:
        """Groups that are not acknowledged."""
        return len(self._waiting) + len(self._posted)

    @property
    def bytes(self) -> int:
        """Bytes of the puts that are not acknowledged."""
        return self._posted_bytes + sum(put.size for put in self._waiting)

    @property
    def leases(self) -> Iterator[int]:
        """The leases of the groups that are not acknowledged."""
        puts = (*self._posted.values(), *self._waiting)
        return (put.lease for put in puts if put.lease != wire.NO_VISIT)

    @property
    def pause(self) -> str:
        """Why nothing more may be generated; empty if it may."""
        buffer = f"waiting for the buffer at {self._client.address}"
        if self._disk_trouble and self.groups:
            return f"{self._disk_trouble}: {buffer}"
        if self._spool is not None and self._spool.is_full:
            return f"the spool is full ({self._limit_mib:g} MiB): {buffer}"
        return ""

    @property
    def metrics(self) -> dict[str, float]:
        """For the heartbeat."""
        return {
            "unacknowledged_groups": float(self.groups),
            "spool_bytes": float(self.bytes),
            "spool_damaged": float(self._damaged + sum(estate.damaged for estate in self._estates)),
            "spool_undeleted": float(self.undeleted),
        }

    def put(self, trajectories: Sequence[Trajectory], lease: int) -> None:
        """Take a complete group: it is on disk, and on its way if there is room in the window, when this returns.

        Raises StorageError, as `turn`.
        """
        assert self._spool is not None, "nothing is generated before the buffer has told its run"
        columns, arrays = pack(trajectories)
        message = wire.PutTrajectories(first_sequence=self.rows, rows=wire.Rows.model_validate(columns))
        self.rows += len(trajectories)
        id_, frames = self._client.encode(message, arrays)
        place = self._written(self._spool, Record(id_, frames))
        put = _Put(id_, lease, sum(map(len, frames)), place, frames)
        self._waiting.append(put)
        self._post_waiting()
        if put.place is not None:
            put.frames = None

    def take(self, reply: Reply) -> None:
        """A reply to a put."""
        put = self._posted.pop(reply.header.id)
        self._posted_bytes -= put.size
        if put.place is not None:
            self._acknowledge(put.place)

    def turn(self) -> None:
        """Go on. After each `poll` of the client.

        Raises StorageError if the disk has read nothing back for a minute; the next start delivers what is on it.
        """
        self.away = self._client.unanswered_seconds > AWAY_SECONDS
        self._post_waiting()
        if self._estates and self._estates[0].turn():
            self._damaged += self._estates.popleft().damaged
        self._say()

    @property
    def is_done(self) -> bool:
        """All is acknowledged, that of the dead as well."""
        return not (self.groups or self._estates)

    def close(self) -> None:
        """Leave what is not acknowledged to the next searcher."""
        for estate in self._estates:
            estate.close()
        if self._spool is None:
            return
        if self.groups:
            log.warning(
                "left in the spool, for the next searcher that starts here",
                groups=self.groups,
                directory=self._spool.directory,
            )
        self._spool.close()

    def _written(self, spool: Spool, record: Record) -> Place | None:
        try:
            place = spool.append(record)
        except StorageError as error:  # it waits in memory, and generation until the buffer has it
            if not self._disk_trouble:
                log.error("the spool cannot be written", reason=str(error))
            self._disk_trouble = str(error)
            return None
        self._disk_trouble = ""
        return place

    def _post_waiting(self) -> None:
        while self._waiting and self._has_room(self._waiting[0].size):
            put = self._waiting[0]
            try:
                frames = put.frames or self._read(put)
            except StorageError as error:
                self._not_read(error)
                return
            self._unread_since = None
            self._waiting.popleft()
            if frames is None:
                continue
            self._client.post_encoded(put.id, frames)
            self._posted[put.id], put.frames = put, None
            self._posted_bytes += put.size

    def _has_room(self, size: int) -> bool:
        full = len(self._posted) >= _WINDOW_PUTS or self._posted_bytes + size > _WINDOW_BYTES
        return not (self._posted and full)

    def _read(self, put: _Put) -> Frames | None:
        """A put from the disk. None if it is lost: its prompt is then leased again, since we do not name it.

        Raises StorageError if the disk does not read it now.
        """
        assert self._spool is not None
        assert put.place is not None
        try:
            return self._spool.read(put.place).frames
        except RecordLost as error:
            self._damaged += 1
            log.warning("a put is lost, and kept aside", reason=str(error), kept=self._spool.aside(put.place))
        self._acknowledge(put.place)
        return None

    def _not_read(self, error: StorageError) -> None:
        """The first of the waiting puts stays where it is, and is tried again. Raises the error if that lasts."""
        now = self._clock.monotonic()
        if self._unread_since is None:
            self._unread_since = now
            log.warning("a put is not read back: tried again", reason=str(error), at_most_seconds=_UNREAD_SECONDS)
        elif now - self._unread_since > _UNREAD_SECONDS:
            raise error

    def _acknowledge(self, place: Place) -> None:
        assert self._spool is not None
        try:
            self._spool.acknowledge(place)
        except StorageError as error:  # the buffer has it, so that only disk space is lost
            self.undeleted += 1
            log.error("acknowledged puts stay on the disk", reason=str(error), segments=self.undeleted)

    def _say(self) -> None:
        """Log when something begins or ends, not while it lasts."""
        news = self.pause or ("the buffer is away: what is generated goes into the spool" if self.away else "")
        if news == self._said:
            return
        if news:
            log.warning(news, groups=self.groups, mebibytes=self.bytes / (1 << 20))
        else:
            log.info("the buffer is back", groups=self.groups, mebibytes=self.bytes / (1 << 20))
        self._said = news


class _Estate:
    """The spool of a dead searcher, delivered in its name. Its leases stay its own meanwhile, and go with a goodbye."""

    def __init__(self, orphan: Orphan, address: str) -> None:
        self._orphan = orphan
        self._address = address
        self._client: BufferClient | None = None
        self._records = orphan.records()
        self._pending: dict[int, tuple[Path, int]] = {}  # segment and bytes by request id
        self._goodbye: int | None = None
        self._stored = self._duplicates = self._refused = 0

    def turn(self) -> bool:
        """Go on. True when all is delivered and the directory is gone, or it has to be left."""
        owner = self._orphan.owner
        if self._client is None:
            log.info("delivering the spool of a searcher that died", sender=owner.sender)
            self._client = BufferClient(
                self._address, role="searcher", name=owner.sender, sender=owner.sender, run=owner.run
            )
        for reply in self._client.poll(0.0):
            self._take(reply)
        try:
            self._post(self._client)
            if self._goodbye is None or self._client.is_pending(self._goodbye):
                return False
            self._orphan.remove()
        except StorageError as error:
            log.error("a spool is left as it is", sender=owner.sender, reason=str(error))
        else:
            self._report()
        self.close()
        return True

    @property
    def damaged(self) -> int:
        """Places of the spool that are damaged."""
        return self._orphan.damaged

    def close(self) -> None:
        """Leave the rest to another searcher."""
        if self._client is not None:
            self._client.close()
        self._orphan.close()

    def _post(self, client: BufferClient) -> None:
        while self._goodbye is None and self._has_room():
            following = next(self._records, None)
            if following is not None:
                segment, record = following
                self._pending[record.id] = segment, sum(map(len, record.frames))
                client.post_encoded(record.id, record.frames)
            elif self._pending:
                return
            else:
                self._goodbye = client.post(wire.Goodbye())

    def _has_room(self) -> bool:
        return len(self._pending) < _WINDOW_PUTS and sum(size for _, size in self._pending.values()) < _WINDOW_BYTES

    def _take(self, reply: Reply) -> None:
        segment, _ = self._pending.pop(reply.header.id, (None, 0))
        if isinstance(reply.message, wire.PutAck):
            self._stored += reply.message.stored
            self._duplicates += reply.message.duplicates
        elif isinstance(reply.message, wire.Failure):
            self._refused += 1
            log.error("a put of a dead searcher was refused", reason=reply.message.message)
            if segment is not None:
                self._orphan.keep(segment)

    def _report(self) -> None:
        log.info(
            "delivered the spool of a searcher that died",
            sender=self._orphan.owner.sender,
            stored=self._stored,
            duplicates=self._duplicates,
            refused=self._refused,
            damaged=self._orphan.damaged,
        )
        if kept := self._orphan.kept:
            log.warning("what was refused or damaged is kept", segments=[str(path) for path in kept])
