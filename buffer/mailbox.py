"""What has arrived and waits for a transaction: the only thing that the threads of the server share.

Invariant: whoever adds looks at `full` first, so that no more than the limit and one reading of the socket
is ever held; what does not fit waits in the senders.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from tba.buffer.rows import PutColumns
from tba.common import wire
from tba.common.channels import Peer
from tba.common.codec import RequestHeader

# One transaction: large enough that the sync is shared by many, small enough that nobody waits long for it.
GROUP_ROWS = 256
GROUP_BYTES = 1 << 20
_LONGEST_TRANSACTION_SECONDS = 1.0  # that a hold waits for


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message that passed all checks. Times are monotonic; `deadline` is until when it may wait for an answer.

    `bytes` is what it costs in memory, roughly: a small put is mostly objects.
    """

    peer: Peer
    header: RequestHeader
    message: wire.Message | PutColumns
    bytes: int
    at: float
    deadline: float

    @property
    def is_urgent(self) -> bool:
        """It overtakes puts: somebody waits for the answer. Of a searcher's requests only the sign of life does."""
        if isinstance(self.message, PutColumns):
            return False
        return self.header.role != "searcher" or isinstance(self.message, wire.Heartbeat)


class Mailbox:
    """Two queues of arrivals, the urgent and the others. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._changed = threading.Condition()
        self._urgent: deque[Arrival] = deque()
        self._others: deque[Arrival] = deque()
        self._bytes = 0
        self._holds = 0
        self._taking = False

    @property
    def bytes(self) -> int:
        """Memory of all that waits."""
        return self._bytes

    @property
    def full(self) -> bool:
        """Whether to stop reading from the socket."""
        return self._bytes >= self._limit

    @property
    def empty(self) -> bool:
        """Whether nothing waits."""
        return not (self._urgent or self._others)

    @property
    def held(self) -> bool:
        """Whether only what is urgent is taken."""
        return self._holds > 0

    def add(self, arrivals: list[Arrival]) -> None:
        """Add in the order of arrival."""
        with self._changed:
            for arrival in arrivals:
                (self._urgent if arrival.is_urgent else self._others).append(arrival)
                self._bytes += arrival.bytes
            if self._urgent or not self._holds:
                self._changed.notify_all()

    def wake(self) -> None:
        """Let `take` return now."""
        with self._changed:
            self._changed.notify_all()

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Meanwhile only what is urgent is taken; the rest waits here, and in the senders.

        Begins when the transaction under way is over.
        """
        self.hold()
        with self._changed:
            self._changed.wait_for(lambda: self._taking, _LONGEST_TRANSACTION_SECONDS)
        try:
            yield
        finally:
            self.release()

    def hold(self) -> None:
        """From the next `take` on only what is urgent is taken, until as many calls of `release`."""
        with self._changed:
            self._holds += 1

    def release(self) -> None:
        """End one hold."""
        with self._changed:
            self._holds -= 1
            self._changed.notify_all()

    def take(self, timeout_seconds: float) -> list[Arrival]:
        """What goes into the next transaction: the urgent ones, and others up to the size of a group.

        A request for a batch goes without the others. Waits for the first arrival at most the timeout.
        """
        with self._changed:
            self._taking = True
            self._changed.notify_all()
            if not self._urgent and (self._holds or not self._others):
                self._changed.wait(timeout_seconds)
            self._taking = False
            taken = list(self._urgent)
            self._urgent.clear()
            asks_batch = any(isinstance(arrival.message, wire.SampleBatch) for arrival in taken)
            if not (asks_batch or self._holds):
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
