"""The queue of received requests that wait for a transaction: all that network and writer share.

Invariant: the network checks `full` before it reads, so memory holds at most the limit and one read of the socket.
Everything else waits in the senders. Requests that the writer cannot answer yet are parked: a batch without enough
data, a lease without room.
"""

import math
import threading
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass

from tba.buffer.service.put_columns import PutColumns
from tba.common.wire import messages
from tba.common.wire.channels import Peer
from tba.common.wire.codec import RequestHeader

# One transaction: large enough that many requests share its sync, small enough that none waits long for it.
GROUP_ROWS = 256
GROUP_BYTES = 1 << 20
# Urgent requests in one transaction, and the urgent and the other requests of one connection that may wait: more are
# dropped, and sent again. A searcher has at most 64 puts and a few other requests on their way. It repeats them while
# they wait here: a repetition is left out.
_URGENT_PER_GROUP = 32
_URGENT_PER_PEER = 64
# Each takes some 20 us. A thousand searchers send a thousand per second, and a busy disk commits 20 times.
_HEARTBEATS_PER_GROUP = 256
_OTHERS_PER_PEER = 128


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that passed all checks. `bytes` is its approximate cost in memory; times are monotonic."""

    peer: Peer
    header: RequestHeader
    message: messages.Message | PutColumns
    bytes: int
    at: float
    deadline: float

    @property
    def is_batch(self) -> bool:
        """Whether the request is for a batch, which takes far longer than any other."""
        return isinstance(self.message, messages.SampleBatch)

    @property
    def is_urgent(self) -> bool:
        """Whether the request overtakes puts because a process waits for the reply.

        Searchers have only one such request, the heartbeat: their other requests keep their order.
        """
        if isinstance(self.message, PutColumns):
            return False
        return self.header.role != "searcher" or isinstance(self.message, messages.Heartbeat)


class Mailbox:
    """First-in-first-out queues of arrivals: batches, heartbeats, other urgent requests, the rest. Thread-safe.

    The queues take turns: each transaction has some of each, and at most one batch. While puts wait, batches get half
    of the writer's time, so that a client that asks for batch after batch slows ingest but does not stop it. `dropped`
    counts requests of connections that had too many.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._changed = threading.Condition()
        self._urgent: deque[Arrival] = deque()
        # Apart, so that the status of a fleet does not wait behind its heartbeats.
        self._heartbeats: deque[Arrival] = deque()
        self._batches: deque[Arrival] = deque()
        # The number of requests of each connection, by whether they are urgent.
        self._of_peer: Counter[tuple[Peer, bool]] = Counter()
        # Connections and numbers of the requests that are not urgent.
        self._other_ids: set[tuple[Peer, int]] = set()
        # Monotonic time before which puts have priority over a batch.
        self._batches_from = -math.inf
        self.dropped = 0
        self._others: deque[Arrival] = deque()
        # Memory of all queued arrivals.
        self.bytes = 0

    @property
    def full(self) -> bool:
        """Whether the network must stop reading."""
        return self.bytes >= self._limit

    @property
    def empty(self) -> bool:
        return not (self._urgent or self._heartbeats or self._batches or self._others)

    def add(self, arrival: Arrival) -> None:
        with self._changed:
            request = arrival.peer, arrival.header.id
            if not arrival.is_urgent and request in self._other_ids:
                return
            counted = arrival.peer, arrival.is_urgent
            if self._of_peer[counted] >= (_URGENT_PER_PEER if arrival.is_urgent else _OTHERS_PER_PEER):
                self.dropped += 1
                return
            self._of_peer[counted] += 1
            if not arrival.is_urgent:
                self._other_ids.add(request)
            self.bytes += arrival.bytes
            # No process waits for the reply to a heartbeat. Those of a thousand searchers would wake the writer, and
            # then the network, a thousand times per second: this way they are answered together.
            if isinstance(arrival.message, messages.Heartbeat):
                self._heartbeats.append(arrival)
                return
            queue = self._batches if arrival.is_batch else self._urgent if arrival.is_urgent else self._others
            queue.append(arrival)
            self._changed.notify_all()

    def note_batch(self, seconds: float) -> None:
        """Give puts as much time as the batches of the last transaction took, if any puts wait."""
        self._batches_from = time.monotonic() + seconds

    def wake(self) -> None:
        """Make `take` return immediately."""
        with self._changed:
            self._changed.notify_all()

    def take(self, timeout_seconds: float) -> list[Arrival]:
        """Remove and return the next transaction's requests: some urgent ones, a batch, others up to the group size.

        Waits up to the timeout for a first request; `wake` may end the wait with none. Called by the writer alone.
        """
        with self._changed:
            if self.empty:
                self._changed.wait(timeout_seconds)
            # A goodbye must not overtake the heartbeat before it.
            taken = _first(self._heartbeats, _HEARTBEATS_PER_GROUP) + _first(self._urgent, _URGENT_PER_GROUP)
            # After the urgent ones: a trainer reports a step before it asks for the next batch.
            if self._batches and (not self._others or time.monotonic() >= self._batches_from):
                taken.append(self._batches.popleft())
            taken += self._take_group()
            self._of_peer -= Counter((arrival.peer, arrival.is_urgent) for arrival in taken)
            self._other_ids.difference_update((arrival.peer, arrival.header.id) for arrival in taken)
            self.bytes -= sum(arrival.bytes for arrival in taken)
            return taken

    def _take_group(self) -> list[Arrival]:
        group: list[Arrival] = []
        rows = size = 0
        while self._others and rows < GROUP_ROWS and size < GROUP_BYTES:
            arrival = self._others.popleft()
            group.append(arrival)
            if isinstance(arrival.message, PutColumns):
                rows += len(arrival.message)
                size += sum(arrival.message.columns["payload_bytes"])
            else:
                rows += arrival.message.want if isinstance(arrival.message, messages.LeasePrompts) else 1
        return group


