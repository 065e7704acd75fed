"""A real buffer server process for benchmarks: start it, wait until it answers, register what a run needs."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from tba.common.wire import fields, messages
from tba.common.wire.client import BufferClient
from tba.common.wire.curve import new_pair
from tba.common.wire.keys import AUTHORIZED, KEY_ROLES, ClientKeys, buffer_key, write_pair, write_public
from tba.common.wire.status_messages import GetStatus, Status

WEIGHTS = messages.WeightsRef(version=0, step=0, path="/none", manifest_sha256="0" * 64)
_PATIENCE_SECONDS = 120.0


def start(directory: Path, *options: str) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server of a run in `directory`, power-durable, over TCP. Returns process and address without waiting."""
    address = free_address()
    settings = [
        f"run.dir={directory}",
        f"buffer.address={address}",
        "buffer.durability=power",
        "train.prompts_per_step=1",
        *options,
    ]
    command = [sys.executable, "-m", "tba", "buffer", "serve", *(part for s in settings for part in ("--set", s))]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL), address


def free_address() -> str:
    """Return a TCP address on the loopback interface that nothing uses."""
    return f"tcp://127.0.0.1:{_free_port()}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return int(unused.getsockname()[1])


@contextlib.contextmanager
def serving(directory: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a server of `start` for the block."""
    process, address = start(directory, *options)
    try:
        yield process, address
    finally:
        process.terminate()
        process.wait(_PATIENCE_SECONDS)


def status(address: str) -> Status:
    """Wait until the server answers. Returns its status."""
    client = BufferClient(address, role="monitor", name="bench")
    try:
        return client.call(GetStatus(), Status, deadline_seconds=_PATIENCE_SECONDS)[0]
    finally:
        client.close()


def seconds_until_answer(address: str, started: float) -> float:
    """Return the seconds from `started` (monotonic) until the server has answered a status request."""
    status(address)
    return time.monotonic() - started


def make_keys(directory: Path) -> ClientKeys:
    """Create the keys of a server's node, `security.keys`, and those of a client that may do everything."""
    write_pair(directory, new_pair("server"))
    own = new_pair("client")
    write_public(directory / AUTHORIZED / "client.pub", public=own.public, roles=KEY_ROLES)
    return ClientKeys(own, buffer_key(directory))


def prepare(address: str, prompts: int, keys: ClientKeys | None = None) -> None:
    """Register `prompts` prompts, p0, p1 and so on, and announce the first weights."""
    searcher, publisher = (
        BufferClient(address, role=role, name="bench", keys=keys) for role in ("searcher", "publisher")
    )
    with closing(searcher), closing(publisher):
        for first in range(0, prompts, fields.MAX_ROWS):
            keys = [f"p{number}" for number in range(first, min(prompts, first + fields.MAX_ROWS))]
            chunk = messages.RegisterPrompts(task="bench", fingerprint="0" * 64, total=prompts, offset=first, keys=keys)
            searcher.call(chunk, messages.Registered, deadline_seconds=_PATIENCE_SECONDS)
        announcement = messages.AnnounceSnapshot(weights=WEIGHTS, bytes=0)
        publisher.call(announcement, messages.Done, deadline_seconds=_PATIENCE_SECONDS)
        searcher.call(messages.Goodbye(), messages.Done, deadline_seconds=_PATIENCE_SECONDS)
