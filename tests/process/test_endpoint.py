"""A searcher with `search.serve`, asked by OpenAI's client while it searches and while it is paused."""

import itertools
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tba.tests.helpers.announcer import Announcer
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.engines import cpu_engine
from tba.tests.process.conftest import arithmetic, free_port

pytestmark = [pytest.mark.slow, pytest.mark.torch]
PROMPT = [6, 11, 13, 6, 9, 15]
TOKEN = "0123456789abcdef"


@pytest.fixture
def endless(example_model, tmp_path) -> Path:
    """The example model, whose responses end only at their length."""
    directory = tmp_path / "endless"
    shutil.copytree(example_model, directory)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(content | {"eos_token_id": None, "max_position_embeddings": 4096}))
    names = directory / "tokenizer_config.json"
    names.write_text(json.dumps(json.loads(names.read_text()) | {"eos_token": None}))
    return directory


def client_of(port: int) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=TOKEN, max_retries=0)


def spans_until(model: str, answer: Callable[..., Any]) -> list[Any]:
    """Ask until a model answers; return the version spans of all answers."""
    spans = []
    while True:
        one = answer(max_tokens=40)
        spans.append(one.choices[0].version_spans)
        if one.model == model:
            return spans


def test_an_agent_is_answered_with_the_versions_and_log_probabilities_of_its_tokens(
    make_config, start_tba, endless, tmp_path
):
    port = free_port()
    config = arithmetic(
        model={"path": str(endless)}, search={"serve": port, "serve_token": TOKEN}, train={"prompts_per_step": 1}
    )
    run = make_config(**config)
    buffer = start_tba("buffer", "serve", "--config", run.file)
    start_tba("search", "--config", run.file)
    client = client_of(port)
    announcer = Announcer(run.address, endless, tmp_path / "snapshots")
    import openai

    def answer(**changes: Any) -> Any:
        body = {"return_token_ids": True} | changes
        said = [{"role": "user", "content": "38+36="}]
        return client.chat.completions.create(
            model="policy", messages=said, max_tokens=body.pop("max_tokens", 12), logprobs=True, extra_body=body
        )

    def refusal() -> int | None:
        try:
            answer()
        except openai.APIConnectionError:
            return None
        except openai.APIStatusError as error:
            return error.status_code
        return 200

    wait_until(lambda: refusal() == 503, what="the endpoint listens, and there are no weights")
    announcer.announce(1)
    announcer.wait_for(lambda s: s.weights_version == 1 and s.trajectories > 0)
    first = answer(seed=3)
    choice = first.choices[0]
    assert (first.model, first.prompt_token_ids, choice.version_spans) == ("policy@v1", PROMPT, [[0, 12, 1]])
    expected = cpu_engine(endless).score([[*PROMPT, *choice.token_ids]])[0][len(PROMPT) - 1 :]
    np.testing.assert_allclose([one.logprob for one in choice.logprobs.content], expected, atol=1e-4)
    assert answer(seed=3).choices[0].token_ids == choice.token_ids
    spans: list[Any] = []
    for version in itertools.count(2):
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(spans_until, f"policy@v{version}", answer) for _ in range(4)]
            announcer.announce(version)
        spans = [one for each in asked for one in each.result() if len(one) > 1]
        # At the moment of the swap none of them may have been in flight.
        if spans:
            break
    assert all(one == [[0, one[0][1], version - 1], [one[0][1], 40, version]] for one in spans)
    announcer.client.close()
    # The buffer is away.
    buffer.terminate()
    buffer.wait(60)
    assert answer().model == client.models.list().data[0].id == f"policy@v{version}"
    written = [file for file in tmp_path.rglob("*") if file.is_file() and file.name != "run.toml"]
    assert run.database in written
    assert not [file for file in written if TOKEN.encode() in file.read_bytes()]
