"""The endpoint of a searcher, over real sockets, with a real engine that a thread steps as the searcher's loop does."""

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

from tba.common.config import Config
from tba.common.errors import EngineError
from tba.searcher import endpoint as module
from tba.searcher.build import LoadedTask
from tba.searcher.endpoint import Completions, Endpoint
from tba.searcher.engines.engine import Requests
from tba.searcher.loop import open_endpoint
from tba.tests.conftest import EXAMPLE_MODEL
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.engines import cpu_engine

CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | length if tools }}"
ASK = {"messages": [{"role": "user", "content": "38+36="}], "max_tokens": 8}


class Reply(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: Any


def ask(endpoint: Endpoint, path: str, body: Any = None, **headers: str) -> Reply:
    """Send one request; `body` is JSON, or bytes as they are."""
    connection = http.client.HTTPConnection("127.0.0.1", port_of(endpoint), timeout=60)
    content = body if isinstance(body, bytes) or body is None else json.dumps(body)
    connection.request(
        "POST" if body is not None else "GET", path, content, {"Content-Type": "application/json"} | headers
    )
    reply = connection.getresponse()
    text = reply.read()
    connection.close()
    return Reply(reply.status, reply.headers, json.loads(text))


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Completions]:
    """An engine of the example model, and what reads requests to it."""
    from tba.common.rendering import PromptRenderer
    from tba.common.weights.model_files import eos_ids
    from tba.common.weights.pretrained import load_tokenizer
    from tba.searcher.engines.stopping import Stopping

    config = Config.model_validate({"model": {"path": str(EXAMPLE_MODEL)}, "search": {"max_tokens": 12}})
    renderer = PromptRenderer(load_tokenizer(EXAMPLE_MODEL), config.task)
    renderer.tokenizer.chat_template = TEMPLATE
    stopping = Stopping(renderer.tokenizer, (), eos_ids(EXAMPLE_MODEL))
    engine = cpu_engine(EXAMPLE_MODEL, max_in_flight=8, stopping=stopping)
    return engine, Completions(config, renderer, stopping, 64, lambda: "run 1")


@pytest.fixture
def listen(parts) -> Iterator[Callable[..., Endpoint]]:
    """Opens endpoints that nothing steps."""
    opened = []

    def listen(token: str = "") -> Endpoint:
        opened.append(Endpoint("127.0.0.1", 0, token=token, completions=parts[1]))
        return opened[-1]

    yield listen
    for one in opened:
        one.close()


@pytest.fixture(scope="module")
def served(parts) -> Iterator[Endpoint]:
    """An endpoint whose requests are answered."""
    endpoint = Endpoint("127.0.0.1", 0, token="", completions=parts[1])
    requests, stop = Requests(parts[0]), threading.Event()
    # One step before any request: the version is known.
    endpoint.step(requests.ask, 7, 4)

    def run() -> None:
        while not stop.is_set():
            if not endpoint.step(requests.ask, 7, 4):
                stop.wait(0.002)
            requests.step()

    thread = threading.Thread(target=run)
    thread.start()
    yield endpoint
    stop.set()
    thread.join()
    endpoint.close()


def port_of(endpoint: Endpoint) -> int:
    return int(endpoint.url.split(":")[2].split("/")[0])


def forward(engine: Any, prompt: list[int], response: list[int]) -> np.ndarray:
    return np.asarray(engine.score([[*prompt, *response]])[0][len(prompt) - 1 :])


def test_a_chat_answer_has_the_ids_and_log_probabilities_of_its_tokens(parts, served):
    reply = ask(served, CHAT, ASK | {"logprobs": True, "return_token_ids": True, "n": 3, "seed": 5}).body
    assert (reply["model"], reply["run"]) == ("policy@v0", "run 1")
    assert reply["prompt_token_ids"] == [6, 11, 13, 6, 9, 15]
    for n, choice in enumerate(reply["choices"]):
        ids, content = choice["token_ids"], choice["logprobs"]["content"]
        np.testing.assert_allclose(
            [one["logprob"] for one in content], forward(parts[0], reply["prompt_token_ids"], ids), atol=1e-4
        )
        assert choice["version_spans"] == choice["message"]["version_spans"] == [[0, len(ids), 0]]
        assert choice["message"]["run"] == "run 1"
        reason = "stop" if ids[-1] == 1 else "length"
        assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (n, reason, None)
        assert choice["message"]["content"] == "".join(one["token"] for one in content).removesuffix("<eos>")
    again = ask(served, CHAT, ASK | {"return_token_ids": True, "n": 3, "seed": 5}).body
    assert [one["token_ids"] for one in again["choices"]] == [one["token_ids"] for one in reply["choices"]]
    assert again["choices"][0]["logprobs"] is None


