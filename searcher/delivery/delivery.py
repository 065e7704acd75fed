"""Delivery: puts (`search.put`) are spooled, posted to the buffer, and released when it acknowledges them.

    submit ──► spool ──► window ──► acknowledged
                  └── while the buffer is away, puts beyond the window wait on disk, in order

A put is identified by its sender id and sequence numbers, so delivering it twice, or on behalf of a dead searcher, has
the effect of once. Memory holds only the window, however long the buffer is away.
"""

import socket
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tba.common.errors import StorageError
from tba.common.log import get_logger
from tba.common.wire import fields, messages
from tba.common.wire.client import BufferClient
from tba.common.wire.codec import Frames, Reply
from tba.common.wire.trajectory import Trajectory, pack
from tba.searcher.delivery.spool import Owner, Spool, find_dead_spools

log = get_logger(__name__)

# Longer than a busy buffer takes: it answers lease requests within a second, and heartbeats before everything else.
_AWAY_SECONDS = 5.0
# Enough for one searcher to keep every stage of the buffer busy while it delivers what was spooled during an outage.
_MAX_PUTS = 64
_MAX_BYTES = 32 << 20


@dataclass(slots=True)
class Put:
    """An unacknowledged put: its request id, its size in bytes and the lease that it answers."""

    id: int
    size: int
    lease: int = fields.NO_VISIT
    frames: Frames | None = None
    """The request, until it is posted; None if it has to be read from the spool."""
    spooled: bool = True


class Window:
    """Puts in order: those in the window are posted, the others wait.

        add ──► waiting ──► post, while there is room ──► posted ──► acknowledge

    A put larger than the window is posted alone.
    """

    def __init__(self, client: BufferClient, puts: Iterable[Put] = ()) -> None:
        self._client = client
        self._waiting = deque(puts)
        self._posted: dict[int, Put] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._posted)

    def __iter__(self) -> Iterator[Put]:
        """All unacknowledged puts, in order."""
        yield from self._posted.values()
        yield from self._waiting

    def add(self, put: Put) -> None:
        self._waiting.append(put)

    def post(self, read: Callable[[int], Frames | None]) -> None:
        """Post waiting puts while there is room.

        `read` returns the frames of a spooled put, None for a lost one, which is dropped. If it raises, the put stays.
        """
        while self._waiting and self._has_room(self._waiting[0].size):
            frames = self._waiting[0].frames or read(self._waiting[0].id)
            put = self._waiting.popleft()
            if frames is None:
                continue
            self._client.post_encoded(put.id, frames)
            # From here on the client keeps the frames until the reply.
            put.frames = None
            self._posted[put.id] = put

    def acknowledge(self, id_: int) -> Put:
        """Remove the posted put that a reply belongs to. Raises KeyError for any other id."""
        return self._posted.pop(id_)

    def _has_room(self, size: int) -> bool:
        posted_bytes = sum(put.size for put in self._posted.values())
        return not self._posted or (len(self._posted) < _MAX_PUTS and posted_bytes + size <= _MAX_BYTES)


