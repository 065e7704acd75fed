"""Takeover of a run by another trainer, whose predecessor is refused; and a heartbeat that survives errors."""

import errno
import time
from typing import Any

import pytest
import torch

from tba.buffer.server.writer import BufferServer
from tba.buffer.service.service import BufferService
from tba.common.config import Config
from tba.common.errors import EXIT_CONFIG, Refused
from tba.common.wire import messages
from tba.common.wire.channels import ServerChannel
from tba.common.wire.client import BufferClient
from tba.common.wire.messages import GetStatus, Status
from tba.tests.helpers.buffer import BufferThread
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.trainer import save_tiny_model
from tba.trainer import buffer_link
from tba.trainer.buffer_link import HeartbeatThread, hello, network
from tba.trainer.loop import Trainer

HELLO = messages.Hello(host="node7", pid=1)
HEARTBEAT = messages.Heartbeat(activity="training", reason="", weights_version=None, metrics={})
WEIGHTS = messages.WeightsRef(version=1, step=2, path="/v1", manifest_sha256="0" * 64)
REQUESTS = [
    HEARTBEAT,
    messages.SampleBatch(step=0, prompts=1, samples=2, reference="initial", wait_seconds=0.0),
    messages.ReportStep(step=0, metrics={}, reference="initial", trajectory_ids=[], reference_logprobs=[]),
    messages.AnnounceSnapshot(weights=WEIGHTS, bytes=1),
    messages.FinishRun(step=3),
    HELLO,
]


@pytest.fixture
def replaced(harness):
    """A buffer whose trainer t.1 fell silent and was replaced by t.2."""
    buffer = harness()
    buffer.announce(0, 0)
    buffer.ask(HELLO, role="trainer", sender="t.1")
    buffer.clock.advance(11)
    buffer.ask(HELLO, role="trainer", sender="t.2")
    return buffer


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda message: message.TYPE)
def test_every_request_of_a_replaced_trainer_is_refused(replaced, request_):
    with pytest.raises(Refused, match="a trainer on node7 took over run test") as refused:
        replaced.ask(request_, role="trainer", sender="t.1")
    assert refused.value.exit_code == EXIT_CONFIG
    assert not replaced.service.state.for_replies().finished
    assert replaced.service.state.for_replies().weights.version == 0


@pytest.mark.parametrize("expires", ["before its successor", "after it"])
def test_a_replaced_trainer_is_refused_when_its_entry_has_expired(harness, expires):
    buffer = harness()
    buffer.ask(HELLO, role="trainer", sender="t.1")
    buffer.clock.advance(100_000 if expires == "before its successor" else 11)
    buffer.service.expire_leases()
    buffer.ask(HELLO, role="trainer", sender="t.2")
    buffer.clock.advance(100_000)
    buffer.service.expire_leases()
    with pytest.raises(Refused, match="took over"):
        buffer.ask(HEARTBEAT, role="trainer", sender="t.1")


def test_a_restarted_buffer_knows_its_trainer(replaced):
    replaced.service = BufferService(replaced.store, replaced.run, replaced.config, replaced.clock)
    with pytest.raises(Refused, match="took over"):
        replaced.ask(HEARTBEAT, role="trainer", sender="t.1")
    replaced.ask(messages.AnnounceSnapshot(weights=WEIGHTS, bytes=1), role="publisher", sender="t.2")
    replaced.ask(HEARTBEAT, role="trainer", sender="t.2")
    assert replaced.service.status().clients[-1].role == "trainer", "not the publisher, which connected first"
    with pytest.raises(Refused, match="is at work on run test"):
        replaced.ask(HELLO, role="trainer", sender="t.3")


