"""Serve the interface until Ctrl-C or SIGTERM."""

import asyncio
import contextlib
import errno
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tba.common.errors import AddressInUse, ConfigError, UsageError
from tba.common.wire.socket_files import LEAST_TOKEN, LOOPBACK
from tba.ui.app import make_app

# Connections at a time: a browser opens six.
_MOST_CONNECTIONS = 64
_REQUEST_SECONDS = 10.0


class _Protocol(H11Protocol):
    """Ends a connection that sends no whole request for 10 s: uvicorn limits connections, and not their time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._last: Any = None
        self.loop.call_later(_REQUEST_SECONDS, self._end_if_idle)

    def _end_if_idle(self) -> None:
        if self.transport.is_closing():
            return
        is_answering = self.cycle is not None and not (self.cycle.response_complete or self.cycle.more_body)
        is_sending = self.transport.get_write_buffer_size() > 0
        if self.cycle is self._last and not is_answering and not is_sending:
            self.transport.abort()
            return
        self._last = self.cycle
        self.loop.call_later(_REQUEST_SECONDS, self._end_if_idle)


def serve(paths: Sequence[Path], *, host: str, port: int, token: str | None, report: Callable[[str], None]) -> None:
    """Serve the runs of directories and database files. `report` receives one sentence with the address.

    Raises UsageError for an address that needs a token, AddressInUse, ConfigError, or the errors of `make_app`.
    """
    if token is None and host not in LOOPBACK:
        raise UsageError(f"--host {host} can be reached from other machines: give --token with a secret, too")
    if token is not None and len(token) < LEAST_TOKEN:
        raise UsageError(f"--token needs at least {LEAST_TOKEN} characters: `openssl rand -hex 16` makes one")
    # uvicorn ends in order after a signal, then raises it again. SIGTERM would end this process with 143.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    app = make_app(paths, token=token, report=report)
    listener = _listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    report(f"http://{shown}:{listener.getsockname()[1]}/{'?token=TOKEN' if token else ''} (Ctrl-C ends it)")
    config = uvicorn.Config(
        app,
        http=_Protocol,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=_MOST_CONNECTIONS,
        ws="none",
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"another program listens at {host}:{port}: choose another --port") from error
        raise ConfigError(f"{host}:{port} cannot be bound: {error.strerror or error}; choose another --host") from error
