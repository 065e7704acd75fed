"""The destination of an import: the server that has the database open, or else a service in this process."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from tba.buffer.service.put_columns import to_columns
from tba.buffer.service.service import BufferService
from tba.buffer.store.starts import IMPORT, record_of, refuse_other_runs
from tba.buffer.store.store import Store
from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.errors import BufferUnavailable, LockTaken
from tba.common.run_identity import refuse_other_server
from tba.common.system.process import software
from tba.common.wire import fields, messages
from tba.common.wire.client import BufferClient, make_hello
from tba.common.wire.codec import decode_request, encode_request
from tba.common.wire.keys import buffer_client_keys
from tba.common.wire.messages import GetStatus, Status

_REPLY_SECONDS = 60.0
_POLL_SECONDS = 0.2
_ROLE: fields.Role = "importer"


class ImportTarget(ABC):
    """A run that accepts trajectories. `run` is its uuid."""

    run: str
    _sender = ""

    def put(self, sender: str, message: messages.PutTrajectories, frames: list[bytes]) -> messages.PutAck:
        """Commit a put. Raises Refused, BufferUnavailable, WireError or StorageError."""
        if self._sender != sender:
            self._sender = sender
            self.ask(make_hello())
        reply = self.ask(message, frames)
        assert isinstance(reply, messages.PutAck)
        return reply

    @abstractmethod
    def ask(self, message: messages.Message, frames: Sequence[bytes] = ()) -> messages.Message:
        """Return the reply to a request of the sender, or of no one in particular before the first put."""


@contextlib.contextmanager
def open_target(config: Config, *, named: bool = True) -> Iterator[ImportTarget]:
    """Open the configured run for an import. It must be `named` if the database holds other runs.

    Raises ConfigError, also for the record of an offline run, StorageError, or BufferFault if a server does not reply.
    """
    refuse_other_runs(config, alone=not named)
    try:
        store = Store(config.database, durability=config.buffer.durability)
    except LockTaken:
        keys = buffer_client_keys(config.security.keys, config.address)
        with contextlib.closing(BufferClient(config.address, role=_ROLE, name="import", keys=keys)) as client:
            yield ServerTarget(client, config)
    else:
        with contextlib.closing(store):
            yield LocalTarget(store, config)


class LocalTarget(ImportTarget):
    """A buffer service in this process, on a database that no server has open."""

    def __init__(self, store: Store, config: Config) -> None:
        settings = {**record_of(config), IMPORT: True}
        run = store.open_run(config.run.name, seed=config.run.seed, config=settings, software=software())
        self.run = run.uuid
        self._service = BufferService(store, run, config, SystemClock())

    def ask(self, message: messages.Message, frames: Sequence[bytes] = ()) -> messages.Message:
        encoded = encode_request(message, id=1, role=_ROLE, sender=self._sender or _ROLE, run=self.run, frames=frames)
        # Encoded and decoded, so that a put passes the same checks as one over the network.
        request = decode_request([memoryview(frame) for frame in encoded])
        reply = self._service.handle_durably(request.header, to_columns(request))
        assert reply is not None
        return reply.message


class ServerTarget(ImportTarget):
    """The server of the run, over its socket. Raises ConfigError if it serves another run."""

    def __init__(self, client: BufferClient, config: Config) -> None:
        self._client = client
        status = self.ask(GetStatus())
        assert isinstance(status, Status)
        refuse_other_server(client.address, status.run_name, config.run.name)
        self.run = client.run

    def ask(self, message: messages.Message, frames: Sequence[bytes] = ()) -> messages.Message:
        self._client.sender = self._sender or self._client.sender
        try:
            return self._client.call(message, messages.Message, frames=frames, deadline_seconds=_REPLY_SECONDS)[0]
        except BufferUnavailable:
            why = self._client.trouble or "another process has the database open, and no server replies at this address"
            raise BufferUnavailable(f"the buffer at {self._client.address}: {why}") from None
