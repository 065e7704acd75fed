"""A trainer that was cut off and replaced: when it is back, nothing that it says counts."""

import time

import pytest
import torch

from tba.buffer.server import BufferServer
from tba.buffer.service import BufferService
from tba.common import wire
from tba.common.channels import ServerChannel
from tba.common.config import Config
from tba.common.errors import EXIT_CONFIG, Refused
from tba.trainer import connection
from tba.trainer.connection import Connection
from tba.trainer.loop import Trainer

from .tb_lab import BufferThread, save_tiny_model

HELLO = wire.Hello(host="node7", pid=1, software="x")
HEARTBEAT = wire.Heartbeat(activity="training", reason="", weights_version=None, metrics={})
WEIGHTS = wire.WeightsRef(version=1, step=2, path="/v1", manifest_sha256="0" * 64)
REQUESTS = [
    HEARTBEAT,
    wire.SampleBatch(step=0, prompts=1, samples=2, reference="initial", wait_seconds=0.0),
    wire.ReportStep(step=0, metrics={}, reference="initial", trajectory_ids=[], reference_logprobs=[]),
    wire.AnnounceSnapshot(weights=WEIGHTS, bytes=1),
    wire.FinishRun(step=3),
    HELLO,
]


@pytest.fixture
def replaced(harness):
    """A buffer whose trainer t.1 fell silent, and was followed by t.2."""
    buffer = harness()
    buffer.announce(0, 0)
    buffer.ask(HELLO, role="trainer", sender="t.1")
    buffer.clock.advance(11)
    buffer.ask(HELLO, role="trainer", sender="t.2")
    return buffer


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda message: message.TYPE)
def test_nothing_that_a_replaced_trainer_says_is_heard(replaced, request_):
    with pytest.raises(Refused, match="a trainer on node7 took over run test") as refused:
        replaced.ask(request_, role="trainer", sender="t.1")
    assert refused.value.exit_code == EXIT_CONFIG
    assert not replaced.service.state().finished
    assert replaced.service.state().weights.version == 0


def test_nor_long_after_the_buffer_has_forgotten_when_it_was_there(replaced):
    replaced.clock.advance(100_000)
    replaced.service.expire_leases()
    with pytest.raises(Refused, match="took over"):
        replaced.ask(HEARTBEAT, role="trainer", sender="t.1")


def test_nor_one_that_was_gone_for_longer_than_the_buffer_remembers(harness):
    buffer = harness()
    buffer.ask(HELLO, role="trainer", sender="t.1")
    buffer.clock.advance(100_000)
    buffer.service.expire_leases()
    buffer.ask(HELLO, role="trainer", sender="t.2")
    with pytest.raises(Refused, match="took over"):
        buffer.ask(HEARTBEAT, role="trainer", sender="t.1")


def test_a_buffer_that_was_started_again_knows_its_trainer(replaced):
    replaced.service = BufferService(replaced.store, replaced.run, replaced.config, replaced.clock)
    with pytest.raises(Refused, match="took over"):
        replaced.ask(HEARTBEAT, role="trainer", sender="t.1")
    replaced.ask(wire.AnnounceSnapshot(weights=WEIGHTS, bytes=1), role="publisher", sender="t.2")
    replaced.ask(HEARTBEAT, role="trainer", sender="t.2")
    assert replaced.service.status().clients[-1].role == "trainer", "and not the publisher that was heard first"
    with pytest.raises(Refused, match="is at work on run test"):
        replaced.ask(HELLO, role="trainer", sender="t.3")


def test_a_buffer_that_was_started_again_gives_its_trainer_time_to_be_heard(harness):
    buffer = harness()
    buffer.ask(HELLO, role="trainer", sender="t.1")
    buffer.service = BufferService(buffer.store, buffer.run, buffer.config, buffer.clock)
    with pytest.raises(Refused, match="a trainer on node7 is at work"):
        buffer.ask(HELLO, role="trainer", sender="t.2")
    buffer.clock.advance(6)
    buffer.ask(HELLO, role="trainer", sender="t.2")