class Delivery:
    """The puts of one searcher, and those of dead searchers of its run on this machine."""

    def __init__(self, client: BufferClient, run_name: str, *, root: Path, limit_mib: float) -> None:
        self._client, self._run_name, self._root, self._limit_mib = client, run_name, root, limit_mib
        self._spool: Spool | None = None
        self._window = Window(client)
        # The spools of dead searchers, and the deliveries of those that are not delivered yet.
        self._dead: list[Spool] = []
        self._deliveries: deque[Generator[bool, None, None]] = deque()
        # The last news, with its reason.
        self._logged = ("", "")
        self._disk_error = ""
        # Rows put by this start, which is the next sequence number.
        self.rows = 0
        # Acknowledged puts that the disk refused to delete.
        self.undeleted = 0
        # Whether the buffer has left a request unanswered for `_AWAY_SECONDS`.
        self.away = False

    def open(self) -> None:
        """Create the spool, and take over those of dead searchers of the client's run. Raises StorageError."""
        client, host = self._client, socket.gethostname()
        found = find_dead_spools(self._root, host)
        own = Owner(client.run, self._run_name, client.sender, host, client.secret.hex())
        self._spool = Spool.create(self._root, own)
        for spool in found:
            if spool.owner.run == client.run:
                self._dead.append(spool)
                self._deliveries.append(_deliver(spool, client))
                continue
            log.warning(
                "spool of another run left alone: start its buffer and a searcher of it, or remove the directory",
                directory=spool.directory,
                run=f"{spool.owner.run_name} ({spool.owner.run})",
                ours=f"{self._run_name} ({client.run})",
            )
            spool.release()

    @property
    def puts(self) -> int:
        """Puts that are not acknowledged."""
        return len(self._window)

    @property
    def leases(self) -> Iterator[int]:
        return (put.lease for put in self._window if put.lease != fields.NO_VISIT)

    @property
    def pause(self) -> str:
        """The reason why generation has to pause; empty if it need not."""
        buffer = f"waiting for the buffer at {self._client.address}"
        if self._disk_error and self.puts:
            return f"{self._disk_error}: {buffer}"
        # Above the limit puts are still written, so that nothing complete is lost.
        if self._spool is not None and self._spool.bytes >= self._limit_mib * (1 << 20):
            return f"the spool is full ({self._limit_mib:g} MiB): {buffer}"
        return ""

    @property
    def metrics(self) -> dict[str, float]:
        spools = [*self._dead, *([self._spool] if self._spool is not None else [])]
        return {
            "unacknowledged_groups": float(self.puts),
            "spool_bytes": float(0 if self._spool is None else self._spool.bytes),
            "spool_damaged": float(sum(spool.damaged for spool in spools)),
            "spool_undeleted": float(self.undeleted),
            "paused": float(bool(self.pause)),
        }

    @property
    def is_done(self) -> bool:
        """Whether everything is acknowledged, including the puts of dead searchers."""
        return not (self.puts or self._deliveries)

    def submit(self, trajectories: Sequence[Trajectory], lease: int, *, closes: bool = True) -> None:
        """Spool a put, the last of its visit if it `closes`, and post it if there is room. Raises as `step`."""
        assert self._spool is not None, "nothing is generated before `open`"
        columns, arrays = pack(trajectories)
        message = messages.PutTrajectories(first_sequence=self.rows, rows=messages.Rows(**columns), closes=closes)
        self.rows += len(trajectories)
        id_, frames = self._client.encode(message, arrays)
        put = Put(id_, sum(map(len, frames)), lease, frames)
        try:
            self._spool.append(id_, frames)
            self._disk_error = ""
        except StorageError as error:
            # The put waits in memory, and generation pauses.
            if not self._disk_error:
                log.error("the spool cannot be written", reason=str(error))
            self._disk_error = str(error)
            put.spooled = False
        self._window.add(put)
        self._window.post(self._spool.read)
        if put.spooled:
            put.frames = None

    def acknowledge(self, reply: Reply) -> None:
        """Release the put that the buffer has stored."""
        assert self._spool is not None
        if not self._window.acknowledge(reply.header.id).spooled:
            return
        try:
            self._spool.acknowledge(reply.header.id)
        # It costs space only.
        except StorageError as error:
            self.undeleted += 1
            log.error("acknowledged puts stay on the disk", reason=str(error), files=self.undeleted)

    def step(self) -> None:
        """Post what the window has room for. Call it after each `poll` of the client.

        The lease of a put that is lost is no longer reported, so its prompt is leased again. Raises StorageError if the
        disk does not read a put back. It stays: the next searcher delivers everything.
        """
        self.away = self._client.unanswered_seconds > _AWAY_SECONDS
        if self._spool is not None:
            self._window.post(self._spool.read)
        # One dead spool at a time: each has a window of its own.
        if self._deliveries and not next(self._deliveries[0], False):
            self._deliveries.popleft()
        self._log_change()

    def close(self) -> None:
        """Leave what is not acknowledged to the next searcher."""
        for delivery in self._deliveries:
            delivery.close()
        for spool in self._dead:
            spool.release()
        if self._spool is None:
            return
        if self.puts:
            log.warning("left in the spool for the next searcher", puts=self.puts, directory=self._spool.directory)
        self._spool.close()

    def _log_change(self) -> None:
        """Log when a pause or an absence of the buffer begins or ends, and when its reason becomes known."""
        news = self.pause or ("the buffer is away: what is generated goes into the spool" if self.away else "")
        reason = self._client.obstacle if news else ""
        if (news, reason) == self._logged:
            return
        size = {"puts": self.puts, "mebibytes": self.metrics["spool_bytes"] / (1 << 20)}
        if news:
            log.warning(news, **size, **({"reason": reason} if reason else {}))
        else:
            log.info("delivery resumed", **size)
        self._logged = (news, reason)


