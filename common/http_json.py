"""A client of HTTP servers that take and return JSON: with a deadline, retries, and a limit on the size of a reply.

It needs httpx2, which transformers and vLLM depend on too.
"""

import asyncio
import json
import random
from typing import Any, Self

import httpx2

from tba.common.errors import HttpRefused, HttpUnavailable
from tba.common.system.background import backoff

# The reply to one request: a score, or a few hundred words.
_REPLY_BYTES = 1 << 20
_QUOTED_CHARACTERS = 200
_FIRST_PAUSE_SECONDS = 0.25
_MAX_PAUSE_SECONDS = 8.0
# Besides 5xx: request timeout, too early, too many requests.
_TEMPORARY = {408, 425, 429}


class _NotYet(Exception):
    """An error of the server that may pass: the request is sent again."""


class JsonClient:
    """Requests to one server, over at most `connections` connections. It belongs to one event loop.

    `key` is sent as a bearer token if it is not empty. Without `keep_alive` nothing is open between requests, and
    nothing has to be closed.
    """

    def __init__(self, url: str, *, key: str = "", connections: int = 64, keep_alive: bool = True) -> None:
        self.url = url
        # Without compression a reply cannot expand to more than was sent.
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        limits = httpx2.Limits(max_connections=connections, max_keepalive_connections=connections if keep_alive else 0)
        # The deadline of `post` is the only limit on time.
        self._client = httpx2.AsyncClient(headers=headers, limits=limits, timeout=None)

    async def post(self, route: str, body: Any, *, seconds: float) -> dict[str, Any]:
        """Return the JSON object that the server answers with, within `seconds`, retries with backoff included.

        Retried are failed connections, server errors (5xx), and requests to wait. Raises HttpUnavailable after the
        deadline, and HttpRefused for another status, for a reply that is too large or not a JSON object, and for an
        invalid URL.
        """
        content = json.dumps(body).encode()
        failures, reason = 0, "no reply to the request"
        try:
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        return await self._post_once(route, content)
                    except httpx2.InvalidURL as error:
                        raise HttpRefused(f"{self.url} is not a valid URL: {error}") from error
                    except (_NotYet, httpx2.TransportError) as error:
                        failures += 1
                        reason = str(error) if isinstance(error, _NotYet) else type(error).__name__
                    # Not all clients of a server that comes back ask at the same moment.
                    pause = backoff(failures, _FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS)
                    await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
        except TimeoutError:
            raise HttpUnavailable(f"{self.url}{route}: nothing usable within {seconds:g} s: {reason}") from None

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _post_once(self, route: str, content: bytes) -> dict[str, Any]:
        async with self._client.stream("POST", self.url + route, content=content) as response:
            text = await self._read(response)
            status = response.status_code
        if status >= 500 or status in _TEMPORARY:
            raise _NotYet(f"status {status}: {_quoted(text)}")
        if status != 200:
            raise HttpRefused(f"{self.url}{route} answered with status {status}: {_quoted(text)}")
        try:
            reply = json.loads(text)
        except (ValueError, RecursionError):
            raise HttpRefused(f"{self.url}{route} returned something other than JSON: {_quoted(text)}") from None
        if not isinstance(reply, dict):
            raise HttpRefused(f"{self.url}{route} returned something other than a JSON object: {_quoted(text)}")
        return reply

    async def _read(self, response: httpx2.Response) -> bytes:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise HttpRefused(f"{self.url} compressed its reply, although it was asked not to")
        text = bytearray()
        async for chunk in response.aiter_raw():
            text += chunk
            if len(text) > _REPLY_BYTES:
                raise HttpRefused(f"{self.url} answered with more than {_REPLY_BYTES >> 20} MiB")
        return bytes(text)


def _quoted(text: bytes) -> str:
    """Return the error message of a reply, or its first characters, in one line."""
    shown = text.decode("utf-8", "replace")
    try:
        reply = json.loads(shown)
        # OpenAI's and vLLM's form.
        shown = str(reply["error"]["message"])
    except (ValueError, RecursionError, LookupError, TypeError):
        pass
    return " ".join(shown[:_QUOTED_CHARACTERS].split()) or "no text"
