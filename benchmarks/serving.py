"""A real buffer server process for benchmarks, with what a run needs registered in it."""

import contextlib
import socket
import subprocess
from pathlib import Path
from types import TracebackType

import psutil

from benchmarks.harness import tba
from tba.common.wire import fields, messages
from tba.common.wire.channels import new_pair
from tba.common.wire.client import BufferClient
from tba.common.wire.keys import AUTHORIZED, KEY_ROLES, ClientKeys, buffer_key, write_pair, write_public
from tba.common.wire.messages import GetStatus, Status

WEIGHTS = messages.WeightsRef(version=0, step=0, path="/none", manifest_sha256="0" * 64)
PATIENCE_SECONDS = 120.0


def free_address() -> str:
    """Return a TCP address on the loopback interface that nothing uses."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return f"tcp://127.0.0.1:{unused.getsockname()[1]}"


class Server:
    """The server of a run in `directory`, power-durable, over TCP. It runs from the creation to the end of a `with`.

    `settings` are added to its configuration. `keys` are those of clients that may do everything, None without
    encryption.
    """

    def __init__(self, directory: Path, *settings: str, encrypted: bool = False) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.address = directory, free_address()
        self.keys = make_keys(directory / "keys") if encrypted else None
        own = [f"run.dir={directory}", f"buffer.address={self.address}", "buffer.durability=power"]
        own += ["train.prompts_per_step=1", *([f"security.keys={directory / 'keys'}"] if encrypted else [])]
        command = tba("buffer", "serve", settings=[*own, *settings])
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE_SECONDS)

    def client(self, role: fields.Role) -> BufferClient:
        """Return a client that has said hello, when the server answers."""
        client = BufferClient(self.address, role=role, name="bench", keys=self.keys)
        client.call(messages.Hello(host="bench", pid=1), messages.Welcome, deadline_seconds=PATIENCE_SECONDS)
        return client

    def status(self) -> Status:
        """Wait until the server answers. Returns its status."""
        with contextlib.closing(BufferClient(self.address, role="monitor", name="bench", keys=self.keys)) as client:
            return client.call(GetStatus(), Status, deadline_seconds=PATIENCE_SECONDS)[0]

    def prepare(self, prompts: int) -> None:
        """Register `prompts` prompts, p0, p1 and so on, and announce the first weights."""
        searcher, publisher = self.client("searcher"), self.client("publisher")
        with contextlib.closing(searcher), contextlib.closing(publisher):
            for first in range(0, prompts, fields.MAX_ROWS):
                keys = [f"p{number}" for number in range(first, min(prompts, first + fields.MAX_ROWS))]
                chunk = messages.RegisterPrompts(
                    task="bench", fingerprint="0" * 64, total=prompts, offset=first, keys=keys
                )
                searcher.call(chunk, messages.Registered, deadline_seconds=PATIENCE_SECONDS)
            announcement = messages.AnnounceSnapshot(weights=WEIGHTS, bytes=0)
            publisher.call(announcement, messages.Done, deadline_seconds=PATIENCE_SECONDS)
            searcher.call(messages.Goodbye(), messages.Done, deadline_seconds=PATIENCE_SECONDS)

    def cpu_seconds(self) -> float:
        """Return the CPU time that the server has used."""
        return sum(psutil.Process(self.process.pid).cpu_times()[:2])


def make_keys(directory: Path) -> ClientKeys:
    """Create the keys of a server's node, `security.keys`, and those of a client that may do everything."""
    write_pair(directory, new_pair("server"))
    own = new_pair("client")
    write_public(directory / AUTHORIZED / "client.pub", public=own.public, roles=KEY_ROLES)
    return ClientKeys(own, buffer_key(directory))
