"""What stands before every page: the check of the Host header, the token, and headers that confine the browser.

A page shows text that models wrote. Templates escape it, and the policy below forbids scripts, styles and requests
other than those of this server, so that text which escaped the templates could not act either.
"""

import secrets
from urllib.parse import urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tba.common.wire.socket_files import LOOPBACK, host_name

_COOKIE = "tba_token"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


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
