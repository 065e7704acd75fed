"""The trainer's sign of life goes on whatever happens to its connection."""

import errno

import pytest

from tba.common import wire
from tba.common.client import BufferClient
from tba.common.config import Config
from tba.trainer import sign_of_life
from tba.trainer.connection import network
from tba.trainer.sign_of_life import SignOfLife

from .tb_lab import BufferThread

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
        self.open: set[BufferClient] = set()

    def __call__(self, role, name):
        client = self._connect(role, name)
        self.open.add(client)
        close = client.close
        client.close = lambda: (self.open.discard(client), close())
        if self._failures:
            client.call = self._fail
        return client

    def _fail(self, *_arguments, **_options):
        raise self._failures.pop(0)


def test_what_is_no_error_of_ours_ends_no_sign_of_life_and_is_logged_once_per_kind(buffer, monkeypatch, caplog):
    monkeypatch.setattr(sign_of_life, "_PAUSE_SECONDS", 0.01)
    dial = FailingDial(buffer.address, UNFORESEEN)
    life = SignOfLife(dial)
    life.show("training", "a long step")
    life.start()
    monitor = BufferClient(buffer.address, role="monitor", name="m")
    for _ in range(100):
        status, _ = monitor.call(wire.GetStatus(), wire.Status, deadline_seconds=10)
        heard = [client.reason for client in status.clients if client.role == "trainer"]
        if heard == ["a long step"]:
            break
        monitor.poll(0.1)
    monitor.close()
    life.close()
    assert heard == ["a long step"]
    logged = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert logged == [OSError, MemoryError]
    assert not dial.open, "every connection was closed"
