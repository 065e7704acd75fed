"""A sequence classifier behind an HTTP server, by the requests and replies of vLLM's pooling routes.

    /classify   {"input": text, "use_activation": false}                 data[0].probs = [logit]
    /pooling    {"input": text, "task": "classify", "use_activation": ...}   data[0].data = [logit]
    /score      {"text_1": prompt, "text_2": response, ...}              data[0].score = logit

With template = "chat", `messages` replaces `input`. `use_activation` false asks for the logit; by default vLLM applies
a sigmoid to a single label. All in vLLM 0.32, vllm/entrypoints/pooling.

`python -m tba.searcher.scoring.http_model FD` is the process that asks it, started by `model_scorer.py`. Its messages
are those of `worker_pool.py`. A failure of the server is an error of the responses that waited for it, never the end of
the process.
"""

import asyncio
import math
import sys
from collections.abc import Sequence
from typing import Any, Self

from tba.common.config import ScoringModelSection
from tba.common.errors import HttpRefused, HttpUnavailable
from tba.common.http_json import JsonClient
from tba.common.rendering import as_map
from tba.searcher.scoring.scoring import storable
from tba.searcher.scoring.worker_pool import Connection
from tba.searcher.tasks.task import Prompt

_ROUTES = {"classify": "/classify", "pooling": "/pooling", "score": "/score"}
_PROBE = Prompt("", "a")


class HttpModel:
    """The classifier at `url`. `key` is its API key, `section` is named in messages. It belongs to one event loop."""

    def __init__(self, config: ScoringModelSection, key: str, section: str = "reward_model") -> None:
        self._config = config
        self._section = section
        self._client = JsonClient(config.url, key=key, connections=config.concurrency)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def score(self, prompt: Prompt, response: str, *, seconds: float) -> float:
        """Return the logit of a pair. Raises HttpRefused, HttpUnavailable, ValueError for a pair without a text."""
        body = self._body(prompt, response)
        reply = await self._client.post(_ROUTES[self._config.api], body, seconds=seconds)
        return self._read(reply)

    async def try_out(self, *, seconds: float) -> None:
        """Wait until the server scores. Raises HttpRefused if it is not a reward model, HttpUnavailable."""
        await self.score(_PROBE, "a", seconds=seconds)

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
            raise ValueError(f'the prompt has messages and no text: set {self._section}.template = "chat"')
        if config.api == "score":
            return body | {"text_1": prompt.text, "text_2": response}
        return body | {"input": prompt.text + response}

    def _read(self, reply: dict[str, Any]) -> float:
        key = {"classify": "probs", "pooling": "data", "score": "score"}[self._config.api]
        try:
            (item,) = reply["data"]
            found = item[key]
        except (KeyError, TypeError, ValueError):
            raise HttpRefused(
                f"{self._config.url} answered without data[0].{key}: set {self._section}.api to a route it has"
            ) from None
        values = found if isinstance(found, list) else [found]
        if len(values) != 1:
            raise HttpRefused(
                f"{self._config.url} answered with {len(values)} labels: a reward needs a classifier with one"
            )
        try:
            score = math.nan if isinstance(values[0], bool | str) else float(values[0])
        # OverflowError: an integer of hundreds of digits.
        except (TypeError, OverflowError):
            score = math.nan
        if not math.isfinite(score):
            raise HttpRefused(
                f"{self._config.url} answered with the score {str(values[0])[:40]!r}: not a finite number"
            )
        return score


def main() -> None:
    """Serve until the searcher closes the socket."""
    connection = Connection()
    settings = next(connection.messages)
    config = ScoringModelSection.model_validate(settings["config"])
    # One event loop for all batches: connections belong to a loop.
    with asyncio.Runner() as runner:
        model = HttpModel(config, settings["key"], settings["section"])
        try:
            runner.run(model.try_out(seconds=settings["load_seconds"]))
        except (HttpRefused, HttpUnavailable) as error:
            connection.send(["refused" if isinstance(error, HttpRefused) else "failed", storable(str(error))])
            sys.exit(1)
        connection.send(["ready"])
        for items in connection.messages:
            runner.run(_score(connection, model, config, items))


async def _score(connection: Connection, model: HttpModel, config: ScoringModelSection, items: Sequence[Any]) -> None:
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
