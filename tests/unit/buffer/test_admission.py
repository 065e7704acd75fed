"""What a server refuses: clients in another's name or role, and what could harm the data or the memory of others."""

import logging
from contextlib import closing

import pytest

from tba.buffer.service.clients import Clients
from tba.common.config import Config
from tba.common.errors import Refused
from tba.common.wire import fields, messages
from tba.common.wire.client import BufferClient
from tba.common.wire.fields import Role
from tba.common.wire.messages import GetStatus, Status
from tba.tests.helpers.buffer import BufferThread
from tba.tests.helpers.clock import ManualClock
from tba.tests.helpers.puts import (
    connected,
    log_ratios,
    make_trajectory,
    numbers_of,
    prepare,
    put_message,
    read_log_ratios,
    reference,
)

BEAT = messages.Heartbeat(activity="generating", reason="", weights_version=None, metrics={})
FORBIDDEN: dict[Role, messages.Message] = {
    "searcher": messages.FinishRun(step=1),
    "monitor": messages.AnnounceSnapshot(weights=reference(7, 7), bytes=1),
    "importer": messages.ReportStep(step=0, metrics={}, reference="initial", trajectory_ids=[], reference_logprobs=[]),
    "publisher": messages.SampleBatch(step=0, prompts=1, samples=1, reference="initial", wait_seconds=0.0),
    "trainer": put_message([make_trajectory()])[0],
}


@pytest.fixture
def buffer(tmp_path):
    thread = BufferThread(
        Config.model_validate({"run": {"dir": str(tmp_path), "name": "test"}, "train": {"prompts_per_step": 1}})
    )
    yield thread
    thread.stop()


def ask(client: BufferClient, message: messages.Message, frames=()) -> messages.Message:
    return client.call(message, messages.Message, frames=frames, deadline_seconds=60)[0]


def test_a_client_that_looks_for_another_run_learns_which_one_this_is_and_is_none_of_its_clients(buffer):
    with connected(buffer.address) as monitor:
        for role in ("searcher", "trainer", "evaluator"):
            with connected(buffer.address, role) as client:
                welcome = ask(client, messages.Hello(host="h", pid=1, run_name="other"))
                assert isinstance(welcome, messages.Welcome)
                assert welcome.run_name == "test"
        status = ask(monitor, GetStatus())
        assert isinstance(status, Status)
        assert [client.role for client in status.clients] == ["monitor"]


def test_a_message_of_another_role_changes_nothing_and_is_logged(buffer, caplog):
    with connected(buffer.address) as monitor:
        for role, message in FORBIDDEN.items():
            frames = put_message([make_trajectory()])[1] if role == "trainer" else ()
            with connected(buffer.address, role) as client, pytest.raises(Refused, match=f"refused from a {role}"):
                ask(client, message, frames)
        status = ask(monitor, GetStatus())
        assert isinstance(status, Status)
        assert (status.finished, status.step, status.trajectories) == (False, 0, 0)
        assert monitor.state is not None
        assert monitor.state.weights is None
    (line, *_) = [record for record in caplog.records if record.getMessage() == "request refused"]
    assert line.levelno == logging.WARNING
    assert line.fields["by"] == "127.0.0.1"


def test_no_other_client_puts_or_says_goodbye_in_the_name_of_a_sender_at_work(buffer):
    with connected(buffer.address, "monitor") as monitor, connected(buffer.address, "searcher", "victim") as victim:
        # A monitor does not keep it from its name.
        victim.sender = monitor.sender
        ask(monitor, BEAT)
        prepare(victim)
        with pytest.raises(Refused, match="is another client, a searcher"):
            ask(monitor, BEAT)
        other = BufferClient(buffer.address, role="searcher", name="other", sender=victim.sender)
        posing = BufferClient(buffer.address, role="monitor", name="other", sender=victim.sender, secret=victim.secret)
        with closing(other), closing(posing):
            for message, frames in ((messages.Goodbye(), []), (put_message([make_trajectory(lease=0)]))):
                with pytest.raises(Refused, match=f"the sender {victim.sender} is another client"):
                    ask(other, message, frames)
            with pytest.raises(Refused, match="is another client, a searcher"):
                ask(posing, messages.Goodbye())
        again = BufferClient(buffer.address, role="searcher", name="again", sender=victim.sender, secret=victim.secret)
        with closing(again):
            message, frames = put_message([make_trajectory(lease=0)])
            assert ask(again, message, frames) == messages.PutAck(first_sequence=0, stored=1, duplicates=0)
            ask(victim, messages.Goodbye())
        with connected(buffer.address, "searcher") as heir:
            heir.sender = victim.sender
            ask(heir, BEAT)


