"""The endpoint of a searcher, `search.serve`: agents ask its engine over HTTP, as they ask vLLM 0.32's server.

    client ──► the endpoint's thread: read, check, render ──► waiting ──► the searcher's loop: `step` ──► engine
    client ◄── the endpoint's thread: answer              ◄────────────── each generation that is done

The loop never waits for a client, and a client holds nothing but its connection. At most half of the rows of the engine
are for requests, which start before queued responses of the run, so that both go on.

Requests and answers have the forms of vLLM (`vllm/entrypoints`). A field that would change the distribution of the
tokens, and that the engines do not have, is refused unless it has no effect. Other unknown fields are ignored, as vLLM
does. vLLM's answers do not have: the name of the model `policy@v38`, after the version that produced the first token;
`version_spans`, [start, end, version] of a choice's tokens, with the end exclusive; `run`, the uuid of that run.
"""

import asyncio
import contextlib
import copy
import hmac
import re
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from email.message import Message
from functools import partial
from http import HTTPStatus
from http.client import HTTPException, parse_headers
from io import BytesIO
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import numpy as np
from msgspec import Meta

from tba.common.config import Config
from tba.common.errors import ConfigError, EngineError, EngineFaulty
from tba.common.log import get_logger
from tba.common.rendering import PromptRenderer, message_of, variables_of
from tba.common.wire.socket_files import LOOPBACK, host_name
from tba.common.wire.trajectory import STOP_EOS, Int32
from tba.searcher.engines.engine import Generation, SamplingSettings
from tba.searcher.engines.stopping import Stopping
from tba.searcher.tasks.task import Prompt

log = get_logger(__name__)

_CHAT, _GENERATE, _MODELS, _HEALTH = "/v1/chat/completions", "/inference/v1/generate", "/v1/models", "/health"
_METHODS = {_CHAT: "POST", _GENERATE: "POST", _MODELS: "GET", _HEALTH: "GET"}
_MOST_BYTES = 4 << 20
_MOST_CONNECTIONS = 256
# Responses that wait or are being generated.
_MOST_PENDING = 512
# Of a client, to send a whole request, or to take a whole answer.
_CLIENT_SECONDS = 10.0
# Between two looks whether the client of a pending request is still there, or the endpoint is closed.
_LOOK_SECONDS = 0.25
# A connection that its client, or the time limit, has ended.
_ENDED = (OSError, EOFError, asyncio.LimitOverrunError)

_POLICY = "policy"
# vLLM's engine raises smaller ones to this.
_LEAST_TEMPERATURE = 0.01
# A torch.Generator takes as many bits.
_SEED_MASK = (1 << 63) - 1
# The object of an answer that is streamed.
_CHUNK = "chat.completion.chunk"
# Fields of vLLM's requests that are not supported, and have no effect if they are empty, 0 or false.
_EMPTY = (
    *("stream", "use_beam_search", "ignore_eos", "include_stop_str_in_output", "echo", "continue_final_message"),
    *("add_special_tokens", "watermarking", "frequency_penalty", "presence_penalty", "min_p", "min_tokens"),
    *("top_logprobs", "logit_bias", "bad_words", "allowed_token_ids", "structured_outputs", "chat_template"),
    *("documents", "logprob_token_ids", "features", "content_parts", "repetition_detection", "vllm_xargs"),
    *("extra_args", "reasoning_effort", "functions"),
)
# The values, besides null, with which such a field has no effect.
_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_EMPTY, (False, 0, "", [], {})),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), (1,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("prompt_logprobs", "truncate_prompt_tokens", "thinking_token_budget"), ()),
    "logprobs": (0, 1),
    "top_k": (0, -1),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "output_mode": ("tokens",),
}
_WHY = {
    **dict.fromkeys(("logprobs", "top_logprobs"), "only sampled tokens have log-probabilities"),
    "reasoning_effort": "set the variable of the chat template instead, in `chat_template_kwargs`",
    "tool_choice": "calls are not forced: use auto, and read the calls in the text of the answer",
}

Ask = Callable[[Int32, SamplingSettings, Callable[[Generation], None]], None]