def test_that_time_begins_when_the_server_can_be_reached(harness):
    buffer = harness()
    buffer.ask(HELLO, role="trainer", sender="t.1")
    buffer.service = BufferService(buffer.store, buffer.run, buffer.config, buffer.clock)
    buffer.clock.advance(6)  # as a large index takes
    channel = ServerChannel("tcp://127.0.0.1:*")
    BufferServer(channel, buffer.store, buffer.service, buffer.clock, queue_bytes=1 << 20).run(lambda: True)
    channel.close()
    with pytest.raises(Refused, match="a trainer on node7 is at work"):
        buffer.ask(HELLO, role="trainer", sender="t.2")


def test_a_trainer_that_waits_for_the_earlier_one_says_so_once(harness, monkeypatch):
    buffer, said = harness(), []
    buffer.ask(HELLO, role="trainer", sender="t.1")
    monkeypatch.setattr(time, "sleep", lambda _: buffer.clock.advance(5))

    class Direct:
        """A client without a network between."""

        def ask(self, message, expect, stop):
            return buffer.ask(message, role="trainer", sender="t.2").message, []

    monkeypatch.setattr(connection.log, "info", lambda event, **_: said.append(event))
    Connection(lambda role, name: Direct(), lambda: False, buffer.clock).hello()
    assert said == ["waiting, in case the earlier trainer has died"]


def test_a_replaced_one_that_knocks_keeps_nobody_away(replaced):
    replaced.clock.advance(11)
    with pytest.raises(Refused, match="took over"):
        replaced.ask(HEARTBEAT, role="trainer", sender="t.1")
    replaced.ask(HELLO, role="trainer", sender="t.3")


def test_a_trainer_whose_publisher_is_heard_is_at_work(replaced):
    replaced.service = BufferService(replaced.store, replaced.run, replaced.config, replaced.clock)
    replaced.ask(wire.AnnounceSnapshot(weights=WEIGHTS, bytes=1), role="publisher", sender="t.2")
    with pytest.raises(Refused, match="is at work"):
        replaced.ask(HELLO, role="trainer", sender="t.3")


def test_the_one_that_took_over_is(replaced):
    replaced.ask(HEARTBEAT, role="trainer", sender="t.2")
    replaced.ask(wire.AnnounceSnapshot(weights=WEIGHTS, bytes=1), role="publisher", sender="t.2")
    assert replaced.service.state().weights == WEIGHTS


def test_a_trainer_that_is_only_refused_takes_nothing_over(harness):
    buffer = harness()
    buffer.ask(HELLO, role="trainer", sender="t.1")
    with pytest.raises(Refused, match="is at work"):
        buffer.ask(HELLO, role="trainer", sender="t.2")
    buffer.ask(HEARTBEAT, role="trainer", sender="t.1")


@pytest.fixture
def make_trainer(tmp_path):
    """Trainers of one run, each in a directory of its own, with their buffer."""
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


def test_its_publisher_is_not_heard_either_and_its_versions_are_free(make_trainer, monkeypatch):
    cut_off = make_trainer("a")
    cut_off.publish()
    assert cut_off._publisher.flush(20)
    monkeypatch.setattr("tba.buffer.clients._TRAINER_SECONDS", 0.0)  # it has been silent for long enough
    successor = make_trainer("b")
    cut_off.publish()
    with pytest.raises(Refused, match="took over run test"):
        cut_off._publisher.flush(20)
    with pytest.raises(Refused, match="took over run test"):
        cut_off.sample()
    successor.publish()
    assert successor._publisher.flush(20)
    assert successor._life.weights_version == 1


def test_a_heartbeat_that_is_handled_after_the_goodbye_brings_no_trainer_back_and_a_hello_does(harness):
    buffer = harness()
    buffer.ask(HELLO, role="trainer", sender="t.1")
    buffer.ask(HEARTBEAT, role="trainer", sender="t.1")
    buffer.ask(wire.Goodbye(), role="trainer", sender="t.1")
    buffer.ask(HEARTBEAT, role="trainer", sender="t.1")
    assert [client.activity for client in buffer.service.status().clients] == ["gone"]
    buffer.ask(HELLO, role="trainer", sender="t.1")
    assert [client.activity for client in buffer.service.status().clients] == ["connected"]
    with pytest.raises(Refused, match="is at work"):
        buffer.ask(HELLO, role="trainer", sender="t.2")
    buffer.ask(wire.Goodbye(), role="trainer", sender="t.1")
    buffer.ask(HEARTBEAT, role="trainer", sender="t.1")
    buffer.ask(HELLO, role="trainer", sender="t.2")