def test_tokens_in_tokens_out_as_vllm_serves_it(parts, served):
    prompt, settings = [6, 11, 13, 6, 9, 15], {"max_tokens": 5, "logprobs": 1, "temperature": 0}
    body = {"token_ids": prompt, "sampling_params": settings, "model": "policy@v3", "request_id": "a1"}
    reply = ask(served, GENERATE, body).body
    (choice,) = reply["choices"]
    logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
    np.testing.assert_allclose(logprobs, forward(parts[0], prompt, choice["token_ids"]), atol=1e-4)
    assert [one["token_id"] for one in choice["logprobs"]["content"]] == choice["token_ids"]
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": len(choice["token_ids"])}]
    assert (reply["request_id"], reply["prompt_token_ids"]) == ("generate-tokens-a1", None)


@pytest.mark.slow
def test_the_answers_are_read_by_the_models_of_vllm(served):
    protocol = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    generate = pytest.importorskip("vllm.entrypoints.scale_out.token_in_token_out.protocol")
    models = pytest.importorskip("vllm.entrypoints.serve.engine.protocol")
    chat = ask(served, CHAT, ASK | {"logprobs": True, "return_token_ids": True}).body
    assert protocol.ChatCompletionResponse.model_validate(chat).choices[0].token_ids == chat["choices"][0]["token_ids"]
    body = {"token_ids": [6, 15], "sampling_params": {"logprobs": 0}, "return_token_ids": True}
    found = generate.GenerateTokensResponse.model_validate(ask(served, GENERATE, body).body)
    assert (found.prompt_token_ids, found.usage.prompt_tokens) == ([6, 15], 2)
    cards = models.ModelList.model_validate(ask(served, "/v1/models").body).data
    assert [card.id for card in cards] == ["policy@v7", "policy"]


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "3"}, {"type": "text", "text": "8"}]}]},
         [6, 2, 11]),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"}, [6, 11, 13, 6, 9, 15, 4]),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
                       {"role": "tool", "content": "9", "tool_call_id": "1"}]}, [12]),
        ({"user": "me", "cache_salt": "s", "top_k": -1, "frequency_penalty": 0.0, "more": 1}, [6, 11, 13, 6, 9, 15]),
    ],
)  # fmt: skip
def test_messages_are_rendered_as_the_run_renders_its_prompts(served, changes, ids):
    reply = ask(served, CHAT, ASK | {"return_token_ids": True} | changes)
    assert (reply.status, reply.body["prompt_token_ids"]) == (200, ids)


def test_a_stop_of_the_request_ends_its_response_and_not_its_tokens(served):
    body = ASK | {"temperature": 0, "return_token_ids": True}
    whole = ask(served, CHAT, body).body["choices"][0]
    assert whole["message"]["content"] == "64"
    by_text = ask(served, CHAT, body | {"stop": "4"}).body["choices"][0]
    assert (by_text["message"]["content"], by_text["stop_reason"], by_text["finish_reason"]) == ("6", "4", "stop")
    assert by_text["token_ids"] == whole["token_ids"][:2]
    by_id = ask(served, CHAT, body | {"stop_token_ids": [9]}).body["choices"][0]
    assert (by_id["message"]["content"], by_id["stop_reason"], by_id["token_ids"]) == ("", 9, [9])


DEEP = {"function": {"name": "f", "arguments": "[" * 100_000}}


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"top_k": 5}, 400, "top_k"),
        ({"min_p": 0.1}, 400, "min_p"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"logprobs": True, "top_logprobs": 2}, 400, "top_logprobs"),
        ({"model": "other"}, 404, "model"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "messages"),
        ({"messages": [{"content": "no role"}]}, 400, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [DEEP]}]}, 400, "messages"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, 400, "messages"),
        ({"n": 0}, 400, "n"),
        ({"n": 10_000}, 400, "n"),
        ({"temperature": 0.001}, 400, "temperature"),
        ({"stop": ["a"] * 17}, 400, "stop"),
        ({"stop": "x<eos>"}, 400, "stop"),
        ({"temperature": -1.0}, 400, None),
        ({"top_p": 0}, 400, None),
        ({"max_tokens": 0}, 400, None),
        ({"max_tokens": "many"}, 400, "max_tokens"),
        ({"messages": [{"role": "user", "content": "1" * 5000}]}, 400, None),
    ],
)
def test_a_request_that_cannot_be_answered_as_it_says_is_refused_in_vllms_form(served, changes, status, param):
    reply = ask(served, CHAT, ASK | changes)
    error = reply.body["error"]
    assert (reply.status, error["code"], error["param"]) == (status, status, param)
    assert error["type"] == ("NotFoundError" if status == 404 else "BadRequestError")
    assert ask(served, CHAT, ASK).status == 200


