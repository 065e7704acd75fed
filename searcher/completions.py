"""What the endpoint's routes take and return: the forms of vLLM 0.32 (`vllm/entrypoints`), for the policy of a run.

    request ──► Question: token ids, sampling settings of n responses ──► generations ──► answer

A field that would change the distribution of the tokens, and that the engines do not have, is refused unless it has no
effect. Other unknown fields are ignored, as vLLM does. Two things vLLM's answers do not have: the name of the model is
`policy@v38`, after the version that produced the first token, and `version_spans` are [start, end, version] of a
choice's tokens, with the end exclusive.
"""

import copy
import inspect
import json
import re
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
import numpy as np

from tba.common.config import Config
from tba.common.errors import ConfigError
from tba.common.rendering import PromptRenderer, message_of, variables_of
from tba.common.wire.trajectory import STOP_EOS, Int32
from tba.searcher.engines.engine import Generation, SamplingSettings
from tba.searcher.engines.stopping import Stopping
from tba.searcher.tasks.task import Prompt

# Responses of one request.
_MOST_SAMPLES = 128
# Each token of a response is looked at for them.
_MOST_STOPS, _STOP_CHARACTERS = 16, 256
# vLLM's engine raises smaller ones to this.
_LEAST_TEMPERATURE = 0.01
# A torch.Generator takes as many bits.
_SEED_MASK = (1 << 63) - 1
_LARGEST_ID = (1 << 31) - 1
# JSON has no infinity; vLLM writes this.
_LEAST_LOGPROB = -9999.0

_OFF, _ZERO = (None, False), (None, 0)
_NONE: tuple[Any, ...] = (None, [], {}, "")
# The values with which a field of vLLM's requests, which is not supported, has no effect.
_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("stream", "use_beam_search", "ignore_eos", "include_stop_str_in_output"), _OFF),
    **dict.fromkeys(("echo", "continue_final_message", "add_special_tokens", "watermarking"), _OFF),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p", "min_tokens"), _ZERO),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), (None, 1)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt"), (None, True)),
    **dict.fromkeys(("logit_bias", "bad_words", "allowed_token_ids", "structured_outputs", "documents"), _NONE),
    **dict.fromkeys(("chat_template", "functions", "logprob_token_ids", "features", "content_parts"), _NONE),
    **dict.fromkeys(("prompt_logprobs", "truncate_prompt_tokens", "thinking_token_budget"), (None,)),
    **dict.fromkeys(("repetition_detection", "vllm_xargs", "extra_args", "reasoning_effort"), (None, {})),
    "top_k": (None, 0, -1),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "none", "auto"),
    "output_mode": (None, "tokens"),
}
_WHY = {
    "stream": "answers are not streamed: leave out `stream`, and the whole answer comes at once",
    "reasoning_effort": "set the variable of the chat template instead, in `chat_template_kwargs`",
    "tool_choice": "calls are not forced: use auto, and read the calls in the text of the answer",
}


class HttpError(Exception):
    """A request that is refused: a status, a sentence, and the field that is wrong."""

    def __init__(self, message: str, param: str | None = None, status: int = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.status, self.param = status, param

    def body(self) -> dict[str, Any]:
        """Return the error in the form of vLLM and OpenAI: `BadRequestError`, `NotFoundError`, ..."""
        kind = re.sub(r"\W", "", HTTPStatus(self.status).phrase.title()).removesuffix("Error") + "Error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": int(self.status)}}


class _Sampling(msgspec.Struct):
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None


class _Chat(_Sampling):
    messages: list[dict[str, Any]] = []
    model: str | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class _GenerateSampling(_Sampling):
    logprobs: int | None = None


class _Generate(msgspec.Struct):
    token_ids: list[int]
    sampling_params: _GenerateSampling
    model: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None


_Read = TypeVar("_Read", _Chat, _Generate)


@dataclass(frozen=True, slots=True)
class Question:
    """A request to generate: the context, the settings of each response, and what ends it."""

    ids: Int32
    sampling: Sequence[SamplingSettings]
    stopping: Stopping
    request: _Chat | _Generate


