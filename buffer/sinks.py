"""Where an import goes: to the server that has the database, or, if there is none, to a service in this process."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator

import tba
from tba.buffer.importing import Sink
from tba.buffer.origin import of_import, refuse_offline_record
from tba.buffer.rows import service_message
from tba.buffer.run import software
from tba.buffer.service import BufferService
from tba.buffer.store import Store
from tba.common import wire
from tba.common.client import BufferClient
from tba.common.clock import SystemClock
from tba.common.codec import decode_request, encode_request
from tba.common.config import Config
from tba.common.errors import BufferUnavailable, ConfigError, LockTaken, Refused

_ANSWER_SECONDS = 60.0
_POLL_SECONDS = 0.2
ROLE: wire.Role = "importer"


@contextlib.contextmanager
def open_sink(config: Config) -> Iterator[Sink]:
    """A way into the configured run.

    Raises ConfigError, also for the record of an offline run; StorageError; BufferFault if a server does not answer.
    """
    refuse_offline_record(config.database)
    try:
        store = Store(config.database, durability=config.buffer.durability)
    except LockTaken:
        client = BufferClient(config.buffer.address, role=ROLE, name="import")
        try:
            yield ServerSink(client, config)
        finally:
            client.close()
    else:
        try:
            yield LocalSink(store, config)
        finally:
            store.close()


class LocalSink:
    """A buffer service of our own, on a database that no server has."""

    def __init__(self, store: Store, config: Config) -> None:
        settings = of_import(config.model_dump(mode="json"))
        run = store.open_run(config.run.name, seed=config.run.seed, config=settings, software=software())
        self.run = run.uuid
        self._store = store
        self._service = BufferService(store, run, config, SystemClock())
        self._greeted: set[str] = set()

    def put(self, sender: str, message: wire.PutTrajectories, frames: list[bytes]) -> wire.PutAck:
        """Commit a put. Raises Refused, WireError or StorageError."""
        if sender not in self._greeted:
            self._ask(sender, hello(), [])
            self._greeted.add(sender)
        answer = self._ask(sender, message, frames)
        assert isinstance(answer, wire.PutAck)
        return answer

    def _ask(self, sender: str, message: wire.Message, frames: list[bytes]) -> wire.Message:
        encoded = encode_request(message, id=1, role=ROLE, sender=sender, run=self.run, frames=frames)
        request = decode_request([memoryview(frame) for frame in encoded])
        asked = service_message(request)
        self._service.hear(request.header)
        with self._store.transaction():
            answer = self._service.handle(request.header, asked)
        self._store.log.sync()
        self._store.log.copy(unless_short=True)  # then all of it: nobody else writes
        assert answer is not None
        return answer.message


class ServerSink:
    """The server of the run, over its socket. Raises ConfigError if it serves another run."""

    def __init__(self, client: BufferClient, config: Config) -> None:
        self._client = client
        status = self._ask(wire.GetStatus(), [])
        if isinstance(status, wire.Status) and status.run_name != config.run.name:
            raise ConfigError(
                f"the server at {client.address} serves run {status.run_name} and not {config.run.name}: set run.name "
                "and buffer.address to those of one run"
            )
        self.run = client.run

    def put(self, sender: str, message: wire.PutTrajectories, frames: list[bytes]) -> wire.PutAck:
        """Send a put and wait for its commit. Raises Refused or BufferUnavailable."""
        if self._client.sender != sender:
            self._client.sender = sender
            self._ask(hello(), [])
        answer = self._ask(message, frames)
        assert isinstance(answer, wire.PutAck)
        return answer

    def _ask(self, message: wire.Message, frames: list[bytes]) -> wire.Message:
        wanted = self._client.post(message, frames)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline:
            for reply in self._client.poll(_POLL_SECONDS):
                if reply.header.id != wanted:
                    continue
                if isinstance(reply.message, wire.Failure):
                    raise Refused(reply.message.code, reply.message.message)
                return reply.message
        why = self._client.trouble or "another process has the database open, and nothing answers at this address"
        raise BufferUnavailable(f"the buffer at {self._client.address}: {why}")


def hello() -> wire.Hello:
    """How an importer says who it is."""
    return wire.Hello(host=socket.gethostname(), pid=os.getpid(), software=f"tba {tba.__version__}")