@pytest.mark.parametrize(
    "body",
    [
        {"token_ids": [], "sampling_params": {}},
        {"token_ids": [99], "sampling_params": {}},
        {"token_ids": [1 << 40], "sampling_params": {}},
        {"token_ids": [5], "sampling_params": {"logprobs": 5}},
        {"token_ids": [5], "sampling_params": {"top_k": 5}},
        {"token_ids": [5], "sampling_params": {}, "output_mode": "text"},
        {"token_ids": [5]},
        {"sampling_params": {}},
        [],
        b"{",
        b"[" * 100_000,
        b'{"token_ids": [5], "sampling_params": {"temperature": NaN}}',
    ],
)
def test_ids_that_cannot_be_continued_are_refused(served, body):
    assert ask(served, GENERATE, body).status == 400


def test_without_weights_nothing_is_answered_yet(listen):
    endpoint = listen()
    for path, body in ((CHAT, ASK), ("/v1/models", None), ("/health", None)):
        reply = ask(endpoint, path, body)
        error = reply.body["error"]["type"]
        assert (reply.status, reply.headers["Retry-After"], error) == (503, "1", "ServiceUnavailableError")


def test_no_more_responses_are_pending_than_the_limit_and_they_are_refused_at_the_end(listen, monkeypatch):
    monkeypatch.setattr(module, "_MOST_PENDING", 3)
    endpoint = listen()
    endpoint.step(lambda *_: None, 0, 1)
    with ThreadPoolExecutor(2) as pool:
        replies = [pool.submit(ask, endpoint, CHAT, ASK) for _ in range(2)]
        wait_until(lambda: len(endpoint._waiting) == 2)
        # One is being generated, the other waits.
        assert endpoint.step(lambda *_: None, 0, 1) == 1
        assert ask(endpoint, CHAT, ASK | {"n": 2}).status == 503
        endpoint.close()
        assert [reply.result().status for reply in replies] == [503, 503]


def test_a_client_that_leaves_is_not_generated_for(listen):
    endpoint, asked = listen(), []
    endpoint.step(lambda *call: asked.append(call), 0, 0)
    text = json.dumps(ASK).encode()
    with socket.create_connection(("127.0.0.1", port_of(endpoint))) as client:
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
        )
        client.sendall(f"{head}\r\n\r\n".encode() + text)
        wait_until(lambda: endpoint._waiting)
        ((_, _, pending),) = endpoint._waiting
    wait_until(pending.cancelled)
    endpoint.step(lambda *call: asked.append(call), 0, 4)
    assert (asked, len(endpoint._waiting)) == ([], 0)


def test_a_faulty_engine_is_the_matter_of_the_loop_and_a_refusal_that_of_the_client(listen):
    endpoint = listen()
    endpoint.step(lambda *_: None, 0, 0)

    def refuse(*_: Any) -> None:
        raise EngineError("too long")

    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(ask, endpoint, CHAT, ASK | {"n": 2})
        wait_until(lambda: endpoint._waiting)
        endpoint.step(refuse, 0, 4)
        assert (reply.result().status, reply.result().body["error"]["message"]) == (400, "too long")


@pytest.mark.slow
def test_clients_that_send_no_whole_request_are_disconnected_and_others_are_answered(served, monkeypatch):
    monkeypatch.setattr(module, "_CLIENT_SECONDS", 1.0)
    monkeypatch.setattr(module, "_MOST_CONNECTIONS", 3)
    wait_until(lambda: not served._connections)
    with contextlib.ExitStack() as ending:
        slow = [ending.enter_context(socket.create_connection(("127.0.0.1", port_of(served)))) for _ in range(3)]
        for client, sent in zip(slow, (b"", b"POST / HTTP/1.1\r\nHo", b"GET / HTTP/1.1\r\nA: b\r\n"), strict=True):
            client.sendall(sent)
        fourth = ending.enter_context(socket.create_connection(("127.0.0.1", port_of(served))))
        assert fourth.recv(100).startswith(b"HTTP/1.1 503")
        assert [client.recv(100) for client in slow] == [b""] * 3
    wait_until(lambda: ask(served, "/v1/models").status == 200)


