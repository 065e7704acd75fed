"""The queue of received requests that wait for a transaction: all that network and writer share.

Invariant: the network checks `full` before it reads, so memory holds at most the limit and one read of the socket.
Everything else waits in the senders.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from tba.buffer.service.put_columns import PutColumns
from tba.common.wire import messages
from tba.common.wire.channels import Peer
from tba.common.wire.codec import RequestHeader

# One transaction: large enough that many requests share its sync, small enough that none waits long for it.
GROUP_ROWS = 256
GROUP_BYTES = 1 << 20
# Longest wait of `paused` for the transaction in progress.
_LONGEST_TRANSACTION_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that passed all checks.

    `bytes` is its approximate cost in memory: a small put is mostly Python objects. Times are monotonic; a request
    that cannot be answered yet is parked until `deadline`.
    """

    peer: Peer
    header: RequestHeader
    message: messages.Message | PutColumns
    bytes: int
    at: float
    deadline: float

    @property
    def is_urgent(self) -> bool:
        """Whether the request overtakes puts because a process waits for the reply.

        Searchers have only one such request, the heartbeat: their other requests keep their order.
        """
        if isinstance(self.message, PutColumns):
            return False
        return self.header.role != "searcher" or isinstance(self.message, messages.Heartbeat)


class Mailbox:
    """Two first-in-first-out queues of arrivals: urgent ones and the others. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._changed = threading.Condition()
        self._urgent: deque[Arrival] = deque()
        self._others: deque[Arrival] = deque()
        self._bytes = 0
        self._paused = False
        self._writer_waits = False

    @property
    def bytes(self) -> int:
        """Memory of all queued arrivals."""
        return self._bytes

    @property
    def full(self) -> bool:
        """Whether the network must stop reading."""
        return self._bytes >= self._limit

    @property
    def empty(self) -> bool:
        """Whether both queues are empty."""
        return not (self._urgent or self._others)

    def add(self, arrival: Arrival) -> None:
        """Append an arrival to its queue."""
        with self._changed:
            (self._urgent if arrival.is_urgent else self._others).append(arrival)
            self._bytes += arrival.bytes
            if self._urgent or not self._paused:
                self._changed.notify_all()

    def wake(self) -> None:
        """Make `take` return immediately."""
        with self._changed:
            self._changed.notify_all()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Hand out only urgent requests inside the block, which begins after the transaction in progress."""
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: self._writer_waits, _LONGEST_TRANSACTION_SECONDS)
        try:
            yield
        finally:
            with self._changed:
                self._paused = False
                self._changed.notify_all()

    def take(self, timeout_seconds: float) -> list[Arrival]:
        """Remove and return the next transaction's requests: all urgent ones, then others up to the group size.

        Waits up to the timeout for a first request. Called by the writer alone.
        """
        with self._changed:
            self._writer_waits = True
            self._changed.notify_all()
            if not self._urgent and (self._paused or not self._others):
                self._changed.wait(timeout_seconds)
            self._writer_waits = False
            taken = list(self._urgent)
            self._urgent.clear()
            if not self._paused:
                taken += self._take_group()
            self._bytes -= sum(arrival.bytes for arrival in taken)
            return taken

    def _take_group(self) -> list[Arrival]:
        group: list[Arrival] = []
        rows = size = 0
        while self._others and rows < GROUP_ROWS and size < GROUP_BYTES:
            arrival = self._others.popleft()
            group.append(arrival)
            if isinstance(arrival.message, PutColumns):
                rows += len(arrival.message)
                size += sum(arrival.message.payload_bytes)
            else:
                rows += 1
        return group
