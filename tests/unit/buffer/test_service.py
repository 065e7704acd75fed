"""The reply of the service on a real database; which nodes are asked first; values that no server has stored."""

import dataclasses

import msgspec
import numpy as np
import pytest

from tba.common.errors import Refused, WireError
from tba.common.wire import messages
from tba.common.wire.codec import encode_reply
from tba.common.wire.messages import GetStatus
from tba.common.wire.trajectory import RESPONSE_IDS
from tba.tests.helpers.buffer import change
from tba.tests.helpers.index import entries_of
from tba.tests.helpers.puts import put_message


def test_the_new_rows_of_an_overlapping_put_keep_their_own_values(harness, trajectory):
    buffer = harness(fill=(3, 0))
    group = [trajectory(f"p{n % 3}", tokens=[n] * (n + 1), reward=float(n)) for n in range(6)]
    buffer.put(group[1:2], first_sequence=1)
    buffer.put(group[4:5], first_sequence=4)
    assert buffer.put(group, first_sequence=0).stored == 4
    query = "SELECT id, sequence, prompt, reward, response_tokens FROM trajectory_rows ORDER BY sequence"
    rows = buffer.store.database.all(query)
    prompts = buffer.store.prompts.ids(buffer.run)
    assert [row[1:] for row in rows] == [(n, prompts[f"p{n % 3}"], float(n), n + 1) for n in range(6)]
    payloads = buffer.store.trajectories.payloads([row[0] for row in rows])
    assert [np.frombuffer(blobs[RESPONSE_IDS], "<i4").tolist() for blobs in payloads] == [
        [n] * (n + 1) for n in range(6)
    ]
    entries = sorted((e.id, e.reward) for own in entries_of(buffer.service.state.index).values() for e in own)
    assert entries == sorted((row[0], row[3]) for row in rows)


def test_a_batch_carries_the_payloads_that_were_put_and_is_repeated_on_request(harness):
    buffer = harness(fill=(8, 4))
    first = buffer.sample(0, prompts=4, samples=4)
    tokens = memoryview(first.frames[RESPONSE_IDS]).cast("i").tolist()
    assert [f"p{n}" for n in tokens[::2]] == first.message.prompt_key
    buffer.fill(8, 4, version=1)
    again = buffer.sample(0, prompts=4, samples=4)
    assert first.message == again.message
    assert first.frames == again.frames


def test_a_batch_that_fits_no_message_is_refused_and_not_recorded(harness, monkeypatch):
    buffer = harness(fill=(2, 2))
    sizes = buffer.store.trajectories.sizes([1, 2, 3, 4]).values()
    largest = max(sum(prompt for _, prompt, _ in sizes), sum(response for *_, response in sizes))
    monkeypatch.setattr("tba.buffer.service.training.MAX_FRAME_BYTES", largest - 1)
    with pytest.raises(Refused, match="at most"):
        buffer.sample(0, 2, 2)
    assert not buffer.service.state.store.batches.has(buffer.run, 0)
    monkeypatch.setattr("tba.buffer.service.training.MAX_FRAME_BYTES", largest)
    frames = buffer.sample(0, 2, 2).frames
    assert max(map(len, frames)) <= largest < sum(map(len, frames)), "each frame fits, all together would not"
    monkeypatch.setattr("tba.buffer.service.training._MAX_BATCH_HEADER", 200)
    with pytest.raises(Refused, match="the largest rows are trajectories") as refused:
        buffer.sample(1, 2, 2)
    assert refused.value.code == "oversize"
    assert not buffer.store.batches.has(buffer.run, 1)


def test_staleness_is_counted_in_steps_from_the_earliest_step_of_a_response(harness, trajectory):
    spanning = trajectory(tokens=[1, 2, 3], version_runs=np.array([[0, 1], [1, 2]], np.int32))
    # The second trainer resumed at step 5, and published version 1 there.
    for steps, expected in (((0, 10), {0: 12, 1: 2}), ((10, 5), {1: 7})):
        buffer = harness(buffer={"recency_window": 20})
        buffer.register(1)
        for version, step in enumerate(steps):
            buffer.announce(version, step)
        buffer.put([spanning, trajectory(tokens=[4], version=1)], 0)
        batch = buffer.sample(12, 1, 2).message
        assert dict(zip(batch.policy_version, batch.staleness, strict=True)) == expected


def test_a_refused_put_or_announcement_changes_nothing(harness, trajectory):
    buffer = harness(fill=(1, 0))
    with pytest.raises(WireError, match="metadata of row 1 cannot be written as JSON"):
        buffer.put([trajectory(), trajectory(tokens=[9], metadata={"x": b"bytes"})], 0)
    with pytest.raises(Refused, match="was never announced"):
        buffer.put([trajectory(), trajectory(tokens=[9], version=7)], 0)
    with pytest.raises(Refused, match="announced before"):
        buffer.announce(0, 5)
    assert buffer.ask(GetStatus()).message.trajectories == 0
    buffer.run = dataclasses.replace(buffer.run, uuid="f" * 32)
    with pytest.raises(Refused, match="serves another run"):
        buffer.ask(GetStatus())


