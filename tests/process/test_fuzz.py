"""Random and mutated messages on the server's code path: none crashes it or corrupts the file."""

import sqlite3
from collections import Counter
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tba.buffer.service.put_columns import to_columns
from tba.buffer.service.run_state import ReplyBody
from tba.common.config import Config
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
from tba.common.wire.fields import Role
from tba.common.wire.messages import GetStatus
from tba.tests.helpers.buffer import ServiceHarness
from tba.tests.helpers.examples import FILE_MESSAGES, REPLIES
from tba.tests.helpers.mutations import Mutator
from tba.tests.helpers.puts import make_trajectory, numbers_of, put_message, reference
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
    index = state.index
    return {
        "entries": {prompt: index.entries(prompt) for prompt in sorted(index.prompts())},
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
    with closing(sqlite3.connect(harness.store.path)) as database, database:
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


# ---------------------------------------------------------------- other servers, and clients


def mutated(seed, examples):
    mutator = Mutator(seed, examples)
    return [mutator.message() for _ in range(MESSAGES // 4)]


def requests(types):
    """Return a valid request of each of these types."""
    examples = FILE_MESSAGES
    return [encode_request(examples[type_], id=1, role="searcher", sender="s.1", run="") for type_ in types]


def check_answers(replies, types):
    """Check that all of these are replies, both to valid and to malformed requests."""
    codes = Counter(
        reply.message.code if isinstance(reply.message, messages.Failure) else reply.header.type
        for reply in (decode_plain_reply([memoryview(frame) for frame in frames], types) for frames in replies)
    )
    assert codes["malformed"] > 0.5 * codes.total()
    return codes


def test_a_snapshot_server_answers_mutated_messages(tmp_path):
    (tmp_path / "snapshots").mkdir()
    server = SnapshotServer("tcp://127.0.0.1:*", tmp_path / "snapshots")
    replies = []
    with closing(server), zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        socket.connect(server.address)
        for frames in mutated(1, requests(codec.FILE_REQUESTS)):
            socket.send_multipart(frames)
            replies.append(socket.recv_multipart())
    assert check_answers(replies, codec.FILE_REPLIES)["no_such_file"] > MESSAGES // 50


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


# ---------------------------------------------------------------- valid messages with unusual values

numbers = st.sampled_from([0, 1, 3, 2**31 - 2, 2**31 - 1, 2**53 + 1, 2**63 - 2, 2**63 - 1]) | st.integers(0, 20)
names = st.sampled_from(["p0", "p5", "\x00", "é" * 200, " "])
floats = st.floats(allow_nan=False, allow_infinity=False)
times = st.floats(0, 253_402_300_800, exclude_max=True)
json_values = st.recursive(
    st.none() | st.booleans() | floats | names, lambda v: st.lists(v) | st.dictionaries(names, v)
)


@st.composite
def groups(draw):
    """Return a well-formed put: failed rows without tokens, unusual version runs, any lease and sequence number."""
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        failed = draw(st.booleans())
        error: dict[str, Any] = {"error": "no", "stop_reason": "error"} if failed else {}
        runs = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=6))
        if not runs:
            runs = [(draw(st.integers(0, 2**31 - 1)), 0)] if failed else [(0, 1)]
        count = sum(length for _, length in runs)
        rows.append(
            make_trajectory(
                draw(st.sampled_from(["p0", "p5", "p9"])),
                lease=draw(numbers),
                tokens=draw(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count)),
                version_runs=np.array(runs, np.int32).reshape(-1, 2),
                prompt_ids=np.zeros(0 if failed else 1, np.int32),
                reward=draw(st.floats(-1e9, 1e9)),
                reward_parts=draw(st.dictionaries(names, floats, max_size=3)),
                created_at=draw(times),
                text=draw(st.none() | names),
                metadata=draw(st.dictionaries(names, json_values, max_size=3)),
                loss_mask=np.ones(draw(st.sampled_from([0, count])), np.uint8),
                **error,
            )
        )
    return put_message(rows, draw(numbers))


others: st.SearchStrategy[Any] = st.one_of(
    st.builds(lambda n: messages.SampleBatch(step=n, prompts=1, samples=2, reference="r", wait_seconds=0.0), numbers),
    st.builds(
        lambda n, ids, x: messages.ReportStep(
            step=n,
            metrics={"m": x},
            reference="r",
            trajectory_ids=ids,
            reference_logprobs=[x] * len(ids),
            rows=numbers_of(2, advantage=[x, None], token_log_ratios=[bytes(2 * n % 64), None]),
        ),
        *(numbers, st.lists(numbers, max_size=3), floats),
    ),
    st.builds(lambda v, s: messages.AnnounceSnapshot(weights=reference(v, s), bytes=v), numbers, numbers),
    st.builds(
        lambda w, held, v: messages.LeasePrompts(want=w, held=held, weights_version=v, wait_seconds=0.0),
        *(st.integers(0, 9), st.lists(numbers, max_size=3), numbers),
    ),
    st.builds(
        lambda n, o, keys: messages.RegisterPrompts(
            task="t", fingerprint="0" * 64, total=max(n + 1, o + len(keys)), offset=o, keys=keys
        ),
        *(numbers, numbers, st.lists(names, max_size=3)),
    ),
    st.builds(lambda n: messages.FinishRun(step=n), numbers),
    st.builds(
        lambda n, x: messages.Heartbeat(activity="x", reason="", weights_version=n, metrics={"m": x}), numbers, floats
    ),
    st.sampled_from([messages.Hello(host="h", pid=2**63 - 1), messages.Goodbye(), GetStatus()]),
).map(lambda message: (message, []))


@settings(deadline=None, max_examples=size(40, 300), suppress_health_check=list(HealthCheck))
@given(messages=st.lists(st.tuples(groups() | others, st.sampled_from(["a.1", "b.1", "c.1"])), max_size=12))
def test_valid_messages_with_unusual_values_are_answered_and_do_no_harm(tmp_path_factory, messages):
    config = Config.model_validate({"train": {"prompts_per_step": 1}, "buffer": {"min_free_mib": 0}})
    buffer = ServiceHarness(tmp_path_factory.mktemp("odd") / "buffer.sqlite", config)
    try:
        buffer.register(6)
        buffer.announce(0, step=0)
        roles: dict[str, Role] = {"a.1": "searcher", "b.1": "trainer", "c.1": "publisher"}
        Victim(buffer).feed(
            [
                encode_request(message, id=1, role=roles[sender], sender=sender, run="", frames=frames)
                for (message, frames), sender in messages
            ]
        )
        check_intact(buffer, make_trajectory)
    finally:
        buffer.store.close()
