"""The trainer's heartbeat survives errors of its connection."""

import errno
from typing import Any

import pytest

from tba.common.config import Config
from tba.common.wire.client import BufferClient
from tba.common.wire.messages import GetStatus, Status
from tba.tests.helpers.buffer import BufferThread
from tba.tests.helpers.checks import wait_until
from tba.trainer import buffer_link
from tba.trainer.buffer_link import HeartbeatThread, network

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