@pytest.mark.parametrize(("searchers", "told"), [(1, None), (900, 3)])
def test_replies_name_the_time_between_heartbeats_only_where_it_is_not_a_second(harness, searchers, told):
    buffer = harness()
    for n in range(searchers):
        buffer.service.state.clients.mark_seen(f"search{n}.1", "searcher")
    state = buffer.service.state.for_replies()
    header = msgspec.msgpack.decode(encode_reply(messages.Done(), id=1, run="", state=state, frames=[])[0])
    assert header["state"].get("heartbeat_seconds") == told


def test_a_batch_says_how_often_earlier_ones_had_its_trajectories(harness):
    buffer = harness(fill=(2, 2))
    batches = [buffer.sample(step, 2, 2).message for step in (0, 1, 2, 1)]
    assert [(batch.reuse_mean, batch.turn_rewards) for batch in batches] == [(n, None) for n in (0, 1, 2, 1)]


def test_rows_count_as_trained_on_before_their_step_is_reported(harness):
    buffer = harness(buffer={"recency_fraction": 1.0}, train={"prompts_per_step": 2}, fill=(4, 2))
    first, second = ({*buffer.sample(step, 2, 2).message.prompt_key} for step in (0, 1))
    assert first.isdisjoint(second)


def test_the_status_says_how_long_the_run_has_stood_still_and_what_fails(harness, trajectory):
    buffer = harness(fill=(2, 2))
    buffer.sample(0, prompts=2, samples=2)
    buffer.report(0, [], [])
    buffer.clock.advance(20)
    buffer.sample(1, prompts=2, samples=2)
    buffer.report(1, [], [])
    buffer.clock.advance(5)
    buffer.put([trajectory(error=error, stop_reason="error") for error in ("a\nb", "c", "a")], 4)
    assert buffer.sample(2, prompts=4, samples=2) is None
    buffer.clock.advance(30)
    status = buffer.ask(GetStatus()).message
    assert (status.usual_step_seconds, status.last_step_seconds, status.last_put_seconds) == (20, 35, 30)
    assert (status.trainer_waits_seconds, status.rows_since_step, status.errors_since_step) == (30, 3, 3)
    assert status.common_error == "a"
    buffer.sample(0, prompts=2, samples=2)
    assert buffer.ask(GetStatus()).message.trainer_waits_seconds == 0


def test_the_status_says_why_puts_are_refused(harness):
    status = harness(buffer={"min_free_mib": 1 << 40}).ask(GetStatus()).message
    assert "buffer.min_free_mib" in status.refuses_puts
    assert 0 < status.free_bytes <= status.disk_bytes


def test_a_trainer_that_says_hello_continues_a_finished_run_and_its_versions_are_newer(harness):
    buffer = harness()
    buffer.announce(0, 0)
    assert buffer.ask(GetStatus()).message.earlier_version is None
    buffer.ask(messages.FinishRun(step=3), role="trainer", sender="trainer.1")
    assert buffer.service.state.for_replies().finished
    buffer.ask(messages.Hello(host="h", pid=1), role="trainer", sender="trainer.2")
    assert not buffer.service.state.for_replies().finished
    buffer.announce(1, 0)
    status = buffer.ask(GetStatus()).message
    assert (status.earlier_version, status.newest_version) == (0, 1)


def beat(buffer, sender: str, **serves: str):
    message = messages.Heartbeat(activity="waiting", reason="", weights_version=None, metrics={}, **serves)
    return buffer.ask(message, sender=sender).message


def sources(buffer, node: int, start: int = 0) -> list[int]:
    """Send a heartbeat of a searcher of a node, and return the nodes in its reply."""
    reply = beat(buffer, f"node{node}.{start}", serves=f"tcp://n{node}:5759")
    return [int(address.removeprefix("tcp://n").removesuffix(":5759")) for address in reply.addresses]


def test_sixteen_nodes_form_a_tree_in_which_none_serves_more_than_two(harness):
    buffer = harness()
    for node in range(16):
        sources(buffer, node)
    found = {node: sources(buffer, node) for node in range(16)}
    assert found[0] == []
    assert found[1] == found[2] == [0]
    assert found[15] == [7, 3, 1, 0]
    assert all(source < node for node, before in found.items() for source in before)
    first = [before[0] for before in found.values() if before]
    assert max(first.count(node) for node in range(16)) == 2
    for node in range(16, 100):
        sources(buffer, node)
    assert sources(buffer, 99) == [49, 24, 11, 5], "a list is short however many nodes there are"


