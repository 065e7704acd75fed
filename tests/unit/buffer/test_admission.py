"""Clients that send what their role may not, or in another's name, over real sockets."""

import logging
from contextlib import closing

import pytest

from tba.common.config import Config
from tba.common.errors import Refused
from tba.common.wire import messages
from tba.common.wire.client import BufferClient
from tba.common.wire.fields import Role
from tba.common.wire.messages import GetStatus, Status
from tba.tests.helpers.buffer import BufferThread
from tba.tests.helpers.puts import connected, make_trajectory, prepare, put_message, reference

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
    with connected(buffer.address, "searcher", "victim") as victim:
        prepare(victim)
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


def test_a_monitor_does_not_keep_a_searcher_from_its_name(buffer):
    with connected(buffer.address, "monitor") as monitor, connected(buffer.address, "searcher") as searcher:
        searcher.sender = monitor.sender
        ask(monitor, BEAT)
        prepare(searcher)
        with pytest.raises(Refused, match="is another client, a searcher"):
            ask(monitor, BEAT)


def test_only_the_trainer_that_said_hello_works_on_a_run(buffer):
    with connected(buffer.address, "trainer", "real") as real, connected(buffer.address, "publisher") as thief:
        ask(real, messages.Hello(host="node0", pid=1))
        with pytest.raises(Refused, match="a trainer on node0 works on this run"):
            ask(thief, messages.AnnounceSnapshot(weights=reference(0, 0), bytes=1))


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
