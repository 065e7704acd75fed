"""Random and mutated messages on the server's own path: none crashes it, none leaves a wrong file."""

import os
import sqlite3
from collections import Counter

import pytest

from tba.buffer.rows import put_columns
from tba.buffer.service import Answer
from tba.common import wire
from tba.common.codec import decode_request, encode_reply
from tba.common.errors import Refused, WireError

from .mutations import Mutator

MESSAGES = int(os.environ.get("TBA_FUZZ_MESSAGES", "100000"))
GROUP = 100


class Victim:
    """A buffer on a real file that gets multiparts as the server does: checked one by one, committed in groups."""

    def __init__(self, harness) -> None:
        self.harness = harness
        self.counts: Counter[str] = Counter()

    def feed(self, multiparts: list[list[bytes]]) -> None:
        arrivals = [arrival for frames in multiparts if (arrival := self._decoded(frames)) is not None]
        with self.harness.store.transaction():
            outcomes = [self._outcome(*arrival) for arrival in arrivals]
        state = self.harness.service.state()
        for answer in outcomes:
            if answer is not None:
                encode_reply(answer.message, id=1, run="", state=state, frames=answer.frames)

    def _decoded(self, frames):
        try:
            request = decode_request([memoryview(frame) for frame in frames])
            message = request.message
            return request, put_columns(message, request.frames) if isinstance(message, wire.PutTrajectories) else None
        except WireError:
            self.counts["malformed"] += 1
            return None

    def _outcome(self, request, put) -> Answer | None:
        self.harness.service.hear(request.header)
        try:
            answer = self.harness.service.handle(request, put)
        except Refused as refusal:
            self.counts[refusal.code] += 1
            return None
        self.counts[request.header.type] += 1
        return answer or self.harness.service.waiting_answer(request)


def memory(service) -> dict:
    """What a rebuild must give again."""
    index = service._index
    return {
        "entries": {prompt: index.entries(prompt) for prompt in sorted(index.prompts())},
        "counts": (service._trajectories, service._errors, service._sampled, service._steps_done, service._finished),
        "leases": {visit.id: (visit.epoch, visit.prompt) for visit in service._leases.open.values()},
        "place": (service._leases.epoch, service._leases.place),
        "versions": service._versions,
        "ranges": {sender: ranges.ranges for sender, ranges in service._received.items() if ranges.ranges},
    }


def check_whole(harness, trajectory) -> None:
    """The file is whole, the memory is what a rebuild makes of it, and a good put works."""
    before = memory(harness.service)
    senders = list(harness.service._received)
    harness.service.rebuild()
    for sender in senders:
        harness.service._ranges_of(sender)
    assert memory(harness.service) == before
    assert harness.put([trajectory(tokens=[1, 2, 3, 4])], first_sequence=0, sender="new.1").stored == 1
    with sqlite3.connect(harness.store.path) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert (
            database.execute("SELECT COUNT(*) FROM payloads").fetchone()
            == database.execute("SELECT COUNT(*) FROM trajectory_rows").fetchone()
        )


def prepared(harness):
    buffer = harness(buffer={"min_free_mib": 0, "prompt_cap": 50})
    buffer.register(6)
    for version in range(3):
        buffer.announce(version, step=version)
    return buffer


@pytest.mark.parametrize("seed", range(4))
def test_mutated_messages_are_refused_and_leave_everything_whole(harness, trajectory, seed):
    buffer = prepared(harness)
    victim, mutator = Victim(buffer), Mutator(seed)
    for group in range(MESSAGES // 4 // GROUP):
        messages = [mutator.message() for _ in range(GROUP)]
        try:
            victim.feed(messages)
        except Exception as error:
            error.add_note(f"seed {seed}, group {group}")
            raise
    print(victim.counts)
    assert victim.counts["malformed"] > MESSAGES // 16
    assert set(wire.REQUESTS) <= set(victim.counts), "every type of message came through"
    check_whole(buffer, trajectory)
