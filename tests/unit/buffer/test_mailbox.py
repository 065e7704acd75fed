"""The queue between network and writer, and requests that wait for data or for room."""

import threading

from tba.buffer.server.mailbox import Arrival, Mailbox, Parked
from tba.common.wire import messages
from tba.common.wire.channels import Peer
from tba.common.wire.codec import RequestHeader
from tba.common.wire.messages import GetStatus
from tba.tests.helpers.checks import wait_until

LEASE = messages.LeasePrompts(want=1, held=[], weights_version=0, wait_seconds=1.0)
HEARTBEAT = messages.Heartbeat(activity="waiting", reason="", weights_version=None, metrics={})
BATCH = messages.SampleBatch(step=0, prompts=1, samples=1, reference="none", wait_seconds=1.0)


def arrival(message, peer=b"p", role="monitor", id_=1, sender="s.1", deadline=0.0):
    header = RequestHeader(v=1, type=message.TYPE, id=id_, run="", role=role, sender=sender)
    return Arrival(Peer(peer), header, message, bytes=1, at=0.0, deadline=deadline)


def test_a_transaction_takes_some_of_each_queue_and_one_batch():
    mailbox = Mailbox(1 << 20)
    for n in range(50):
        mailbox.add(arrival(GetStatus(), peer=bytes([n])))
    for _ in range(3):
        mailbox.add(arrival(BATCH))
    mailbox.add(arrival(messages.Goodbye(), role="searcher"))
    types = [taken.header.type for taken in mailbox.take(0)]
    assert types == [*["get_status"] * 32, "sample_batch", "goodbye"]
    assert [taken.header.type for taken in mailbox.take(0)] == [*["get_status"] * 18, "sample_batch"]


def test_a_status_does_not_wait_behind_the_heartbeats_of_a_fleet_nor_do_they_for_several_transactions():
    mailbox = Mailbox(1 << 20)
    for n in range(200):
        mailbox.add(arrival(HEARTBEAT, peer=bytes([n]), role="searcher"))
    mailbox.add(arrival(GetStatus()))
    types = [taken.header.type for taken in mailbox.take(0)]
    assert types == ["get_status", *["heartbeat"] * 200]
    assert mailbox.empty


def test_a_heartbeat_does_not_wake_the_writer_and_is_taken_with_the_next_request():
    mailbox, taken = Mailbox(1 << 20), []
    writer = threading.Thread(target=lambda: taken.extend(mailbox.take(60)))
    writer.start()
    wait_until(lambda: mailbox._changed._waiters)
    mailbox.add(arrival(HEARTBEAT, role="searcher"))
    assert mailbox._changed._waiters
    mailbox.add(arrival(messages.Goodbye(), role="searcher"))
    writer.join()
    assert [arrival.header.type for arrival in taken] == ["heartbeat", "goodbye"]


def test_other_requests_of_one_connection_beyond_a_limit_are_dropped():
    mailbox = Mailbox(1 << 20)
    for id_ in range(1000):
        mailbox.add(arrival(LEASE, role="searcher", id_=id_))
    mailbox.add(arrival(LEASE, peer=b"other", role="searcher"))
    assert (mailbox.dropped, mailbox.bytes) == (872, 129)
    assert {taken.peer for taken in mailbox.take(0)} == {Peer(b"p"), Peer(b"other")}
    mailbox.add(arrival(LEASE, role="searcher"))
    assert mailbox.dropped == 872


def parked_lease(sender: str, peer: bytes = b"1", deadline: float = 1.0) -> Arrival:
    return arrival(LEASE, peer=peer, role="searcher", sender=sender, deadline=deadline)


def test_a_newer_request_of_a_sender_takes_the_place_of_the_older_one():
    parked = Parked()
    old, new = parked_lease("a.1"), parked_lease("a.1", peer=b"2")
    assert parked.add(old)
    assert parked.add(new)
    assert parked.of_type(LEASE.TYPE) == {"a.1": new}


def test_one_connection_cannot_park_many_requests():
    parked = Parked()
    flood = [parked_lease(f"a{n}.1") for n in range(1000)]
    assert sum(map(parked.add, flood)) == len(parked.of_type(LEASE.TYPE)) < 10
    assert parked.add(parked_lease("b.1", peer=b"2")), "other connections are not affected"
    for item in list(parked.of_type(LEASE.TYPE).values()):
        parked.remove(item)
    assert parked.add(flood[-1])


def test_overdue_requests_are_taken_once():
    parked = Parked()
    early, late = parked_lease("a.1", deadline=1.0), parked_lease("b.1", deadline=2.0)
    assert parked.add(early)
    assert parked.add(late)
    assert parked.take_overdue(1.0) == [early]
    assert parked.take_overdue(1.0) == []
    assert parked.of_type(LEASE.TYPE) == {"b.1": late}