class HttpError(Exception):
    """A request that is refused: a status, a sentence, and the field that is wrong."""

    def __init__(self, message: str, param: str | None = None, status: int = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.status, self.param = status, param

    def body(self) -> dict[str, Any]:
        """Return the error in the form of vLLM and OpenAI: `BadRequestError`, `NotFoundError`, ..."""
        kind = re.sub(r"\W", "", HTTPStatus(self.status).phrase.title()).removesuffix("Error") + "Error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": int(self.status)}}


class _Fields(msgspec.Struct):
    """The fields of a request to either route that have an effect. Those of `sampling_params` are among them."""

    messages: list[dict[str, Any]] = []
    token_ids: list[Annotated[int, Meta(ge=0, lt=1 << 31)]] = []
    model: str = ""
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = None
    seed: int | None = None
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    # Each token of a response is looked at for them.
    stop: Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=16)] = []
    stop_token_ids: list[int] = []
    logprobs: bool | int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    request_id: str = ""
    stream: bool = False


class Question(NamedTuple):
    """A request to generate: the context, the settings of each response, what ends it, and the fields."""

    ids: Int32
    sampling: Sequence[SamplingSettings]
    stopping: Stopping
    fields: _Fields
    is_chat: bool


class Completions:
    """Reads requests and writes answers, in one thread. `run` returns the run's uuid; `context`: see `context_of`."""

    def __init__(
        self, config: Config, renderer: PromptRenderer, stopping: Stopping, context: int | None, run: Callable[[], str]
    ) -> None:
        self._config = config
        self._context = context
        self._run = run
        # One of its own: the loop of the searcher must not wait for the rendering of a long conversation.
        self._tokenizer = copy.deepcopy(renderer.tokenizer)
        self._renderer = PromptRenderer(self._tokenizer, config.task)
        self._stopping = Stopping(self._tokenizer, stopping.strings, stopping.ids)

    def models(self, version: int) -> dict[str, Any]:
        """Answer `GET /v1/models`: the policy under its version, and under the name that stays."""
        card = {"object": "model", "created": int(time.time()), "owned_by": "tba", "root": self._config.model.path}
        names = f"{_POLICY}@v{version}", _POLICY
        return {"object": "list", "data": [{"id": name, **card, "max_model_len": self._context} for name in names]}

    def read(self, route: str, body: bytes) -> Question:
        """Read a request to a route. What depends on the model is checked by the engine. Raises HttpError."""
        is_chat = route == _CHAT
        given = _supported(body, is_chat=is_chat)
        try:
            fields = msgspec.convert(given, _Fields)
            stopping = self._stopping.also([*fields.stop, *fields.stop_token_ids])
        except msgspec.ValidationError as error:
            field = re.search(r"\$\.(\w+)", str(error))
            raise HttpError(str(error), field and field[1]) from error
        except ConfigError as error:
            raise HttpError(str(error).replace("search.stop", "`stop`"), "stop") from error
        model = fields.model
        if model not in ("", _POLICY, self._config.model.path) and not model.startswith(f"{_POLICY}@v"):
            raise HttpError(f"The model `{model}` does not exist.", "model", HTTPStatus.NOT_FOUND)
        if 0 < fields.temperature < _LEAST_TEMPERATURE:
            raise HttpError(f"`temperature` must be 0 (greedy) or at least {_LEAST_TEMPERATURE}", "temperature")
        most = self._config.search.max_tokens if fields.max_tokens is None else fields.max_tokens
        # As vLLM, which counts the seed of a request up.
        seeds = [None if fields.seed is None else (fields.seed + n) & _SEED_MASK for n in range(fields.n)]
        sampling = [SamplingSettings(fields.temperature, fields.top_p, most, seed, stopping) for seed in seeds]
        ids = self._render(fields.messages, given) if is_chat else fields.token_ids
        return Question(np.asarray(ids, np.int32), sampling, stopping, fields, is_chat)

    def _render(self, messages: Sequence[dict[str, Any]], given: Mapping[str, Any]) -> list[int]:
        """Return the token ids of a conversation, as the run renders its prompts; without a template, of its texts."""
        try:
            maps, variables = [*map(_message, messages)], variables_of(given)
            if not maps or "chat_template" in variables:
                raise ValueError("chat_template is no variable of a chat template" if maps else "there are none")
            text = "".join(message["content"] for message in maps)
            prompt = Prompt("request", text, messages=[*map(message_of, maps)], template_kwargs=variables)
            return self._renderer.ids(prompt)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise HttpError(f"the messages cannot be rendered: {error}", "messages") from error

    def answer(self, question: Question, generations: Sequence[Generation]) -> dict[str, Any]:
        """Return the answer to a question, whose responses are in the order of its settings."""
        fields, id_ = question.fields, uuid.uuid4().hex
        if question.is_chat:
            kind = {"id": f"chatcmpl-{id_}", "object": _CHUNK if fields.stream else "chat.completion"}
        else:
            kind = {"request_id": f"generate-tokens-{fields.request_id or id_}", "output_mode": "tokens"}
        prompt, tokens = len(question.ids), sum(len(generation.response_ids) for generation in generations)
        return kind | {
            "created": int(time.time()),
            "model": f"{_POLICY}@v{generations[0].version_runs[0, 0]}",
            "run": self._run(),
            "choices": [self._choice(question, n, generation) for n, generation in enumerate(generations)],
            "usage": {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens},
            "prompt_token_ids": question.ids.tolist() if fields.return_token_ids else None,
        }

    def _choice(self, question: Question, index: int, generation: Generation) -> dict[str, Any]:
        fields, is_chat, ids = question.fields, question.is_chat, generation.response_ids.tolist()
        versions, counts = generation.version_runs.T
        spans = np.stack([counts.cumsum() - counts, counts.cumsum(), versions], axis=1).tolist()
        ended = generation.stop_reason == STOP_EOS
        said = {"role": "assistant", "content": question.stopping.scored_text(ids), "refusal": None}
        # A proxy that records traces, such as OpenEnv's, keeps the message of a choice and not its other fields.
        said |= {"version_spans": spans, "run": self._run()} if fields.return_token_ids else {}
        has_logprobs = bool(fields.logprobs) if is_chat else fields.logprobs is not None
        return {
            "index": index,
            "finish_reason": "stop" if ended else "length",
            "stop_reason": question.stopping.ended_by(ids) if ended else None,
            "version_spans": spans,
            "weight_versions": [{"version": str(version), "start": a, "end": b} for a, b, version in spans],
            "token_ids": ids if fields.return_token_ids or not is_chat else None,
            "logprobs": {"content": self._logprobs(question, generation)} if has_logprobs else None,
            **({"delta" if fields.stream else "message": said} if is_chat else {}),
        }

    def _logprobs(self, question: Question, generation: Generation) -> list[dict[str, Any]]:
        """Return the entry of each token. In `generate` the sampled token is the first of its alternatives."""
        content = []
        for id_, logprob in zip(generation.response_ids.tolist(), generation.logprobs.tolist(), strict=True):
            text = self._tokenizer.decode([id_], skip_special_tokens=False)
            text = f"token_id:{id_}" if question.fields.return_tokens_as_token_ids else text
            one = {"token": text, "token_id": id_, "logprob": logprob, "rank": None}
            one["bytes"] = [*text.encode("utf-8", "replace")]
            content.append(one | {"top_logprobs": [] if question.is_chat else [one]})
        return content