class Completions:
    """Reads requests and writes answers. Used by the threads of the endpoint."""

    def __init__(self, config: Config, renderer: PromptRenderer, stopping: Stopping, context: int | None) -> None:
        """`context` is the largest number of tokens of prompt and response, if it is known."""
        self._config = config
        self._context = context
        # One of its own: the loop of the searcher must not wait for the rendering of a long conversation.
        self._tokenizer = copy.deepcopy(renderer.tokenizer)
        self._renderer = PromptRenderer(self._tokenizer, config.task)
        self._stopping = Stopping(self._tokenizer, stopping.strings, stopping.ids)
        self._lock = threading.Lock()
        taken = inspect.signature(self._tokenizer.apply_chat_template).parameters
        self._not_variables = taken.keys() - {"tools", "documents", "kwargs"}

    def models(self, version: int) -> dict[str, Any]:
        """Answer `GET /v1/models`."""
        card = {"id": _name(version), "object": "model", "created": int(time.time()), "owned_by": "tba"}
        return {"object": "list", "data": [card | {"root": self._config.model.path, "max_model_len": self._context}]}

    def read(self, route: str, body: bytes) -> Question:
        """Read a request to a route. Raises HttpError."""
        try:
            fields = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise HttpError(f"the request is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise HttpError("the request is not a JSON object")
        _refuse_effects(fields)
        if route == CHAT:
            chat = _convert(fields, _Chat)
            self._check_model(chat.model)
            if chat.top_logprobs:
                raise HttpError("only sampled tokens have log-probabilities: set `top_logprobs` to 0", "top_logprobs")
            if chat.max_completion_tokens is not None:
                chat.max_tokens = chat.max_completion_tokens
            return self._question(self._render(fields), chat, chat)
        _refuse_effects(fields.get("sampling_params"))
        generate = _convert(fields, _Generate)
        self._check_model(generate.model)
        if (generate.sampling_params.logprobs or 0) not in (0, 1):
            raise HttpError("only sampled tokens have log-probabilities: set `logprobs` to 0 or 1", "logprobs")
        return self._question(_ids(generate.token_ids), generate.sampling_params, generate)

    def _check_model(self, model: str | None) -> None:
        if model and model not in (_POLICY, self._config.model.path) and not model.startswith(f"{_POLICY}@v"):
            raise HttpError(f"The model `{model}` does not exist.", "model", HTTPStatus.NOT_FOUND)

    def _render(self, fields: Mapping[str, Any]) -> Int32:
        """Return the token ids of a conversation, as the run renders its prompts; without a template, of its texts."""
        try:
            messages = [_message(message) for message in fields["messages"]]
            if not messages:
                raise ValueError("`messages` is empty")
            variables = variables_of(fields)
            if refused := variables.keys() & self._not_variables:
                raise ValueError(f"{min(refused)} is no variable of a chat template")
            text = "".join(message["content"] or "" for message in messages)
            prompt = Prompt("request", text, messages=[*map(message_of, messages)], template_kwargs=variables)
            with self._lock:
                return np.asarray(self._renderer.ids(prompt), np.int32)
        except KeyError as error:
            raise HttpError(f"{error} is missing", "messages") from error
        except (ValueError, TypeError) as error:
            raise HttpError(f"the messages cannot be rendered: {error}", "messages") from error

    def _question(self, ids: Int32, asked: _Sampling, request: _Chat | _Generate) -> Question:
        """Return a question. What depends on the model, such as its context, is checked by the engine."""
        samples = 1 if asked.n is None else asked.n
        if not 1 <= samples <= _MOST_SAMPLES:
            raise HttpError(f"`n` is {samples}: ask for 1 to {_MOST_SAMPLES} responses", "n")
        temperature = 1.0 if asked.temperature is None else asked.temperature
        if 0 < temperature < _LEAST_TEMPERATURE:
            raise HttpError(f"`temperature` must be 0 (greedy) or at least {_LEAST_TEMPERATURE}", "temperature")
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        if len(stop) > _MOST_STOPS or not all(0 < len(one) <= _STOP_CHARACTERS for one in stop):
            raise HttpError(f"`stop` has at most {_MOST_STOPS} strings of 1 to {_STOP_CHARACTERS} characters", "stop")
        try:
            stopping = self._stopping.also([*stop, *(asked.stop_token_ids or ())])
        except ConfigError as error:
            raise HttpError(str(error).replace("search.stop", "`stop`"), "stop") from error
        top_p = 1.0 if asked.top_p is None else asked.top_p
        most = self._config.search.max_tokens if asked.max_tokens is None else asked.max_tokens
        # As vLLM, which counts the seed of a request up.
        seeds = [None if asked.seed is None else (asked.seed + n) & _SEED_MASK for n in range(samples)]
        settings = [SamplingSettings(temperature, top_p, most, seed, stopping) for seed in seeds]
        return Question(ids, settings, stopping, request)

    def answer(self, question: Question, generations: Sequence[Generation]) -> dict[str, Any]:
        """Return the answer to a question, whose responses are in the order of its settings."""
        request, id_ = question.request, uuid.uuid4().hex
        if isinstance(request, _Chat):
            kind = {"id": f"chatcmpl-{id_}", "object": "chat.completion"}
        else:
            kind = {"request_id": f"generate-tokens-{request.request_id or id_}", "output_mode": "tokens"}
        prompt, tokens = len(question.ids), sum(len(generation.response_ids) for generation in generations)
        with self._lock:
            choices = [self._choice(question, n, generation) for n, generation in enumerate(generations)]
        return kind | {
            "created": int(time.time()),
            "model": _name(int(generations[0].version_runs[0, 0])),
            "choices": choices,
            "usage": {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens},
            "prompt_token_ids": question.ids.tolist() if request.return_token_ids else None,
        }

    def _choice(self, question: Question, index: int, generation: Generation) -> dict[str, Any]:
        request, stopping, ids = question.request, question.stopping, generation.response_ids.tolist()
        logprobs = [max(logprob, _LEAST_LOGPROB) for logprob in generation.logprobs.tolist()]
        ends, versions = np.cumsum(generation.version_runs[:, 1]).tolist(), generation.version_runs[:, 0].tolist()
        spans = [*zip([0, *ends[:-1]], ends, versions, strict=True)]
        ended, content = generation.stop_reason == STOP_EOS, None
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": "stop" if ended else "length",
            "stop_reason": stopping.ended_by(ids) if ended else None,
            "version_spans": spans,
        }
        if isinstance(request, _Generate):
            if request.sampling_params.logprobs is not None:
                each = [{"token_id": id_, "logprob": one, "rank": None} for id_, one in zip(ids, logprobs, strict=True)]
                # The sampled token is the first of its alternatives.
                content = [one | {"top_logprobs": [one]} for one in each]
            named = [{"version": str(version), "start": start, "end": end} for start, end, version in spans]
            return choice | {"token_ids": ids, "logprobs": content and {"content": content}, "weight_versions": named}
        if request.logprobs:
            texts = [self._token(id_, as_id=bool(request.return_tokens_as_token_ids)) for id_ in ids]
            content = [
                {"token": text, "logprob": one, "bytes": [*text.encode("utf-8", "replace")], "top_logprobs": []}
                for text, one in zip(texts, logprobs, strict=True)
            ]
        return choice | {
            "message": {"role": "assistant", "content": stopping.scored_text(ids), "refusal": None},
            "logprobs": content and {"content": content},
            "token_ids": ids if request.return_token_ids else None,
        }

    def _token(self, id_: int, *, as_id: bool) -> str:
        return f"token_id:{id_}" if as_id else self._tokenizer.decode([id_], skip_special_tokens=False)