def test_the_searchers_of_a_node_are_one_source_and_one_that_left_or_is_silent_is_none(harness):
    buffer = harness(buffer={"lease_seconds": 30})
    sources(buffer, 0, start=1)
    assert sources(buffer, 0, start=2) == []
    assert sources(buffer, 1) == sources(buffer, 2) == [0]
    assert beat(buffer, "plain.1") == messages.Done(), "its node serves nothing"
    buffer.ask(messages.Goodbye(), sender="node0.1")
    assert sources(buffer, 1) == [0]
    buffer.ask(messages.Goodbye(), sender="node0.2")
    assert sources(buffer, 1) == []
    assert sources(buffer, 2) == [1]
    buffer.clock.advance(31)
    assert sources(buffer, 2) == []


NESTED = "[" * 20_000
VALUES = {
    "cut": ("trajectory_rows", "reward_parts", "[1,2", "show", "is not JSON"),
    "list": ("trajectory_rows", "metadata", "[1]", "export", "is not a JSON object: '[1]'"),
    "nested": ("trajectory_rows", "reward_parts", NESTED, "export", "is not JSON"),
    "metrics": ("batches", "metrics", '{"loss":NaN', "report", "is not JSON"),
    "origins": ("starts", "origins", "5", "report", "is not a JSON object: '5'"),
    "section": ("starts", "config", '{"train": []}', "report", "has no section train, but a value"),
    "turns": ("trajectory_rows", "turns", "[1]", "export", "is not a JSON list of objects: '[1]'"),
    "tokens": ("payloads", "response_ids", b"\x01", "show", "the tokens of a trajectory in the database are malformed"),
}


@pytest.mark.parametrize(("table", "column", "value", "command", "words"), VALUES.values(), ids=VALUES)
def test_a_reader_of_a_malformed_value_shows_it_in_a_sentence(filled, tba_here, table, column, value, command, words):
    change(filled, (f"UPDATE {table} SET {column} = ?", [value]))
    arguments = {"show": ("buffer", "show", 5, "-b", filled), "report": ("report", filled)}
    done = tba_here(*arguments.get(command, ("buffer", "export", "rows.jsonl", "-b", filled)))
    assert (done.exit_code, words in done.message) == (1, True), done.message


def test_an_explorers_rows_are_of_no_policy_and_as_old_as_the_weights_that_were_the_newest(harness, trajectory):
    buffer = harness(buffer={"recency_window": 20, "max_staleness": 20}, curriculum={"solved": 0.9, "answers": 1})
    buffer.register(1)
    for version, step in ((0, 0), (1, 10)):
        buffer.announce(version, step)
    explored = {"policy": "models/strong", "newest_version": 1}
    rows = [
        trajectory(tokens=[3], version=1),
        # The versions of its tokens are the explorer's own.
        trajectory(tokens=[4], version=9, metadata=explored),
        trajectory(tokens=[5], version=9, metadata=explored | {"imported_version": 1}),
        *(
            trajectory(tokens=[6 + n], version=9, metadata=explored | {"newest_version": newest})
            for n, newest in enumerate(("1", 1.0, True))
        ),
        trajectory(tokens=[9], version=9, metadata={"policy": "models/strong"}),
    ]
    buffer.put(rows, 0)
    # A client's own metadata, in which no text names a policy, is none of an explorer's.
    own = [{"newest_version": 1}, {"newest_version": 1, "policy": None}, {"newest_version": 1, "policy": 3}]
    imports = [trajectory(tokens=[10 + n], version=9, metadata=metadata) for n, metadata in enumerate(own)]
    message, frames = put_message(imports, 0)
    buffer.ask(message, frames, role="importer", sender="i.1")
    assert buffer.service.state.curriculum._answers == {1: (1, 1)}, "only the policy's own answer counts"
    for step in (12, 13):
        batch = buffer.sample(step, 1, 10).message
        facts = zip(batch.policy_version, batch.staleness, batch.explored, strict=True)
        assert dict(zip(batch.trajectory_ids, facts, strict=True)) == {
            1: (1, step - 10, False),
            2: (-1, step - 10, True),
            3: (-1, step, False),
            **dict.fromkeys((4, 5, 6, 7), (-1, step, True)),
            **dict.fromkeys((8, 9, 10), (-1, step, False)),
        }
        # As a restart does.
        buffer.service.state.rebuild()
    query = "SELECT policy, policy_version, policy_step FROM trajectories ORDER BY id LIMIT 3"
    assert buffer.store.database.all(query) == [(None, 1, 10), ("models/strong", -1, None), (None, -1, None)]
    with pytest.raises(Refused, match="was never announced"):
        buffer.put([trajectory(tokens=[7], version=9)], 7)
