"""Which requests the client sends again."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from tba.common.errors import BufferUnavailable, Refused
from tba.common.wire import client as client_module
from tba.common.wire import messages
from tba.common.wire.channels import Peer, ServerChannel
from tba.common.wire.client import BufferClient
from tba.common.wire.codec import decode_request, encode_reply
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.clock import ManualClock

STATE = messages.RunState(weights=None, step=0, finished=False)


class Server:
    """A server that answers on command."""

    def __init__(self) -> None:
        self.channel = ServerChannel("tcp://127.0.0.1:*")
        self.peer = Peer(b"")

    def receive(self) -> list[int]:
        """Return the ids of the requests that have arrived."""
        found = []
        for peer, frames in self.channel.receive(0.1, 64):
            self.peer = peer
            found.append(decode_request(frames).header.id)
        return found

    def answer(self, id_: int) -> None:
        assert self.channel.send(self.peer, encode_reply(messages.Done(), id=id_, run="r", state=STATE))


@contextmanager
def dialled(**options: Any) -> Iterator[tuple[Server, BufferClient]]:
    """A server, and a client of it."""
    server = Server()
    client = BufferClient(server.channel.address, role="trainer", name="t", **options)
    with closing(server.channel), closing(client):
        yield server, client


def test_a_reply_to_an_earlier_request_delays_the_resending_of_later_ones():
    clock = ManualClock()
    with dialled(clock=clock) as (server, client):

        def received(count: int) -> list[int]:
            """Return the ids that the server receives: `count` of them, and whatever follows within 0.2 s."""
            found: list[int] = []
            wait_until(lambda: client.poll(0.05) or found.extend(server.receive()) or len(found) >= count, 10)
            client.poll(0.1)
            return found + server.receive()

        ids = [client.post(messages.Goodbye()) for _ in range(4)]
        assert received(4) == ids
        clock.advance(2)
        server.answer(ids[0])
        assert received(0) == []
        # Four seconds after they were sent, two after an earlier request was answered.
        clock.advance(2)
        server.answer(ids[3])
        assert received(0) == []
        # A reply to a later request does not restart the timeout of earlier ones.
        clock.advance(2)
        assert received(2) == ids[1:3]


def test_a_reply_that_cannot_be_read_raises_instead_of_being_asked_for_again():
    with dialled() as (server, client):
        id_ = client.ask_ahead(messages.Goodbye())
        wait_until(lambda: client.poll(0.05) or server.receive() == [id_], 60)
        frames = encode_reply(messages.Done(), id=id_, run="r", state=STATE, frames=[b"stray"])
        assert server.channel.send(server.peer, frames)
        with pytest.raises(Refused, match="cannot be read: done carries no arrays"):
            client.collect(id_, messages.Done, stop=lambda: False)


def test_a_repeated_reply_does_not_end_the_wait_for_another(monkeypatch):
    with dialled() as (server, client):
        first, second = client.post(messages.Goodbye()), client.post(messages.Goodbye())
        arrived: list[int] = []
        wait_until(lambda: client.poll(0.05) or arrived.extend(server.receive()) or arrived == [first, second])
        server.answer(first)
        assert [reply.header.id for reply in client.poll(60)] == [first]
        accept = client._accept

        def drop_and_go_on(frames):
            reply = accept(frames)
            if reply is None:
                threading.Timer(0.1, server.answer, [second]).start()
            return reply

        monkeypatch.setattr(client, "_accept", drop_and_go_on)
        server.answer(first)
        assert [reply.header.id for reply in client.poll(60)] == [second]


@pytest.mark.slow
def test_a_buffer_that_was_never_there_is_named_within_seconds_with_the_remedy(monkeypatch):
    # Port 1 needs privileges, so nothing listens there.
    client = BufferClient("tcp://127.0.0.1:1", role="trainer", name="trainer")
    reasons: list[str] = []
    monkeypatch.setattr(client_module.log, "warning", lambda _, **fields: reasons.append(fields["reason"]))
    with pytest.raises(BufferUnavailable):
        client.call(messages.Goodbye(), messages.Done, stop=lambda: bool(reasons))
    client.close()
    assert reasons == ["tcp://127.0.0.1:1 does not answer: is `tba buffer serve` running?"]
