"""A reward model behind vLLM's own server: the scores are those of the same classifier here, by all of its routes."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys

import pytest

from tba.common.config import RewardModelSection
from tba.common.errors import HttpRefused
from tba.searcher.scoring.classifier import RewardModel
from tba.searcher.scoring.http_model import HttpModel
from tba.searcher.tasks.task import Prompt
from tba.tests.helpers.classifiers import make_classifier

# Uses only characters in the vocabulary of the example's tokenizer.
TEMPLATE = "{% for message in messages %}{{ '+' if message.role == 'user' else '=' }}{{ message.content }}{% endfor %}"
PAIRS = [("1+2=", "3"), ("12+34=", "46"), ("9+8=", "17")]
START_SECONDS = 500.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # Heads of dimension 32, the smallest that vLLM's CPU attention supports.
    return make_classifier(tmp_path_factory.mktemp("classifier"), chat_template=TEMPLATE, hidden_size=64)


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--runner", "pooling", "--dtype", "float32", "--enforce-eager", "--host", "127.0.0.1"]
    # The command `vllm` needs a package of that name, and the CPU build has another one.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *options]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"},
        )
        url = f"http://127.0.0.1:{port}"
        try:
            asyncio.run(scores(url, [("", "1")], START_SECONDS))
            yield url
        finally:
            server.terminate()
            server.wait()


async def scores(url, pairs, seconds=60.0, **keys):
    async with contextlib.aclosing(HttpModel(RewardModelSection(url=url, **keys), "")) as model:
        return [await model.score(Prompt("", prompt), response, seconds=seconds) for prompt, response in pairs]


@pytest.mark.parametrize("keys", [{}, {"api": "pooling"}, {"template": "chat"}])
def test_the_scores_of_vllm_are_those_of_the_classifier_here(url, model, keys):
    here = RewardModel(
        model, RewardModelSection(path=str(model), template=keys.get("template", "concatenation")), "cpu"
    )
    expected = [here.score([here.encode(*pair)], lambda *_: None)[0] for pair in PAIRS]
    assert asyncio.run(scores(url, PAIRS, **keys)) == pytest.approx(expected, abs=1e-4)


def test_the_route_for_pairs_scores_and_what_vllm_refuses_is_an_error(url):
    assert len(set(asyncio.run(scores(url, PAIRS, api="score")))) == len(PAIRS)
    with pytest.raises(HttpRefused, match=r"status 400: .*128"):
        asyncio.run(scores(url, [("1" * 200, "2")]))
    with pytest.raises(HttpRefused, match=r"status 404: .*does not exist"):
        asyncio.run(scores(url, PAIRS, served_model="another"))
