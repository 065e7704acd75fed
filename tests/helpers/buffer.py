"""A buffer on a real database, with or without a socket, and statements on a database file."""

import sqlite3
import tempfile
import threading
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

from tba.buffer.server.writer import BufferServer
from tba.buffer.service.put_columns import to_columns
from tba.buffer.service.service import BufferService
from tba.buffer.store.store import Store
from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.wire import messages
from tba.common.wire.channels import ServerChannel
from tba.common.wire.codec import decode_request, encode_request
from tba.common.wire.keys import ServerKeys
from tba.common.wire.trajectory import RowNumbers, Trajectory
from tba.tests.helpers.clock import ManualClock
from tba.tests.helpers.index import kept_ids
from tba.tests.helpers.puts import make_trajectory, put_message, reference


def ask(path: Path, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    """Return the rows of a query of a database file, which a server may be writing to."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as connection:
        return connection.execute(sql, values).fetchall()


def steps_trained(path: Path) -> int:
    """Return the number of trained steps, 0 as long as there is no database."""
    try:
        return int(ask(path, "SELECT COUNT(trained_at) FROM batches")[0][0])
    except sqlite3.OperationalError:
        return 0


def change(path: Path, *statements: str | tuple[str, list[Any]]) -> None:
    """Run statements, or pairs of a statement and its values, on a database file and commit them."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for one in statements:
            if isinstance(one, str):
                connection.executescript(one)
            else:
                connection.execute(*one)


def new_database(path: Path) -> Path:
    """Copy an empty database to `path`, unless there is a file. Returns `path`."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_empty())
    return path


@cache
def _empty() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "buffer.sqlite")
        Store(path, durability="process").close()
        return path.read_bytes()


class ServiceHarness:
    """A buffer service on a real database, driven without sockets."""

    def __init__(self, path: Path, config: Config) -> None:
        self.clock = ManualClock()
        self.config = config
        self.store = Store(new_database(path), durability="process")
        self.run = self.store.open_run("test", seed=config.run.seed, config={}, software={})
        self.service = BufferService(self.store, self.run, config, self.clock)

    def ask(
        self, message: messages.Message, frames: list[bytes] | None = None, sender: str = "s.1", role: Any = "searcher"
    ):
        """Handle one request in its own transaction. Returns None if it is parked."""
        sent = encode_request(message, id=1, role=role, sender=sender, run=self.run.uuid, frames=frames or [])
        request = decode_request([memoryview(frame) for frame in sent])
        self.service.state.clients.mark_seen(sender, role)
        with self.service.transaction():
            return self.service.handle(request.header, to_columns(request))

    def register(self, count: int) -> None:
        """Register prompts p0, p1, ..."""
        keys = [f"p{n}" for n in range(count)]
        self.ask(messages.RegisterPrompts(task="t", fingerprint="0" * 64, total=count, offset=0, keys=keys))

    def announce(self, version: int, step: int) -> None:
        """Announce a snapshot."""
        self.ask(messages.AnnounceSnapshot(weights=reference(version, step), bytes=1), role="publisher", sender="pub.1")

    def lease(self, want: int, held: list[int] | None = None, version: int = 0, sender: str = "s.1"):
        """Ask for leases. Returns None if the request is parked."""
        message = messages.LeasePrompts(want=want, held=held or [], weights_version=version, wait_seconds=0.0)
        answer = self.ask(message, sender=sender)
        return None if answer is None else answer.message

    def put(self, trajectories: list[Trajectory], first_sequence: int, sender: str = "s.1", *, closes: bool = True):
        """Put trajectories."""
        message, frames = put_message(trajectories, first_sequence, closes=closes)
        return self.ask(message, frames, sender=sender).message

    def sample(self, step: int, prompts: int, samples: int):
        """Ask for the batch of a step. Returns None if the request is parked."""
        message = messages.SampleBatch(
            step=step, prompts=prompts, samples=samples, reference="initial", wait_seconds=0.0
        )
        return self.ask(message, role="trainer", sender="t.1")

    def report(
        self,
        step: int,
        ids: list[int] | None = None,
        logprobs: list[float] | None = None,
        rows: RowNumbers | None = None,
    ) -> None:
        """Report a step as trained."""
        message = messages.ReportStep(
            step=step,
            metrics={},
            reference="initial",
            trajectory_ids=ids or [],
            reference_logprobs=logprobs or [],
            rows=rows,
        )
        self.ask(message, role="trainer", sender="t.1")

    def sampleable(self) -> list[int]:
        """Return the ids of the trajectories that can be sampled."""
        return kept_ids(self.service.state.index)

    def fill(self, prompts: int, samples: int, version: int = 0) -> None:
        """Register prompts, and put a group of different responses to each."""
        self.register(prompts)
        if version not in self.service.state.versions:
            self.announce(version, version)
        for n in range(prompts if samples else 0):
            group = [make_trajectory(f"p{n}", lease=0, version=version, tokens=[n, k]) for k in range(samples)]
            self.put(group, first_sequence=version * 10_000 + n * samples)


class BufferThread:
    """A buffer server with a real database and a real socket. It can be stopped and started on the same address."""

    def __init__(self, config: Config, *, address: str = "tcp://127.0.0.1:*", keys: ServerKeys | None = None) -> None:
        self.config = config
        self.keys = keys
        self.address = address
        self.start()

    def start(self) -> None:
        """Start serving the existing database."""
        self._stopped = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        assert self._ready.wait(60)

    def stop(self) -> None:
        """Stop serving and close the database."""
        self._stopped.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        store = Store(new_database(self.config.database), durability="process")
        run = store.open_run(self.config.run.name, seed=0, config={}, software={})
        channel = ServerChannel(self.address, keys=self.keys)
        self.address = channel.address
        service = BufferService(store, run, self.config, SystemClock())
        server = BufferServer(channel, service, queue_bytes=1 << 28)
        self._ready.set()
        # A test that could not be set up may leave it running. Without the second condition, the process would not end.
        server.run(lambda: self._stopped.is_set() or not threading.main_thread().is_alive())
        channel.close()
        store.close()