CHAT, GENERATE, MODELS = "/v1/chat/completions", "/inference/v1/generate", "/v1/models"
_POLICY = "policy"


def _name(version: int) -> str:
    return f"{_POLICY}@v{version}"


def _refuse_effects(fields: Any) -> None:
    """Raise HttpError for the first field that would have an effect, and has none here."""
    for name, values in _NO_EFFECT.items():
        if isinstance(fields, dict) and name in fields and fields[name] not in values:
            raise HttpError(f"`{name}` is not supported: {_WHY.get(name, 'leave it out')}", name)


def _convert(fields: Any, form: type[_Read]) -> _Read:
    try:
        return msgspec.convert(fields, form)
    except msgspec.ValidationError as error:
        raise HttpError(str(error)) from error


def _ids(ids: Sequence[int]) -> Int32:
    if not ids or not 0 <= min(ids) <= max(ids) <= _LARGEST_ID:
        raise HttpError("`token_ids` is empty, or has an id that no vocabulary has", "token_ids")
    return np.asarray(ids, np.int32)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates take it: its content a string, and the arguments of its calls objects."""
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise ValueError("a part of a content is not a text")
        # As vLLM joins them.
        content = "\n".join(part["text"] for part in content)
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    return {**message, "content": content or "", **({"tool_calls": calls} if calls else {})}


def _call(call: Any) -> Any:
    """Return a call of a tool whose arguments, JSON in OpenAI's form, are an object, as templates expect them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"] or "{}")}}