def test_versions_and_steps_follow_those_recorded(buffer):
    with connected(buffer.address, "searcher") as searcher:
        prepare(searcher)
        ask(searcher, *put_message([make_trajectory(lease=0)]))
    with connected(buffer.address, "trainer") as trainer, connected(buffer.address, "publisher") as publisher:
        for step in (0, 1):
            ask(trainer, messages.SampleBatch(step=step, prompts=1, samples=1, reference="i", wait_seconds=0.0))
        with pytest.raises(Refused, match="the next step is 2"):
            ask(trainer, messages.SampleBatch(step=4, prompts=1, samples=1, reference="i", wait_seconds=0.0))
        # v0 is announced: 2 for each of 2 steps, and 16.
        with pytest.raises(Refused, match="v20 is the newest"):
            ask(publisher, messages.AnnounceSnapshot(weights=reference(21, 2), bytes=1))
        ask(publisher, messages.AnnounceSnapshot(weights=reference(20, 2), bytes=1))
        # One that says hello is the only one that works on the run.
        ask(trainer, messages.Hello(host="node0", pid=1))
        with pytest.raises(Refused, match="a trainer on node0 works on this run"):
            ask(publisher, messages.AnnounceSnapshot(weights=reference(21, 2), bytes=1))


def test_a_put_under_a_known_number_with_another_response_is_refused(harness, trajectory):
    buffer = harness(fill=(1, 0))
    buffer.put([trajectory(tokens=[1, 2])], first_sequence=0, sender="new.1")
    assert buffer.put([trajectory(tokens=[1, 2])], first_sequence=0, sender="new.1").duplicates == 1
    with pytest.raises(Refused, match="trajectory 0 of new.1, which is stored with another") as refused:
        buffer.put([trajectory(tokens=[1, 3])], first_sequence=0, sender="new.1")
    assert refused.value.code == "sequence_taken"


def test_log_probabilities_of_trajectories_that_do_not_exist_are_refused(harness):
    buffer = harness(fill=(1, 4))
    batch = buffer.sample(0, 1, 2).message
    known = batch.trajectory_ids
    with pytest.raises(Refused, match="trajectory 999, which does not exist"):
        buffer.report(0, [known[0], 999], [-1.0, -1.0])
    buffer.report(0, sorted(set(known)), [-1.0] * len(set(known)))


ROWS = "has numbers of {} row.*, and its batch 2 slots: report one row"
RATIOS = "log-ratios of {} bytes for the 2 response tokens of slot 1: report 2 bytes for each"
REPORTS = [
    *((numbers_of(rows), ROWS.format(rows)) for rows in (1, 3)),
    *(
        (numbers_of(2, token_log_ratios=log_ratios([0.5, 1.0], [0.5] * tokens)), RATIOS.format(2 * tokens))
        for tokens in (0, 1, 3)
    ),
]


@pytest.mark.parametrize(("rows", "sentence"), REPORTS)
def test_a_report_with_numbers_of_other_rows_or_tokens_is_refused_and_changes_nothing(harness, rows, sentence):
    buffer = harness(fill=(1, 4))
    buffer.sample(0, 1, 2)
    with pytest.raises(Refused, match=sentence) as refused:
        buffer.report(0, rows=rows)
    assert refused.value.code == "row_numbers"
    assert buffer.store.database.all("SELECT trained_at FROM batches") == [(None,)]
    stored = "SELECT DISTINCT skipped, token_log_ratios FROM consumption_rows"
    assert buffer.store.database.all(stored) == [(None, None)]