def _deliver(spool: Spool, own: BufferClient) -> Generator[bool, None, None]:
    """Deliver a dead searcher's spool under its sender id, one step per item. `own` is the client of this searcher.

        connect ──► post every put ──► all acknowledged ──► Goodbye ──► delete the directory

    The buffer knows each put by sender id and sequence number, so puts that were stored before the death count as
    duplicates. Deliveries keep the dead searcher's leases alive; the Goodbye releases them when everything is stored.
    One bad put does not stop the others: what cannot be read, deleted or moved now stays for the next start.
    """
    owner, counts, left = spool.owner, Counter[str](), list[str]()
    log.info("delivering the spool of a searcher that died", sender=owner.sender)

    def read(id_: int) -> Frames | None:
        try:
            return spool.read(id_)
        except StorageError as error:
            _leave(left, error)
            return None

    name, secret = owner.sender, bytes.fromhex(owner.secret)
    client = BufferClient(
        own.address, role="searcher", name=name, sender=name, secret=secret, run=owner.run, keys=own.keys
    )
    with closing(client):
        try:
            window = Window(client, [Put(id_, size) for id_, size in spool.load().items()])
            window.post(read)
            while window:
                for reply in client.poll(0.0):
                    _accept(spool, window.acknowledge(reply.header.id).id, reply, counts, left)
                window.post(read)
                yield True
            goodbye = client.post(messages.Goodbye())
            while client.is_pending(goodbye):
                yield True
                client.poll(0.0)
            counts["damaged"] = spool.damaged
            if left:
                log.error("puts of a dead searcher wait for the next start", puts=len(left), reason=left[0], **counts)
                spool.release()
            else:
                log.info("delivered the spool of a searcher that died", sender=owner.sender, **counts)
                spool.close()
        except StorageError as error:
            log.error("a spool is left as it is", sender=owner.sender, reason=str(error))
            spool.release()


def _leave(left: list[str], error: StorageError) -> None:
    """Note a put that stays in a dead spool. The first is logged at once: a bad disk may refuse thousands."""
    left.append(str(error))
    if len(left) == 1:
        log.warning("a put of a dead searcher stays for the next start", reason=left[0])


def _accept(spool: Spool, id_: int, reply: Reply, counts: Counter[str], left: list[str]) -> None:
    """Release a put of a dead searcher. Raises StorageError if the spool has to stay as it is."""
    message = reply.message
    # Not the fault of the put: another searcher, or a later start, may deliver it.
    if isinstance(message, messages.Failure) and message.code in ("not_allowed", "other_sender"):
        raise StorageError(f"the buffer does not let this searcher deliver it: {message.message}")
    try:
        if isinstance(message, messages.PutAck):
            counts["stored"] += message.stored
            counts["duplicates"] += message.duplicates
            spool.acknowledge(id_)
        elif isinstance(message, messages.Failure):
            counts["refused"] += 1
            log.error("a put of a dead searcher was refused", reason=message.message, kept=spool.aside(id_))
            spool.quarantine(id_)
    except StorageError as error:
        _leave(left, error)