@pytest.mark.slow
def test_a_client_that_takes_no_answer_is_disconnected(served, monkeypatch):
    monkeypatch.setattr(module, "_CLIENT_SECONDS", 1.0)
    requests = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1_000_000
    with socket.create_connection(("127.0.0.1", port_of(served)), timeout=60) as client, pytest.raises(ConnectionError):
        client.sendall(requests)
    wait_until(lambda: not served._connections)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (f"POST {CHAT}", 411),
        (f"POST {CHAT}\nContent-Length: 99999999", 413),
        (f"POST {CHAT}\nContent-Length: -1", 411),
        (f"POST {CHAT}\nContent-Length: 2\nTransfer-Encoding: chunked", 411),
        (f"POST {CHAT}\nContent-Type: text/plain\nContent-Length: 2", 400),
        ("GET /other", 404),
        (f"GET {CHAT}", 405),
        ("PUT /v1/models", 405),
        ("OPTIONS /v1/models", 405),
        ("GET /v1/models\nHost: evil.example", 403),
        ("GET /v1/models\nHost: 127.0.0.1.evil.example:80", 403),
    ],
)
def test_other_requests_are_refused_without_reading_their_body(served, head, status):
    lines = head.split("\n")
    for default in ("Host: localhost", "Content-Type: application/json"):
        if not any(line.startswith(default[:5]) and "-L" not in line for line in lines):
            lines.append(default)
    with socket.create_connection(("127.0.0.1", port_of(served))) as client:
        client.sendall("\r\n".join([f"{lines[0]} HTTP/1.1", *lines[1:], "", ""]).encode())
        reply = client.makefile("rb").read()
    assert reply.startswith(f"HTTP/1.1 {status} ".encode())
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == status
    assert b"Access-Control" not in reply


def test_a_token_is_needed_if_there_is_one_and_then_any_host_is_answered(listen):
    endpoint = listen("0123456789abcdef")
    endpoint.step(lambda *_: None, 0, 0)
    for given in ("", "Bearer wrong", "Bearer 0123456789abcdeé", "Bearer "):
        reply = ask(endpoint, "/v1/models", Authorization=given)
        assert (reply.status, reply.body["error"]["type"]) == (401, "UnauthorizedError")
    reply = ask(endpoint, "/v1/models", Authorization="Bearer 0123456789abcdef", Host="node7")
    assert reply.status == 200
    assert "0123456789abcdef" not in json.dumps(reply.body)


def test_several_requests_take_one_connection(served):
    connection = http.client.HTTPConnection("127.0.0.1", port_of(served), timeout=60)
    ports = set()
    for _ in range(3):
        connection.request("POST", CHAT, json.dumps(ASK), {"Content-Type": "application/json"})
        assert connection.getresponse().read()
        ports.add(connection.sock.getsockname())
    connection.close()
    assert len(ports) == 1


def test_each_searcher_takes_the_first_free_port_and_without_one_the_run_goes_on(parts, monkeypatch):
    no_task: Any = None

    def opened() -> Endpoint | None:
        return open_endpoint(config, LoadedTask(no_task, parts[1]._renderer, parts[1]._stopping), lambda: "run 1")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = Config.model_validate({"model": {"path": str(EXAMPLE_MODEL)}, "search": {"serve": str(port)}})
        endpoints = [opened(), opened()]
        ports = [int(endpoint.url.rpartition(":")[2].removesuffix("/v1")) for endpoint in endpoints if endpoint]
        assert port < ports[0] < ports[1] < port + 64
        monkeypatch.setattr("tba.searcher.loop.ENDPOINT_PORTS", 1)
        assert opened() is None
    for endpoint in filter(None, endpoints):
        endpoint.close()
    with pytest.raises(ValueError, match=r"search.serve = 65536: no port has that number"):
        Config.model_validate({"search": {"serve": "65536"}})


def test_a_streamed_answer_is_one_event_that_openais_client_reads(served):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)
    asked = ASK | {"model": "policy", "temperature": 0, "logprobs": True, "extra_body": {"return_token_ids": True}}
    whole = client.chat.completions.create(**asked)
    (chunk,) = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    (choice,), (same,) = chunk.choices, whole.choices
    assert (choice.delta.role, choice.delta.content) == ("assistant", "64")
    assert (choice.token_ids, len(choice.logprobs.content)) == (same.token_ids, len(same.logprobs.content))
    assert (chunk.object, chunk.run, chunk.usage) == ("chat.completion.chunk", "run 1", whole.usage)
    refused = ask(served, GENERATE, {"token_ids": [5], "sampling_params": {}, "stream": True})
    assert (refused.status, refused.body["error"]["param"]) == (400, "stream")