def _supported(body: bytes, *, is_chat: bool) -> dict[str, Any]:
    """Return the fields of a request that are not null. Raises HttpError for one that would have an effect."""
    try:
        given = msgspec.json.decode(body, type=dict[str, Any])
        if not is_chat:
            given = {**given, **given["sampling_params"]}
    except KeyError as error:
        raise HttpError(f"{error} is missing") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise HttpError(f"the request is not a JSON object of this form: {error}") from error
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name in _NO_EFFECT and value not in _NO_EFFECT[name] and not (is_chat and name == "stream"):
            raise HttpError(f"`{name}` is not supported: {_WHY.get(name, 'leave it out')}", name)
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    if is_chat and "max_completion_tokens" in given:
        given["max_tokens"] = given["max_completion_tokens"]
    return given


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its content as a string."""
    content = message.get("content") or ""
    if isinstance(content, list):
        if not all(isinstance(part.get("text"), str) for part in content):
            raise ValueError("a part of a content is not a text")
        # As vLLM joins them.
        content = "\n".join(part["text"] for part in content)
    return {**message, "content": content}


class Endpoint:
    """Answers requests by the engine of a searcher. `step` belongs to the searcher's loop.

    Requests need the secret `token`; with "" the loopback interface alone is answered. Raises OSError as `bind` does.
    """

    def __init__(self, host: str, port: int, *, token: str, completions: Completions) -> None:
        self._token = token
        self._completions = completions
        self._waiting: deque[tuple[Int32, SamplingSettings, Future[Generation]]] = deque()
        self._generating = self._connections = 0
        # Of the weights that serve; None before the first ones.
        self._version: int | None = None
        self._closed = False
        is_v6 = ":" in host
        family, both = socket.AF_INET6 if is_v6 else socket.AF_INET, is_v6 and socket.has_dualstack_ipv6()
        listener = socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=both)
        self.url = f"http://{f'[{host}]' if is_v6 else host}:{listener.getsockname()[1]}/v1"
        self._thread = threading.Thread(target=asyncio.run, args=[self._serve(listener)], name="endpoint", daemon=True)
        self._thread.start()

    def step(self, ask: Ask, version: int | None, rows: int) -> int:
        """Start what waits, at most `rows` at a time; returns how many responses are being generated.

        `version` is that of the weights in use, None before the first.
        """
        self._version = version
        while version is not None and self._waiting and self._generating < rows:
            ids, sampling, result = self._waiting.popleft()
            # Its client has gone.
            if not result.set_running_or_notify_cancel():
                continue
            try:
                ask(ids, sampling, partial(self._take, result))
            except EngineFaulty:
                raise
            except EngineError as error:
                result.set_exception(HttpError(str(error)))
            else:
                self._generating += 1
        return self._generating

    def _take(self, result: Future[Generation], generation: Generation) -> None:
        self._generating -= 1
        result.set_result(generation)

    def close(self) -> None:
        """Refuse what is pending, and stop listening. Closing twice is fine."""
        self._closed = True
        self._thread.join()

    async def _serve(self, listener: socket.socket) -> None:
        """Answer connections until `close`; `asyncio.run` then cancels what is left of them."""
        server = await asyncio.start_server(self._converse, sock=listener)
        while not self._closed:
            await asyncio.sleep(_LOOK_SECONDS)
        server.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection, one after another, until its client leaves or is too slow."""
        self._connections += 1
        # So that an answer is sent only when the client has taken it, and nothing is left for one that takes nothing.
        writer.transport.set_write_buffer_limits(0)
        with contextlib.suppress(*_ENDED, asyncio.CancelledError):
            if self._connections > _MOST_CONNECTIONS:
                await _write(writer, 503, _unavailable("there are too many connections").body(), keep=False)
            else:
                while await self._respond(reader, writer):
                    pass
        self._connections -= 1
        writer.transport.abort()

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer a request. Returns whether its connection takes another one."""
        keep, status = False, 200
        try:
            async with asyncio.timeout(_CLIENT_SECONDS):
                route, headers, persists = _parse(await reader.readuntil(b"\r\n\r\n"))
                self._admit(headers)
                body = await _body(reader, headers) if _METHODS[route] == "POST" else b""
            # Nothing of this request is left to be read.
            keep = persists
            if self._version is None:
                raise _unavailable("the searcher has no weights yet")
            if _METHODS[route] == "GET":
                content = self._completions.models(self._version) if route == _MODELS else {}
            else:
                question = self._completions.read(route, body)
                generations = await self._generate(question, lambda: not (reader.at_eof() or writer.is_closing()))
                content = self._completions.answer(question, generations)
        except _ENDED:
            raise
        except HttpError as error:
            status, content = error.status, error.body()
        except Exception as error:
            log.exception("request to the endpoint failed")
            refusal = HttpError(f"{type(error).__name__}: see the log of the searcher", status=500)
            status, content = refusal.status, refusal.body()
        await _write(writer, status, content, keep=keep)
        return keep

    def _admit(self, headers: Message) -> None:
        """Raise HttpError for a client that may not ask.

        A page of another site cannot forge the Host header, even if its name resolves to 127.0.0.1 (DNS rebinding).
        """
        if self._token:
            given = headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self._token.encode()):
                sentence = "send the header `Authorization: Bearer TOKEN`, with the token of search.serve_token"
                raise HttpError(sentence, status=HTTPStatus.UNAUTHORIZED)
        elif host_name(headers.get("Host", "")) not in LOOPBACK:
            sentence = "this address answers only requests to 127.0.0.1 or localhost"
            raise HttpError(sentence, status=HTTPStatus.FORBIDDEN)

    async def _generate(self, question: Question, is_there: Callable[[], bool]) -> list[Generation]:
        """Return the responses to a question. Raises HttpError, or ConnectionError for a client that is not there."""
        results: list[Future[Generation]] = [Future() for _ in question.sampling]
        if len(self._waiting) + self._generating + len(results) > _MOST_PENDING:
            raise _unavailable(f"{_MOST_PENDING} responses are pending")
        self._waiting.extend([(question.ids, *one) for one in zip(question.sampling, results, strict=True)])
        pending = [asyncio.wrap_future(result) for result in results]
        try:
            while (await asyncio.wait(pending, timeout=_LOOK_SECONDS))[1]:
                if not is_there():
                    raise ConnectionError
        except asyncio.CancelledError:
            raise _unavailable("the searcher ends") from None
        finally:
            for one in pending:
                one.cancel()
        # Of all: asyncio logs an error that was not asked for.
        if error := next(filter(None, [one.exception() for one in pending]), None):
            raise error
        return [one.result() for one in pending]


def _parse(head: bytes) -> tuple[str, Message, bool]:
    """Return the route of a request, its headers, and whether its connection takes another one. Raises HttpError."""
    line, _, rest = head.partition(b"\r\n")
    try:
        method, target, protocol = line.decode("ascii").split(" ")
        headers, route = parse_headers(BytesIO(rest)), urlsplit(target).path
    except (ValueError, HTTPException) as error:
        raise HttpError("the request is not HTTP/1.1") from error
    if route not in _METHODS:
        raise HttpError(f"there is {', '.join(_METHODS)}, and no {route[:100]}", status=HTTPStatus.NOT_FOUND)
    if method != _METHODS[route]:
        raise HttpError(f"{route} takes {_METHODS[route]}", status=HTTPStatus.METHOD_NOT_ALLOWED)
    return route, headers, protocol == "HTTP/1.1" and headers.get("Connection", "").lower() != "close"


async def _body(reader: asyncio.StreamReader, headers: Message) -> bytes:
    # With any other type, a page of another site could send requests without asking the browser first.
    if headers.get_content_type() != "application/json":
        raise HttpError("Unsupported Media Type: Only 'application/json' is allowed")
    length = headers.get("Content-Length", "")
    if "Transfer-Encoding" in headers or not re.fullmatch("[0-9]{1,10}", length):
        raise HttpError("send the length of the request", status=HTTPStatus.LENGTH_REQUIRED)
    if int(length) > _MOST_BYTES:
        sentence = f"a request has at most {_MOST_BYTES >> 20} MiB"
        raise HttpError(sentence, status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    return await reader.readexactly(int(length))


async def _write(writer: asyncio.StreamWriter, status: int, content: dict[str, Any], *, keep: bool) -> None:
    """Send a reply; one that is to be streamed is a single event."""
    body, kind = msgspec.json.encode(content), "application/json"
    if content.get("object") == _CHUNK:
        body, kind = b"data: " + body + b"\n\ndata: [DONE]\n\n", "text/event-stream"
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    lines += ["Retry-After: 1"] if status == HTTPStatus.SERVICE_UNAVAILABLE else []
    lines += [] if keep else ["Connection: close"]
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)
    async with asyncio.timeout(_CLIENT_SECONDS):
        await writer.drain()


def _unavailable(reason: str) -> HttpError:
    return HttpError(f"{reason}: ask again", status=HTTPStatus.SERVICE_UNAVAILABLE)