def _first(queue: deque[Arrival], count: int) -> list[Arrival]:
    return [queue.popleft() for _ in range(min(len(queue), count))]


# Parked requests of one connection. A client has at most one of each kind.
_LIMIT_PER_PEER = 4


class Parked:
    """Parked requests in the order in which they came, at most one of a kind for each sender."""

    def __init__(self) -> None:
        # By the type of the message, then by sender.
        self._of_type: defaultdict[str, dict[str, Arrival]] = defaultdict(dict)
        self._of_peer: Counter[Peer] = Counter()

    def of_type(self, type_: str) -> dict[str, Arrival]:
        """Return the requests of this kind by sender, not to be changed."""
        return self._of_type[type_]

    def add(self, item: Arrival) -> bool:
        """Park a request instead of an older one of its kind. Returns False, and does not, if its connection has many.

        The sender of the older one waits for the reply to the newer one.
        """
        self.forget_older(item)
        if self._of_peer[item.peer] >= _LIMIT_PER_PEER:
            return False
        self._of_type[item.header.type][item.header.sender] = item
        self._of_peer[item.peer] += 1
        return True

    def forget_older(self, new: Arrival) -> None:
        """Forget the request of the same kind by the same sender, if there is one."""
        if (old := self._of_type[new.header.type].get(new.header.sender)) is not None:
            self.remove(old)

    def remove(self, item: Arrival) -> None:
        del self._of_type[item.header.type][item.header.sender]
        self._of_peer[item.peer] -= 1
        if not self._of_peer[item.peer]:
            del self._of_peer[item.peer]

    def take_overdue(self, now: float) -> list[Arrival]:
        """Remove and return the requests whose deadline is not after `now`."""
        found = [item for items in self._of_type.values() for item in items.values() if item.deadline <= now]
        for item in found:
            self.remove(item)
        return found