def test_a_restarted_buffer_waits_for_its_trainer_before_it_accepts_another(harness):
    buffer = harness()
    buffer.ask(HELLO, role="trainer", sender="t.1")
    buffer.service = BufferService(buffer.store, buffer.run, buffer.config, buffer.clock)
    with pytest.raises(Refused, match="a trainer on node7 is at work"):
        buffer.ask(HELLO, role="trainer", sender="t.2")
    buffer.clock.advance(6)
    buffer.ask(HELLO, role="trainer", sender="t.2")


def test_the_wait_of_a_restarted_buffer_begins_when_its_server_can_be_reached(harness):
    buffer = harness()
    buffer.ask(HELLO, role="trainer", sender="t.1")
    buffer.service = BufferService(buffer.store, buffer.run, buffer.config, buffer.clock)
    # Loading a large index may take as long.
    buffer.clock.advance(6)
    channel = ServerChannel("tcp://127.0.0.1:*")
    BufferServer(channel, buffer.service, queue_bytes=1 << 20).run(lambda: True)
    channel.close()
    with pytest.raises(Refused, match="a trainer on node7 is at work"):
        buffer.ask(HELLO, role="trainer", sender="t.2")


@pytest.mark.parametrize("reply_seconds", [0.0, 4.4])
def test_a_trainer_waits_until_another_one_is_dead_however_slow_the_replies_and_logs_it_once(
    reply_seconds, harness, monkeypatch
):
    buffer, logged = harness(), []
    buffer.ask(HELLO, role="trainer", sender="t.1")
    monkeypatch.setattr(time, "sleep", lambda _: buffer.clock.advance(5))

    class Direct:
        """A client without a network."""

        def call(self, message, expect, *, stop):
            try:
                return buffer.ask(message, role="trainer", sender="t.2").message, []
            finally:
                buffer.clock.advance(reply_seconds)

    monkeypatch.setattr(buffer_link.log, "info", lambda event, **_: logged.append(event))
    direct: Any = Direct()
    hello(direct, "test", lambda: False, buffer.clock)
    assert logged == ["waiting, in case the earlier trainer has died"]


def test_requests_of_a_replaced_trainer_do_not_keep_others_from_taking_over(replaced):
    replaced.clock.advance(11)
    with pytest.raises(Refused, match="took over"):
        replaced.ask(HEARTBEAT, role="trainer", sender="t.1")
    replaced.ask(HELLO, role="trainer", sender="t.3")


def test_a_trainer_that_was_refused_has_not_taken_over(harness):
    buffer = harness()
    buffer.ask(HELLO, role="trainer", sender="t.1")
    with pytest.raises(Refused, match="is at work"):
        buffer.ask(HELLO, role="trainer", sender="t.2")
    buffer.ask(HEARTBEAT, role="trainer", sender="t.1")


@pytest.fixture
def make_trainer(tmp_path):
    """Create trainers of one run, each with its own directory, and their buffer."""
    model = save_tiny_model(tmp_path / "model")
    keys = {"model": {"path": str(model), "dtype": "float32"}, "train": {"prompts_per_step": 1}}
    run = {"dir": str(tmp_path / "buffer"), "name": "test"}
    buffer = BufferThread(Config.model_validate({**keys, "run": run}))
    trainers = []

    def make(name: str) -> Trainer:
        sections = {**keys, "run": run | {"dir": str(tmp_path / name)}, "buffer": {"address": buffer.address}}
        trainers.append(Trainer(Config.model_validate(sections), None, torch.device("cpu"), lambda: False))
        trainers[-1].connect()
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.close()
    buffer.stop()


def test_the_publisher_of_a_replaced_trainer_is_refused_and_its_versions_are_free(make_trainer, monkeypatch):
    cut_off = make_trainer("a")
    cut_off.publish()
    assert cut_off._publisher.flush(60)
    # The first trainer counts as silent for long enough.
    monkeypatch.setattr("tba.buffer.service.clients.SILENT_SECONDS", 0.0)
    successor = make_trainer("b")
    cut_off.publish()
    with pytest.raises(Refused, match="took over run test"):
        cut_off._publisher.flush(60)
    with pytest.raises(Refused, match="took over run test"):
        cut_off.sample()
    successor.publish()
    assert successor._publisher.flush(60)
    assert successor._heartbeat.shown.weights_version == 1


