"""Random and mutated messages on the server's code path: none crashes it or corrupts the file."""

from collections import Counter
from contextlib import closing

import pytest
import zmq

from tba.buffer.service.put_columns import to_columns
from tba.buffer.service.run_state import ReplyBody
from tba.common.errors import Refused, WireError
from tba.common.weights.snapshot_server import SnapshotServer
from tba.common.wire import codec, messages
from tba.common.wire.codec import (
    decode_plain_reply,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
    request_id_of,
)
from tba.tests.helpers.buffer import ask
from tba.tests.helpers.examples import FILE_MESSAGES, REPLIES
from tba.tests.helpers.index import entries_of
from tba.tests.helpers.mutations import Mutator
from tba.tests.runner import size

MESSAGES = size(6000, 100_000)
GROUP = 100
SEEDS = size(1, 4)


class Victim:
    """A buffer on a real file that handles multiparts as the server does: decoded one by one, committed in groups."""

    def __init__(self, harness) -> None:
        self.harness = harness
        self.counts: Counter[str] = Counter()

    def feed(self, multiparts: list[list[bytes]]) -> None:
        arrivals = [arrival for frames in multiparts if (arrival := self._decoded(frames)) is not None]
        with self.harness.service.transaction():
            outcomes = [self._outcome(*arrival) for arrival in arrivals]
        state = self.harness.service.state.for_replies()
        for body in outcomes:
            if body is not None:
                deliver(body, 1, state)

    def _decoded(self, frames):
        views = [memoryview(frame) for frame in frames]
        try:
            request = decode_request(views)
            return request.header, to_columns(request)
        except WireError as error:
            self.counts["malformed"] += 1
            failure = ReplyBody(messages.Failure(code=error.code, message=str(error)[:4000]))
            deliver(failure, request_id_of(views), self.harness.service.state.for_replies())
            return None

    def _outcome(self, header, message) -> ReplyBody | None:
        self.harness.service.state.clients.mark_seen(header.sender, header.role)
        try:
            body = self.harness.service.handle(header, message)
        except Refused as refusal:
            self.counts[refusal.code] += 1
            return None
        self.counts[header.type] += 1
        return body or self.harness.service.timeout_reply(header, message)


def deliver(body: ReplyBody, id_: int, state: messages.RunState) -> None:
    """Check that a reply can be encoded and decoded."""
    frames = encode_reply(body.message, id=id_, run="", state=state, frames=body.frames)
    decode_reply([memoryview(frame) for frame in frames])


def memory(service) -> dict:
    """Return the memory that a rebuild must reproduce."""
    state = service.state
    return {
        "entries": entries_of(state.index),
        "counts": (state.trajectories, state.errors, state.sampled, state.steps_done, state.finished),
        "leases": {visit.id: (visit.epoch, visit.prompt) for visit in state.leases.open.values()},
        "position": (state.leases.epoch, state.leases.position),
        "versions": state.versions,
        "sequences": {sender: sequence for sender, sequence in state.next_sequences.items() if sequence},
    }


def check_intact(harness, trajectory) -> None:
    """Check that the file is intact, that the memory equals a rebuilt one, and that a valid put works."""
    before = memory(harness.service)
    senders = list(harness.service.state.next_sequences)
    harness.service.state.rebuild()
    for sender in senders:
        harness.service.state.stored_sequences(sender, 0, 1)
    assert memory(harness.service) == before
    assert harness.put([trajectory(tokens=[1, 2, 3, 4])], first_sequence=0, sender="new.1").stored == 1
    assert ask(harness.store.path, "PRAGMA integrity_check") == [("ok",)]
    rows = ask(harness.store.path, "SELECT COUNT(*) FROM trajectory_rows WHERE archive IS NULL")
    assert ask(harness.store.path, "SELECT COUNT(*) FROM payloads") == rows


def prepared(harness):
    buffer = harness(buffer={"min_free_mib": 0, "prompt_cap": 50})
    buffer.register(6)
    for version in range(3):
        buffer.announce(version, step=version)
    return buffer


@pytest.mark.parametrize("seed", range(SEEDS))
def test_mutated_messages_are_refused_and_do_no_harm(harness, trajectory, seed):
    buffer = prepared(harness)
    victim, mutator = Victim(buffer), Mutator(seed)
    for group in range(MESSAGES // SEEDS // GROUP):
        mutated = [mutator.message() for _ in range(GROUP)]
        try:
            victim.feed(mutated)
        except Exception as error:
            error.add_note(f"seed {seed}, group {group}")
            raise
    print(victim.counts)
    assert victim.counts["malformed"] > MESSAGES // SEEDS // 4
    assert set(codec.REQUESTS) <= set(victim.counts), "every type of message was handled"
    check_intact(buffer, trajectory)


def mutated(seed, examples):
    mutator = Mutator(seed, examples)
    return [mutator.message() for _ in range(MESSAGES // 4)]


def test_a_snapshot_server_answers_mutated_messages(tmp_path):
    (tmp_path / "snapshots").mkdir()
    server = SnapshotServer("tcp://127.0.0.1:*", tmp_path / "snapshots")
    examples = [
        encode_request(FILE_MESSAGES[type_], id=1, role="searcher", sender="s.1", run="")
        for type_ in codec.FILE_REQUESTS
    ]
    codes: Counter[str] = Counter()
    with closing(server), zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        socket.connect(server.address)
        for frames in mutated(1, examples):
            socket.send_multipart(frames)
            reply = decode_plain_reply([memoryview(frame) for frame in socket.recv_multipart()], codec.FILE_REPLIES)
            codes[reply.message.code if isinstance(reply.message, messages.Failure) else reply.header.type] += 1
    assert codes["malformed"] > 0.5 * codes.total()
    assert codes["no_such_file"] > MESSAGES // 50


def test_clients_refuse_mutated_replies_with_a_wire_error(harness, trajectory):
    buffer = prepared(harness)
    buffer.put([trajectory("p0", tokens=[n]) for n in range(2)], 0)
    state = buffer.service.state.for_replies()
    batch = buffer.sample(0, 1, 2)
    bodies = [*map(ReplyBody, REPLIES.values()), ReplyBody(buffer.service.status()), batch]
    examples = [encode_reply(body.message, id=1, run="", state=state, frames=body.frames) for body in bodies]
    counts: Counter[str] = Counter()
    for frames in mutated(3, examples):
        try:
            counts[decode_reply([memoryview(frame) for frame in frames]).header.type] += 1
        except WireError:
            counts["malformed"] += 1
    assert set(codec.REPLIES) <= set(counts), "every type of reply was decoded"
    assert counts["malformed"] > 0.5 * counts.total()
