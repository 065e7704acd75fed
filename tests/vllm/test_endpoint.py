"""The endpoint on a real vLLM, whose stop strings are those of a request."""

import json
import threading
import urllib.request
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tba.common.config import Config
from tba.common.rendering import PromptRenderer
from tba.searcher.endpoint import Completions, Endpoint
from tba.searcher.engines.engine import GenerationRequest
from tba.searcher.engines.stopping import Stopping

pytest.importorskip("vllm", reason="vLLM is not installed")

PROMPT = [7, 3, 200, 41]


def post(endpoint: Endpoint, settings: dict[str, Any]) -> Any:
    body = json.dumps({"token_ids": PROMPT, "sampling_params": settings | {"max_tokens": 20, "logprobs": 0}}).encode()
    url = endpoint.url.replace("/v1", "/inference/v1/generate")
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)["choices"][0]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One letter for each token."""
    bare = Tokenizer(models.WordLevel({chr(0x4E00 + n): n for n in range(256)}, unk_token="一"))
    bare.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=bare)


def test_requests_with_seeds_and_stops_of_their_own_share_a_batch_of_vllm(lab, old, tokenizer):
    engine = lab.engine(old, tokenizer=tokenizer, serve="8400")
    renderer = PromptRenderer(tokenizer, Config().task)
    completions = Completions(Config(), renderer, Stopping(tokenizer, (), ()), None, lambda: "")
    endpoint = Endpoint("127.0.0.1", 0, token="", completions=completions)
    waiting: dict[int, Any] = {}
    over = threading.Event()

    def ask(ids: Any, sampling: Any, on_done: Any) -> None:
        number = len(waiting) + 1
        waiting[number] = on_done
        engine.submit(GenerationRequest(number, ids, sampling, first=True))

    endpoint.step(ask, 0, 4)

    def run() -> None:
        while not over.is_set():
            if not endpoint.step(ask, 0, 4):
                over.wait(0.01)
            for generation in engine.step():
                waiting[generation.id](generation)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        whole = post(endpoint, {"seed": 3})
        ids = whole["token_ids"]
        expected = lab.response_logprobs(old, PROMPT, ids)
        np.testing.assert_allclose([one["logprob"] for one in whole["logprobs"]["content"]], expected, atol=1e-4)
        assert (whole["finish_reason"], whole["version_spans"]) == ("length", [[0, 20, 0]])
        text = tokenizer.decode([ids[9], ids[10]])
        by_text, by_id = (
            post(endpoint, {"seed": 3, "stop": text}),
            post(endpoint, {"seed": 3, "stop_token_ids": [ids[4]]}),
        )
        assert (by_text["token_ids"], by_text["stop_reason"]) == (ids[:11], text)
        assert (by_id["token_ids"], by_id["stop_reason"]) == (ids[: ids.index(ids[4]) + 1], ids[4])
    finally:
        over.set()
        thread.join()
        endpoint.close()
