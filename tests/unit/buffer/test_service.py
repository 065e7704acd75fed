"""The reply of the service to puts, batches and the rest, on a real database file."""

import dataclasses

import numpy as np
import pytest

from tba.common.errors import Refused, WireError
from tba.common.wire import messages
from tba.common.wire.messages import GetStatus
from tba.common.wire.trajectory import RESPONSE_IDS


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
    index = buffer.service.state.index
    entries = sorted((e.id, e.reward) for prompt in index.prompts() for e in index.entries(prompt))
    assert entries == sorted((row[0], row[3]) for row in rows)


def test_a_put_of_an_unknown_prompt_or_version_is_refused(harness, trajectory):
    buffer = harness(fill=(1, 0))
    with pytest.raises(Refused, match="prompt 'p9' is not registered"):
        buffer.put([trajectory("p9")], 0)
    with pytest.raises(Refused, match="policy version 5 was never announced"):
        buffer.put([trajectory(version_runs=np.array([[0, 1], [5, 2]], np.int32))], 0)


def test_an_error_row_is_kept_and_never_sampled(harness, trajectory):
    buffer = harness(fill=(1, 0))
    buffer.put([trajectory(error="reward: ValueError: no", stop_reason="error")], 0)
    status = buffer.ask(GetStatus()).message
    assert (status.trajectories, status.errors, status.sampleable) == (1, 1, 0)


def test_a_repeated_request_for_a_step_returns_the_same_batch(harness):
    buffer = harness(fill=(8, 4))
    first = buffer.sample(0, prompts=4, samples=4)
    buffer.fill(8, 4, version=1)
    again = buffer.sample(0, prompts=4, samples=4)
    assert first.message == again.message
    assert first.frames == again.frames


def test_a_batch_carries_the_payload_that_was_put(harness, trajectory):
    buffer = harness(fill=(1, 0))
    buffer.put([trajectory(tokens=[11, 12]), trajectory(tokens=[13])], 0)
    reply = buffer.sample(0, prompts=1, samples=2)
    tokens = memoryview(reply.frames[1]).cast("i").tolist()
    assert sorted(tokens) == [11, 12, 13]
    assert reply.message.prompt_key == ["p0", "p0"]


def test_a_batch_that_fits_no_message_is_refused_and_not_recorded(harness, monkeypatch):
    buffer = harness(fill=(2, 2))
    tokens = buffer.service.state.store.trajectories.tokens([1, 2, 3, 4])
    monkeypatch.setattr("tba.buffer.service.training.MAX_FRAME_BYTES", 4 * max(tokens) - 1)
    with pytest.raises(Refused, match="at most"):
        buffer.sample(0, 2, 2)
    assert not buffer.service.state.store.batches.has(buffer.run, 0)
    monkeypatch.setattr("tba.buffer.service.training.MAX_FRAME_BYTES", 4 * max(tokens))
    frames = buffer.sample(0, 2, 2).frames
    assert max(map(len, frames)) <= 4 * max(tokens) < sum(map(len, frames)), "each frame fits, all together would not"


def test_a_request_that_finds_too_little_data_is_parked_with_a_reason(harness):
    buffer = harness(fill=(2, 2))
    assert buffer.sample(0, prompts=4, samples=2) is None
    assert buffer.ask(GetStatus()).message.trainer_waits_for == "2 of 4 prompts have trajectories"


def test_staleness_is_counted_in_steps_from_the_oldest_version_of_a_response(harness, trajectory):
    buffer = harness(buffer={"recency_window": 20}, fill=(1, 0))
    buffer.announce(1, step=10)
    spanning = trajectory(tokens=[1, 2, 3], version_runs=np.array([[0, 1], [1, 2]], np.int32))
    buffer.put([spanning, trajectory(tokens=[4], version=1)], 0)
    batch = buffer.sample(12, 1, 2).message
    assert dict(zip(batch.policy_version, batch.staleness, strict=True)) == {0: 12, 1: 2}


def test_staleness_counts_from_the_earliest_step_even_if_its_version_is_newer(harness, trajectory):
    """A trainer that resumed at step 5 published version 1."""
    buffer = harness(buffer={"recency_window": 20})
    buffer.register(1)
    buffer.announce(0, step=10)
    buffer.announce(1, step=5)
    runs = np.array([[0, 1], [1, 2]], np.int32)
    buffer.put([trajectory(version_runs=runs), trajectory(tokens=[4], version_runs=np.array([[1, 1]], np.int32))], 0)
    assert set(buffer.sample(12, 1, 2).message.staleness) == {7}


def test_a_put_is_refused_whole_or_not_at_all(harness, trajectory):
    buffer = harness(fill=(1, 0))
    with pytest.raises(WireError, match="metadata of row 1 cannot be written as JSON"):
        buffer.put([trajectory(), trajectory(tokens=[9], metadata={"x": b"bytes"})], 0)
    with pytest.raises(Refused, match="was never announced"):
        buffer.put([trajectory(), trajectory(tokens=[9], version=7)], 0)
    assert buffer.ask(GetStatus()).message.trajectories == 0


def test_the_memory_equals_a_memory_rebuilt_from_the_file(harness, trajectory):
    buffer = harness(buffer={"prompt_cap": 3}, fill=(4, 5))
    buffer.lease(3)
    buffer.sample(0, 2, 2)
    buffer.report(0)

    def memory():
        service = buffer.service
        entries = {prompt: service.state.index.entries(prompt) for prompt in service.state.index.prompts()}
        leases = (service.state.leases.epoch, service.state.leases.position, service.state.leases.open)
        return entries, leases, service.state.for_replies(), service.state.trajectories

    before = memory()
    buffer.service.state.rebuild()
    assert memory() == before


def test_a_sender_of_another_run_is_refused(harness):
    buffer = harness()
    buffer.run = dataclasses.replace(buffer.run, uuid="f" * 32)
    with pytest.raises(Refused, match="another one"):
        buffer.ask(GetStatus())


def test_a_version_is_never_announced_with_other_content(harness):
    buffer = harness()
    buffer.announce(0, 0)
    with pytest.raises(Refused, match="announced before"):
        buffer.announce(0, 5)


def test_a_finished_run_continues_when_a_trainer_says_hello(harness):
    buffer = harness()
    buffer.ask(messages.FinishRun(step=3), role="trainer", sender="t.1")
    assert buffer.service.state.for_replies().finished
    buffer.ask(messages.Hello(host="h", pid=1), role="trainer", sender="t.2")
    assert not buffer.service.state.for_replies().finished


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


def test_the_status_has_the_newest_version_from_before_the_trainer_started(harness):
    buffer = harness()
    buffer.announce(0, 0)
    assert buffer.ask(GetStatus()).message.earlier_version is None
    buffer.ask(messages.Hello(host="h", pid=1), role="trainer", sender="trainer.2")
    buffer.announce(1, 0)
    status = buffer.ask(GetStatus()).message
    assert (status.earlier_version, status.newest_version) == (0, 1)
