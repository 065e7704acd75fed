"""The endpoint of a searcher, `search.serve`: agents ask its engine over HTTP, as they ask vLLM's server.

    client ──► handler thread: read, check, render ──► waiting ──► the searcher's loop: `step` ──► engine
    client ◄── handler thread: answer              ◄────────────── each generation that is done

The loop never waits for a client, and a client holds nothing but its handler thread. At most half of the rows of the
engine are for requests, which start before queued responses of the run, so that both go on. The content of a request is
in `tba.searcher.completions`.
"""

import contextlib
import hmac
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tba.common.errors import EngineError, EngineFaulty
from tba.common.log import get_logger
from tba.common.wire.socket_files import LOOPBACK, host_name
from tba.common.wire.trajectory import Int32
from tba.searcher.completions import CHAT, GENERATE, MODELS, Completions, HttpError, Question
from tba.searcher.engines.engine import Generation, SamplingSettings

log = get_logger(__name__)

_HEALTH = "/health"
_METHODS = {CHAT: "POST", GENERATE: "POST", MODELS: "GET", _HEALTH: "GET"}
_MOST_BYTES = 4 << 20
_MOST_CONNECTIONS = 256
# Responses that wait or are being generated.
_MOST_PENDING = 512
# Of a client, to send a whole request, or to take a whole answer.
_CLIENT_SECONDS = 10.0
# Between two looks whether the client of a pending request is still there.
_LOOK_SECONDS = 0.25
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

Ask = Callable[[Int32, SamplingSettings, Callable[[Generation], None]], None]


class _Pending:
    """A question until its responses are there: `done` is set with all `generations`, or with an `error`."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.generations: list[Generation | None] = [None] * len(question.sampling)
        self.error: HttpError | None = None
        self.done = threading.Event()

    def fail(self, error: HttpError) -> None:
        """Give up, unless it is done."""
        if not self.done.is_set():
            self.error = error
            self.done.set()


class Endpoint:
    """Answers requests by the engine of a searcher. `step` belongs to the searcher's loop, all else to any thread.

    `token` is the secret that requests need; "" answers the loopback interface alone. Raises OSError if the address
    cannot be bound, OverflowError if no port has that number.
    """

    def __init__(self, host: str, port: int, *, token: str, completions: Completions) -> None:
        self._token = token
        self._completions = completions
        self._lock = threading.Lock()
        self._waiting: deque[tuple[_Pending, int]] = deque()
        self._generating: dict[tuple[_Pending, int], None] = {}
        # Of the weights that serve; None before the first ones and after `close`.
        self._version: int | None = None
        self._closed = False
        self._server = _Server(host, port, self)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, name="endpoint", daemon=True)
        self._thread.start()

    def step(self, ask: Ask, version: int | None, rows: int) -> int:
        """Start what waits, at most `rows` at a time; returns how many responses are being generated.

        `version` is that of the weights in use, None before the first.
        """
        self._version = version
        while version is not None and self._waiting and len(self._generating) < rows:
            pending, n = self._waiting.popleft()
            # Its client has gone, or another response of it was refused.
            if pending.done.is_set():
                continue
            try:
                ask(pending.question.ids, pending.question.sampling[n], partial(self._take, pending, n))
            except EngineFaulty:
                raise
            except EngineError as error:
                pending.fail(HttpError(str(error)))
            else:
                self._generating[pending, n] = None
        return len(self._generating)

    def _take(self, pending: _Pending, n: int, generation: Generation) -> None:
        del self._generating[pending, n]
        pending.generations[n] = generation
        if all(pending.generations):
            pending.done.set()

    def close(self) -> None:
        """Refuse what is pending, and stop listening. Closing twice is fine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            pending = {one for one, _ in (*self._waiting, *self._generating)}
        for one in pending:
            one.fail(_unavailable("the searcher ends"))
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def admit(self, host: str, authorization: str) -> None:
        """Raise HttpError for a client that may not ask.

        A page of another site cannot forge the Host header, even if the name of that site resolves to 127.0.0.1 (DNS
        rebinding).
        """
        if self._token:
            given = authorization.removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self._token.encode()):
                sentence = "send the header `Authorization: Bearer TOKEN`, with the token of search.serve_token"
                raise HttpError(sentence, status=HTTPStatus.UNAUTHORIZED)
        elif host_name(host) not in LOOPBACK:
            sentence = "this address answers only requests to 127.0.0.1 or localhost"
            raise HttpError(sentence, status=HTTPStatus.FORBIDDEN)

    def reply(self, route: str, body: bytes, is_there: Callable[[], bool]) -> dict[str, Any]:
        """Return the reply to a request. Raises HttpError, or ConnectionError for a client that is not there."""
        version = self._version
        if self._closed or version is None:
            raise _unavailable("the searcher ends" if self._closed else "the searcher has no weights yet")
        if route == _HEALTH:
            return {}
        if route == MODELS:
            return self._completions.models(version)
        pending = _Pending(self._completions.read(route, body))
        self._enqueue(pending)
        while not pending.done.wait(_LOOK_SECONDS):
            if not is_there():
                pending.fail(_unavailable("its client has gone"))
                raise ConnectionError
        if pending.error is not None:
            raise pending.error
        return self._completions.answer(pending.question, [one for one in pending.generations if one is not None])

    def _enqueue(self, pending: _Pending) -> None:
        count = len(pending.generations)
        with self._lock:
            if self._closed or len(self._waiting) + len(self._generating) + count > _MOST_PENDING:
                raise _unavailable("the searcher ends" if self._closed else f"{_MOST_PENDING} responses are pending")
            self._waiting.extend((pending, n) for n in range(count))


