"""What a service refuses, so that no client can harm the data or the memory of others."""

import pytest

from tba.buffer.service import training
from tba.buffer.service.clients import Clients
from tba.common.errors import Refused
from tba.common.wire import fields, messages
from tba.common.wire.messages import GetStatus
from tba.tests.helpers.clock import ManualClock
from tba.tests.helpers.puts import log_ratios, numbers_of, read_log_ratios


def report(ids):
    return messages.ReportStep(
        step=0, metrics={}, reference="initial", trajectory_ids=ids, reference_logprobs=[-1.0] * len(ids)
    )


def sample(step=0):
    return messages.SampleBatch(step=step, prompts=1, samples=2, reference="initial", wait_seconds=0.0)


def test_a_put_under_a_known_number_with_another_response_is_refused(harness, trajectory):
    buffer = harness(fill=(1, 0))
    buffer.put([trajectory(tokens=[1, 2])], first_sequence=0, sender="new.1")
    assert buffer.put([trajectory(tokens=[1, 2])], first_sequence=0, sender="new.1").duplicates == 1
    with pytest.raises(Refused, match="trajectory 0 of new.1, which is stored with another") as refused:
        buffer.put([trajectory(tokens=[1, 3])], first_sequence=0, sender="new.1")
    assert refused.value.code == "sequence_taken"


def test_log_probabilities_of_trajectories_that_do_not_exist_are_refused(harness):
    buffer = harness(fill=(1, 4))
    batch = buffer.ask(sample(), role="trainer", sender="t.1").message
    known = batch.trajectory_ids
    with pytest.raises(Refused, match="trajectory 999, which does not exist"):
        buffer.ask(report([known[0], 999]), role="trainer", sender="t.1")
    buffer.ask(report(sorted(set(known))), role="trainer", sender="t.1")


@pytest.mark.parametrize("rows", [1, 3])
def test_a_report_with_numbers_of_more_or_fewer_rows_than_slots_is_refused_and_changes_nothing(harness, rows):
    buffer = harness(fill=(1, 4))
    buffer.ask(sample(), role="trainer", sender="t.1")
    with pytest.raises(Refused, match=f"has numbers of {rows} rows?, and its batch 2 slots: report one row") as refused:
        buffer.report(0, rows=numbers_of(rows))
    assert refused.value.code == "row_numbers"
    assert buffer.store.database.all("SELECT trained_at FROM batches") == [(None,)]
    assert buffer.store.database.all("SELECT DISTINCT skipped FROM consumption") == [(None,)]


def test_the_numbers_of_a_report_are_stored_slot_by_slot_and_those_of_a_repeated_one_replace_them(harness):
    buffer = harness(fill=(1, 4))
    buffer.ask(sample(), role="trainer", sender="t.1")
    numbers = "SELECT logprob, log_ratio, advantage, weight, mismatch, skipped FROM consumption ORDER BY slot"
    buffer.report(0)
    assert buffer.store.database.all(numbers) == [(None,) * 6] * 2
    buffer.report(0, rows=numbers_of(2))
    assert buffer.store.database.all(numbers) == [(*[None] * 5, 1), (-2.5, 0.125, -0.75, 1.0, 0.01, 0)]
    buffer.report(0, rows=numbers_of(2, advantage=[1e308, -1e308]))
    assert buffer.store.database.all("SELECT advantage FROM consumption ORDER BY slot") == [(1e308,), (-1e308,)]
    # A report without numbers, of an older trainer, keeps them.
    buffer.report(0)
    assert buffer.store.database.all("SELECT advantage FROM consumption ORDER BY slot") == [(1e308,), (-1e308,)]


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_log_ratios_of_more_or_fewer_tokens_than_the_response_has_are_refused_and_change_nothing(harness, tokens):
    buffer = harness(fill=(1, 4))
    buffer.ask(sample(), role="trainer", sender="t.1")
    sentence = f"log-ratios of {2 * tokens} bytes for the 2 response tokens of slot 1: report 2 bytes for each"
    with pytest.raises(Refused, match=sentence) as refused:
        buffer.report(0, rows=numbers_of(2, token_log_ratios=log_ratios([0.5, 1.0], [0.5] * tokens)))
    assert refused.value.code == "row_numbers"
    assert buffer.store.database.all("SELECT DISTINCT trained_at FROM consumption") == [(None,)]
    assert buffer.store.database.all("SELECT DISTINCT token_log_ratios FROM consumption_rows") == [(None,)]


