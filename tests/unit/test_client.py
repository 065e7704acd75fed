"""What the client sends again, and what it does not."""

import time

from tba.common import wire
from tba.common.channels import ServerChannel
from tba.common.client import BufferClient
from tba.common.clock import ManualClock
from tba.common.codec import decode_request, encode_reply

STATE = wire.RunState(weights=None, step=0, finished=False)


class Server:
    """Answers what it is told to answer."""

    def __init__(self) -> None:
        self.channel = ServerChannel("tcp://127.0.0.1:*")
        self.peer = b""

    def receive(self) -> list[int]:
        """The ids that have come."""
        found = []
        for peer, frames in self.channel.receive(0.1, 64):
            self.peer = peer
            found.append(decode_request(frames).header.id)
        return found

    def answer(self, id_: int) -> None:
        assert self.channel.send(self.peer, encode_reply(wire.Done(), id=id_, run="r", state=STATE))


def test_what_waits_its_turn_is_not_sent_again_and_what_was_passed_over_is():
    server, clock = Server(), ManualClock()
    client = BufferClient(server.channel.address, role="searcher", name="s", clock=clock)

    def turn() -> list[int]:
        """The ids that the server gets until all is quiet."""
        found, quiet_at = [], time.monotonic() + 0.5
        while time.monotonic() < quiet_at:
            client.poll(0.05)
            if came := server.receive():
                found, quiet_at = [*found, *came], time.monotonic() + 0.5
        return found

    try:
        ids = [client.post(wire.Goodbye()) for _ in range(4)]
        assert turn() == ids
        clock.advance(2)
        server.answer(ids[0])
        assert turn() == []
        clock.advance(2)  # four seconds after they were sent, two after the one before them was answered
        server.answer(ids[3])
        assert turn() == []
        clock.advance(2)  # the answer to a later one is no sign that theirs will come
        assert turn() == ids[1:3]
    finally:
        client.close()
        server.channel.close()