def _unavailable(reason: str) -> HttpError:
    return HttpError(f"{reason}: ask again", status=HTTPStatus.SERVICE_UNAVAILABLE)


class _Server(ThreadingHTTPServer):
    """One thread per connection. A client that is too slow is disconnected."""

    daemon_threads = True
    request_queue_size = 128
    # Two searchers at one port would each get some of the requests.
    allow_reuse_port = False

    def __init__(self, host: str, port: int, endpoint: Endpoint) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.endpoint = endpoint
        # Each connection, and the monotonic time by which its client must have done its part.
        self._deadlines: dict[Any, float] = {}
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind the socket without asking DNS for the name of this machine, which may take minutes."""
        TCPServer.server_bind(self)

    def expect(self, request: Any, seconds: float) -> None:
        """Disconnect a client unless it has done its part, which `expect` ends, within some seconds."""
        self._deadlines[request] = time.monotonic() + seconds

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the thread of a connection, if there are not too many."""
        if len(self._deadlines) >= _MOST_CONNECTIONS:
            request.send(_BUSY)
            self.shutdown_request(request)
            return
        self.expect(request, _CLIENT_SECONDS)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Disconnect the clients whose time is over, so that their threads wake up. Called twice a second."""
        now = time.monotonic()
        for request in [request for request, deadline in [*self._deadlines.items()] if deadline < now]:
            # It may have just ended.
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection that has ended."""
        self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no traceback of a connection that its client or the time limit has ended."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "tba", ""
    # Headers and body are two packets, which would wait for one another.
    disable_nagle_algorithm = True
    server: _Server

    def handle_one_request(self) -> None:
        """Give the client its time for the next request."""
        self.server.expect(self.request, _CLIENT_SECONDS)
        super().handle_one_request()

    def do_GET(self) -> None:
        """Answer a request."""
        self._respond()

    do_POST = do_GET

    def _respond(self) -> None:
        keep, self.close_connection = not self.close_connection, True
        try:
            route = self._route()
            body = self._body() if self.command == "POST" else b""
            # Nothing of this request is left to be read.
            self.close_connection = not keep
            self.server.expect(self.request, math.inf)
            self._write(HTTPStatus.OK, self.server.endpoint.reply(route, body, self._is_there))
        except HttpError as error:
            self._write(error.status, error.body())
        except OSError:
            self.close_connection = True
        except Exception as error:
            log.exception("request to the endpoint failed")
            self._write(500, HttpError(f"{type(error).__name__}: see the log of the searcher", status=500).body())

    def _route(self) -> str:
        """Return the route of a request whose client may ask. Raises HttpError."""
        self.server.endpoint.admit(self.headers.get("Host", ""), self.headers.get("Authorization", ""))
        route = urlsplit(self.path).path
        if route not in _METHODS:
            raise HttpError(f"there is {', '.join(_METHODS)}, and no {route[:100]}", status=HTTPStatus.NOT_FOUND)
        if self.command != _METHODS[route]:
            raise HttpError(f"{route} takes {_METHODS[route]}", status=HTTPStatus.METHOD_NOT_ALLOWED)
        return route

    def _body(self) -> bytes:
        # With any other type, a page of another site could send requests without asking the browser first.
        if self.headers.get_content_type() != "application/json":
            raise HttpError("Unsupported Media Type: Only 'application/json' is allowed")
        length = self.headers.get("Content-Length", "")
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit()):
            raise HttpError("send the length of the request", status=HTTPStatus.LENGTH_REQUIRED)
        if len(length) > 10 or int(length) > _MOST_BYTES:
            status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            raise HttpError(f"a request has at most {_MOST_BYTES >> 20} MiB", status=status)
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ConnectionError
        return body

    def _is_there(self) -> bool:
        """Whether the client has not ended its connection."""
        try:
            return bool(self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True

    def _write(self, status: int, content: dict[str, Any]) -> None:
        self.server.expect(self.request, _CLIENT_SECONDS)
        body = msgspec.json.encode(content)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            self.send_header("Retry-After", "1")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Answer what is not HTTP, or has another method, in the form of other errors."""
        self.close_connection = True
        self._write(code, HttpError(message or HTTPStatus(code).phrase, status=code).body())

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def open_endpoint(address: tuple[str, int], index: int, *, token: str, completions: Completions) -> Endpoint | None:
    """Open the endpoint of a searcher, the n-th of its command. None if it cannot listen: the run goes on without.

    The port is the address's plus `index`; with port 0 it is a free one.
    """
    host, port = address
    port += index if port else 0
    try:
        endpoint = Endpoint(host, port, token=token, completions=completions)
    except (OSError, OverflowError) as error:
        log.warning("no endpoint", host=host, port=port, reason=str(error))
        return None
    log.info("endpoint", url=endpoint.url)
    return endpoint