def test_log_ratios_of_tokens_are_stored_slot_by_slot_and_count_towards_the_log(harness, monkeypatch):
    buffer = harness(fill=(1, 4))
    buffer.ask(sample(), role="trainer", sender="t.1")
    written: list[int] = []
    monkeypatch.setattr(buffer.store.database, "note_written", written.append)
    buffer.report(0, rows=numbers_of(2))
    buffer.report(0, rows=numbers_of(2, token_log_ratios=log_ratios(None, [0.5, -65504])))
    stored = buffer.store.database.all("SELECT token_log_ratios FROM consumption_rows ORDER BY slot")
    assert read_log_ratios([blob for (blob,) in stored]) == [None, [0.5, -65504]]
    assert written[1] == written[0] + 4


def test_a_batch_whose_header_fits_no_message_is_refused_before_it_is_recorded(harness, monkeypatch):
    buffer = harness(fill=(1, 4))
    monkeypatch.setattr(training, "_MAX_BATCH_HEADER", 200)
    with pytest.raises(Refused, match="the largest rows are trajectories") as refused:
        buffer.ask(sample(), role="trainer", sender="t.1")
    assert refused.value.code == "oversize"
    assert not buffer.store.batches.has(buffer.run, 0)


def test_a_crowd_of_names_is_refused_and_those_at_work_are_not(harness, monkeypatch):
    monkeypatch.setattr(fields, "MAX_CLIENTS", 30)
    buffer = harness()
    buffer.register(2)
    beat = messages.Heartbeat(activity="x", reason="", weights_version=None, metrics={})
    for n in range(fields.MAX_CLIENTS):
        buffer.lease(1, sender=f"s{n}.1")
    with pytest.raises(Refused, match="30 clients"):
        buffer.ask(beat, sender="late.1")
    buffer.ask(beat, sender="s0.1")
    assert len(buffer.ask(GetStatus(), role="monitor", sender="m.1").message.clients) == fields.MAX_CLIENTS
    buffer.clock.advance(buffer.config.buffer.lease_seconds + 1)
    buffer.ask(beat, sender="late.1")


def test_a_crowd_of_names_that_do_no_work_keeps_no_searcher_out(harness, monkeypatch):
    monkeypatch.setattr(fields, "MAX_CLIENTS", 30)
    buffer = harness()
    buffer.register(2)
    hello = messages.Hello(host="h", pid=1)
    buffer.ask(hello, role="trainer", sender="t.1")
    buffer.lease(1, sender="searcher.1")
    for n in range(fields.MAX_CLIENTS + 100):
        buffer.clock.advance(0.001)
        buffer.ask(hello, sender=f"idle{n}.1")
    for sender in ("t.1", "searcher.1"):
        assert sender in buffer.service.state.clients
    assert len(buffer.lease(1, sender="new.1").visits) == 1
    buffer.ask(messages.Heartbeat(activity="x", reason="", weights_version=None, metrics={}), sender="idle0.1")


def test_a_crowd_of_working_names_of_one_owner_keeps_no_searcher_out(monkeypatch):
    monkeypatch.setattr(fields, "MAX_CLIENTS", 200)
    clients = Clients(ManualClock(), 60.0)
    honest = [(f"honest{n}.1", b"%d" % n) for n in range(50)]
    late = [(f"late{n}.1", b"late%d" % n) for n in range(30)]
    for name, owner in [*honest, *((f"crowd{n}.1", b"crowd") for n in range(150)), *late]:
        clients.mark_seen(name, "searcher", owner=owner)
        if name in clients:
            clients[name].has_worked = True
    assert all(name in clients for name, _ in honest)
    # As many names as one node may have stay.
    assert [name in clients for name, _ in late] == [True] * 22 + [False] * 8
    assert sum(f"crowd{n}.1" in clients for n in range(150)) == 128
