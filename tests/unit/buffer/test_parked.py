"""Requests that wait for data or for room."""

from tba.buffer.server.mailbox import Arrival, Parked
from tba.common.wire import messages
from tba.common.wire.channels import Peer
from tba.common.wire.codec import RequestHeader

LEASE = messages.LeasePrompts(want=1, held=[], weights_version=0, wait_seconds=1.0)


def arrival(sender: str, peer: bytes = b"1", deadline: float = 1.0) -> Arrival:
    header = RequestHeader(v=1, type=LEASE.TYPE, id=1, run="", role="searcher", sender=sender)
    return Arrival(Peer(peer), header, LEASE, bytes=1, at=0.0, deadline=deadline)


def test_a_newer_request_of_a_sender_takes_the_place_of_the_older_one():
    parked = Parked()
    old, new = arrival("a.1"), arrival("a.1", peer=b"2")
    assert parked.add(old)
    assert parked.add(new)
    assert parked.of_type(LEASE.TYPE) == {"a.1": new}


def test_one_connection_cannot_park_many_requests():
    parked = Parked()
    flood = [arrival(f"a{n}.1") for n in range(1000)]
    assert sum(map(parked.add, flood)) == len(parked.of_type(LEASE.TYPE)) < 10
    assert parked.add(arrival("b.1", peer=b"2")), "other connections are not affected"
    for item in list(parked.of_type(LEASE.TYPE).values()):
        parked.remove(item)
    assert parked.add(flood[-1])


def test_overdue_requests_are_taken_once():
    parked = Parked()
    early, late = arrival("a.1", deadline=1.0), arrival("b.1", deadline=2.0)
    assert parked.add(early)
    assert parked.add(late)
    assert parked.take_overdue(1.0) == [early]
    assert parked.take_overdue(1.0) == []
    assert parked.of_type(LEASE.TYPE) == {"b.1": late}