def test_the_numbers_of_a_report_are_stored_slot_by_slot_and_those_of_a_repeated_one_replace_them(harness):
    buffer = harness(fill=(1, 4))
    buffer.sample(0, 1, 2)
    database, written = buffer.store.database, []

    def stored(columns: str) -> list[tuple]:
        written.append(database.written)
        return database.all(f"SELECT {columns} FROM consumption ORDER BY slot")

    numbers = "logprob, log_ratio, advantage, weight, mismatch, skipped"
    buffer.report(0)
    assert stored(numbers) == [(None,) * 6] * 2
    buffer.report(0, rows=numbers_of(2))
    assert stored(numbers) == [(*[None] * 5, 1), (-2.5, 0.125, -0.75, 1.0, 0.01, 0)]
    buffer.report(0, rows=numbers_of(2, advantage=[1e308, -1e308], token_log_ratios=log_ratios(None, [0.5, -65504])))
    assert stored("advantage") == [(1e308,), (-1e308,)]
    ratios = database.all("SELECT token_log_ratios FROM consumption_rows ORDER BY slot")
    assert read_log_ratios([blob for (blob,) in ratios]) == [None, [0.5, -65504]]
    # A report without numbers, of an older trainer, keeps them.
    buffer.report(0)
    assert stored("advantage") == [(1e308,), (-1e308,)]
    # Blobs count towards the log.
    assert written[2] - written[1] == written[1] - written[0] + 4


def test_a_crowd_of_names_is_refused_and_those_at_work_are_not(harness, monkeypatch):
    monkeypatch.setattr(fields, "MAX_CLIENTS", 30)
    buffer = harness()
    buffer.register(2)
    for n in range(fields.MAX_CLIENTS):
        buffer.lease(1, sender=f"s{n}.1")
    with pytest.raises(Refused, match="30 clients"):
        buffer.ask(BEAT, sender="late.1")
    buffer.ask(BEAT, sender="s0.1")
    assert len(buffer.ask(GetStatus(), role="monitor", sender="m.1").message.clients) == fields.MAX_CLIENTS
    buffer.clock.advance(buffer.config.buffer.lease_seconds + 1)
    buffer.ask(BEAT, sender="late.1")


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
    buffer.ask(BEAT, sender="idle0.1")


def fleet(searchers: int, patience: float) -> tuple[Clients, ManualClock]:
    clock = ManualClock()
    clients = Clients(clock, patience)
    for n in range(searchers):
        clients.mark_seen(f"search{n}.1", "searcher")
    return clients, clock


@pytest.mark.slow
@pytest.mark.parametrize(("searchers", "patience", "seconds"), [(8, 60, 1), (600, 60, 2), (2000, 60, 3), (2000, 4, 1)])
def test_a_large_fleet_sends_heartbeats_less_often_but_never_as_late_as_its_leases_expire(searchers, patience, seconds):
    clients, clock = fleet(searchers, patience)
    assert clients.heartbeat_seconds == seconds
    clock.advance(patience + 1)
    assert clients.heartbeat_seconds == 1


@pytest.mark.parametrize(("searchers", "patience"), [(100, 3.0), (905, 9.0)])
def test_a_live_process_of_a_name_that_starts_again_keeps_its_leases_between_two_heartbeats(searchers, patience):
    clients, clock = fleet(searchers, 60)
    clients.mark_seen("search0.2", "searcher")
    clients.replace_earlier("search0.2")
    assert patience >= 3 * clients.heartbeat_seconds
    clock.advance(patience)
    assert not clients.is_silent("search0.1")
    clock.advance(0.1)
    assert clients.is_silent("search0.1")


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
