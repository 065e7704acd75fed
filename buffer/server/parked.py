"""Requests that cannot be answered yet: a batch without enough data, a lease without room."""

from collections import Counter, defaultdict

from tba.buffer.server.mailbox import Arrival
from tba.common.wire.channels import Peer

# Of one connection. A client has at most one of each kind.
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
        """Forget a request."""
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