def test_the_warning_of_a_training_reaches_the_status_whatever_the_trainer_does(make_trainer, harness):
    trainer = make_trainer("a")
    trainer._health.warning = "stale responses have lost 1.2 nats"
    trainer._show(0, {"loss": 0.5, "seconds_step": 1.0})
    trainer._heartbeat.show("waiting", "32 prompts")
    shown = trainer._heartbeat.shown
    assert (shown.activity, shown.reason, shown.warning) == ("waiting", "32 prompts", trainer._health.warning)
    buffer = harness()
    buffer.ask(HELLO, role="trainer", sender="t.1")
    buffer.ask(shown, role="trainer", sender="t.1")
    clients = buffer.ask(GetStatus(), role="monitor", sender="m.1").message.clients
    assert [one.warning for one in clients if one.role == "trainer"] == [shown.warning]


def test_a_late_heartbeat_does_not_reconnect_a_trainer_that_left_and_a_hello_does(harness):
    buffer = harness()
    buffer.ask(HELLO, role="trainer", sender="t.1")
    buffer.ask(HEARTBEAT, role="trainer", sender="t.1")
    buffer.ask(messages.Goodbye(), role="trainer", sender="t.1")
    buffer.ask(HEARTBEAT, role="trainer", sender="t.1")
    assert [client.activity for client in buffer.service.status().clients] == ["gone"]
    buffer.ask(HELLO, role="trainer", sender="t.1")
    assert [client.activity for client in buffer.service.status().clients] == ["connected"]
    with pytest.raises(Refused, match="is at work"):
        buffer.ask(HELLO, role="trainer", sender="t.2")
    buffer.ask(messages.Goodbye(), role="trainer", sender="t.1")
    buffer.ask(HEARTBEAT, role="trainer", sender="t.1")
    buffer.ask(HELLO, role="trainer", sender="t.2")


TOO_MANY_FILES = OSError(errno.EMFILE, "Too many open files")
UNFORESEEN = [TOO_MANY_FILES, TOO_MANY_FILES, MemoryError()]


@pytest.fixture
def buffer(tmp_path):
    buffer = BufferThread(Config.model_validate({"run": {"dir": str(tmp_path), "name": "test"}}))
    yield buffer
    buffer.stop()


class FailingDial:
    """Real clients, whose first `call` fails as long as there are `failures`; `open` are those not closed."""

    def __init__(self, address: str, failures: list[Exception]) -> None:
        self._connect = network(address)
        self._failures = list(failures)
        self.open: set[Any] = set()

    def __call__(self, role, name):
        client: Any = self._connect(role, name)
        self.open.add(client)
        close = client.close
        client.close = lambda: (self.open.discard(client), close())
        if self._failures:
            client.call = self._fail
        return client

    def _fail(self, *_arguments, **_options):
        raise self._failures.pop(0)


def test_an_unexpected_error_does_not_end_the_heartbeat_and_is_logged_once_per_kind(buffer, monkeypatch, caplog):
    monkeypatch.setattr(buffer_link, "_PAUSE_SECONDS", 0.01)
    dial = FailingDial(buffer.address, UNFORESEEN)
    heartbeats = HeartbeatThread(dial)
    heartbeats.show("training", "a long step")
    heartbeats.start()
    monitor = BufferClient(buffer.address, role="monitor", name="m")

    def reasons() -> list[str]:
        status, _ = monitor.call(GetStatus(), Status, deadline_seconds=60)
        return [client.reason for client in status.clients if client.role == "trainer"]

    wait_until(lambda: reasons() == ["a long step"])
    monitor.close()
    heartbeats.close()
    logged = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert logged == [OSError, MemoryError]
    assert not dial.open, "every connection was closed"
