"""A sequence classifier behind an HTTP server, by the requests and replies of vLLM's pooling routes.

    /classify   {"input": text, "use_activation": false}                 data[0].probs = [logit]
    /pooling    {"input": text, "task": "classify", "use_activation": ...}   data[0].data = [logit]
    /score      {"text_1": prompt, "text_2": response, ...}              data[0].score = logit

With template = "chat", `messages` replaces `input`. `use_activation` false asks for the logit; by default vLLM applies
a sigmoid to a single label. All in vLLM 0.32, vllm/entrypoints/pooling.

`python -m tba.searcher.scoring.http_model FD` is the process that asks it, started by `rewards.py`. Its messages
are those of `worker_pool.py`. A failure of the server is an error of the responses that waited for it, never the end of
the process. It needs httpx2, which transformers and vLLM depend on too.
"""

import asyncio
import contextlib
import json
import math
import random
import sys
from collections.abc import Sequence
from typing import Any

import httpx2

from tba.common.config import RewardModelSection
from tba.common.errors import HttpRefused, HttpUnavailable
from tba.common.rendering import as_map
from tba.common.system.background import backoff
from tba.searcher.scoring.scoring import storable
from tba.searcher.scoring.worker_pool import Connection
from tba.searcher.tasks.task import Prompt

_ROUTES = {"classify": "/classify", "pooling": "/pooling", "score": "/score"}
# Scored to see whether the server has a reward model.
PROBE = Prompt("", "a")
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

    `key` is sent as a bearer token if it is not empty. Without `keep_alive` there is nothing to close.
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
        deadline, HttpRefused for another status, a reply that is too large or no JSON object, and an invalid URL.
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

    async def aclose(self) -> None:
        await self._client.aclose()

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
    with contextlib.suppress(ValueError, RecursionError, LookupError, TypeError):
        # OpenAI's and vLLM's form.
        shown = str(json.loads(shown)["error"]["message"])
    return " ".join(shown[:_QUOTED_CHARACTERS].split()) or "no text"


class HttpModel(JsonClient):
    """The classifier at `url`. `key` is its API key."""

    def __init__(self, config: RewardModelSection, key: str) -> None:
        super().__init__(config.url, key=key, connections=config.concurrency)
        self._config = config

    async def score(self, prompt: Prompt, response: str, *, seconds: float) -> float:
        """Return the logit of a pair. Raises HttpRefused, HttpUnavailable, ValueError for a pair without a text."""
        return self._score_in(await self.post(_ROUTES[self._config.api], self._body(prompt, response), seconds=seconds))

    def _body(self, prompt: Prompt, response: str) -> dict[str, Any]:
        config = self._config
        body: dict[str, Any] = {"use_activation": False}
        if config.served_model:
            body["model"] = config.served_model
        if config.api == "pooling":
            body["task"] = "classify"
        if config.template == "chat":
            whole = (*(prompt.messages or [("user", prompt.text)]), ("assistant", response))
            return body | {"messages": [as_map(message) for message in whole]}
        if prompt.messages and not prompt.text:
            raise ValueError('the prompt has messages and no text: set reward_model.template = "chat"')
        if config.api == "score":
            return body | {"text_1": prompt.text, "text_2": response}
        return body | {"input": prompt.text + response}

    def _score_in(self, reply: dict[str, Any]) -> float:
        key = {"classify": "probs", "pooling": "data", "score": "score"}[self._config.api]
        try:
            (item,) = reply["data"]
            found = item[key]
        except (KeyError, TypeError, ValueError):
            raise HttpRefused(
                f"{self._config.url} answered without data[0].{key}: set reward_model.api to a route it has"
            ) from None
        values = found if isinstance(found, list) else [found]
        if len(values) != 1:
            raise HttpRefused(f"{self._config.url} gave {len(values)} labels: a reward needs a classifier with one")
        score = math.nan
        # OverflowError: an integer of hundreds of digits.
        with contextlib.suppress(TypeError, OverflowError):
            score = math.nan if isinstance(values[0], bool | str) else float(values[0])
        if not math.isfinite(score):
            raise HttpRefused(f"{self._config.url} gave the score {str(values[0])[:40]!r}: not a finite number")
        return score


def main() -> None:
    connection = Connection()
    settings = next(connection.messages)
    config = RewardModelSection.model_validate(settings["config"])
    # One event loop for all batches: connections belong to a loop.
    with asyncio.Runner() as runner:
        model = HttpModel(config, settings["key"])
        try:
            runner.run(model.score(PROBE, "a", seconds=settings["load_seconds"]))
        except (HttpRefused, HttpUnavailable) as error:
            connection.send(["refused" if isinstance(error, HttpRefused) else "failed", storable(str(error))])
            sys.exit(1)
        connection.send(["ready"])
        for items in connection.messages:
            runner.run(_score(connection, model, config, items))


async def _score(connection: Connection, model: HttpModel, config: RewardModelSection, items: Sequence[Any]) -> None:
    free = asyncio.Semaphore(config.concurrency)

    async def score_one(ticket: int, fields: Sequence[Any], response: str) -> None:
        async with free:
            outcome: list[float | str | None]
            try:
                outcome = [await model.score(Prompt(*fields), response, seconds=config.time_limit_seconds), None]
            except (HttpRefused, HttpUnavailable, ValueError) as error:
                outcome = [None, storable(f"not scored: {error}")]
        connection.send(["results", [[ticket, *outcome]]])

    await asyncio.gather(*(score_one(*item[:3]) for item in items))


if __name__ == "__main__":
    main()
