"""The application: addresses, errors, who may see a page, and the server that runs until Ctrl-C or SIGTERM.

A page shows text that models wrote. Templates escape it, and the policy below forbids scripts, styles and requests
other than those of this server, so that text which escaped the templates could not act either.
"""

import asyncio
import contextlib
import errno
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tba.buffer.tools.query import limit_memory
from tba.common.errors import AddressInUse, ConfigError, StorageError, TbaError, UsageError
from tba.common.terminal import note
from tba.common.wire.socket_files import LEAST_TOKEN, LOOPBACK, host_name
from tba.ui.pages import compare, prompts, run, sql, steps, trajectories
from tba.ui.runs import find_runs
from tba.ui.site import FOLDER, LARGEST_NUMBER, Site, make_environment, site_of

# The status of a database that is no buffer, or whose values are malformed.
_UNREADABLE = 503
# Connections at a time: a browser opens six.
_MOST_CONNECTIONS = 64
_REQUEST_SECONDS = 10.0
_COOKIE = "tba_token"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class _RowConvertor(IntegerConvertor):
    """A number in an address. Python refuses to read one of thousands of digits, and SQLite has 64 bits."""

    regex = "[0-9]{1,100}"

    def convert(self, value: str) -> int:
        return min(int(value), LARGEST_NUMBER)


register_url_convertor("row", _RowConvertor())


def make_app(paths: Sequence[Path], *, token: str | None = None, report: Callable[[str], None] = note) -> Starlette:
    """Return the application over runs; `report` receives what is left out. Raises UsageError or StorageError."""
    site = Site(runs={run.key: run for run in find_runs(paths, report)}, environment=make_environment())
    limit_memory(next(iter(site.runs.values())).database)
    routes = [
        Route("/", home),
        Route("/r/{run}", run.page, name="run"),
        Route("/r/{run}/live", run.live),
        Route("/r/{run}/charts.json", run.charts),
        Route("/r/{run}/config", run.config),
        Route("/r/{run}/steps", steps.listing),
        Route("/r/{run}/steps/{step:row}", steps.page),
        Route("/r/{run}/prompts", prompts.listing),
        Route("/r/{run}/prompts/{prompt:row}", prompts.page),
        Route("/r/{run}/trajectories", trajectories.listing),
        Route("/r/{run}/trajectories/{trajectory:row}", trajectories.page),
        Route("/r/{run}/compare", compare.page),
        Route("/r/{run}/held-out", prompts.held_out),
        Route("/r/{run}/sql", sql.page),
        Route("/r/{run}/sql.csv", sql.csv_file),
        Mount("/static", StaticFiles(directory=FOLDER / "static")),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, token=token)],
        exception_handlers={HTTPException: failed, TbaError: failed},
    )
    app.state.site = site
    return app


def home(request: Request) -> Response:
    """List the runs, those with the newest step first. A single run has no list. Several marked ones are compared."""
    site = site_of(request)
    if marked := request.query_params.getlist("b"):
        return RedirectResponse(f"/r/{quote(marked[0])}/compare?{urlencode({'b': marked[1:]}, doseq=True)}", 307)
    if len(site.runs) == 1:
        return RedirectResponse(f"/r/{next(iter(site.runs))}", 307)
    rows = []
    for one in site.runs.values():
        try:
            with one.rows() as found:
                rows.append({"run": one, **run.describe(one, found)})
        except StorageError as error:
            # It hides no other run.
            nothing = dict.fromkeys(("trained_at", "reward", "steps_done", "steps", "held_out", "objective", "model"))
            nothing |= {"totals": dict.fromkeys(("trajectories", "errors")), "about": {"created_at": 0}}
            rows.append({"run": one, "state": "unreadable", "why": str(error), **nothing})
    rows.sort(key=lambda row: row["trained_at"] or row["about"]["created_at"], reverse=True)
    return site.page("runs.html", rows=rows)


def failed(request: Request, error: Exception) -> Response:
    """Show an error of an address, of a filter, or of the database."""
    status = 400 if isinstance(error, UsageError) else _UNREADABLE
    status, sentence = (error.status_code, error.detail) if isinstance(error, HTTPException) else (status, str(error))
    # Keep the navigation of the run.
    run = site_of(request).runs.get(request.path_params.get("run", ""))
    known = {"run": run} if run else {}
    title = f"Run {run.name} cannot be read" if run and status == _UNREADABLE else f"Error {status}"
    return site_of(request).page("error.html", http_status=status, title=title, sentence=sentence, **known)


class Guard:
    """Middleware. Without a token, only requests whose Host header names the loopback interface are answered.

    A page of another site cannot forge that header (DNS rebinding). With a token, the first request carries it as
    `?token=`, and later ones as a cookie.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that is refused, pass on any other."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def send_confined(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                # The files of the interface are asked for again, and answered with 304 if they are the same.
                headers["Cache-Control"] = "no-cache" if scope["path"].startswith("/static/") else "no-store"
            await send(message)

        answer = self._refuse(Request(scope)) or self._app
        return await answer(scope, receive, send_confined)

    def _refuse(self, request: Request) -> Response | None:
        """Return the reply to a request that goes no further, None for one that does."""
        if self._token is None:
            if host_name(request.headers.get("host", "")) in LOOPBACK:
                return None
            return PlainTextResponse("this address answers only requests to 127.0.0.1 or localhost\n", 403)
        if self._is_token(request.query_params.get("token", "")):
            return self._enter(request)
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(request.cookies.get(_COOKIE, "")) or self._is_token(bearer):
            return None
        return PlainTextResponse("add ?token=TOKEN to the address, with the token of `tba ui --token`\n", 401)

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), (self._token or "").encode())

    def _enter(self, request: Request) -> Response:
        """Return a redirect to the same page without the token in its address, and with the token in a cookie."""
        rest = [(key, value) for key, value in request.query_params.multi_items() if key != "token"]
        # A path of two slashes would lead to another host.
        path = "/" + request.scope["path"].lstrip("/\\")
        response = RedirectResponse(path + (f"?{urlencode(rest)}" if rest else ""), 303)
        response.set_cookie(_COOKIE, self._token or "", httponly=True, samesite="lax")
        return response


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
