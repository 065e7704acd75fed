"""An agent behind OpenEnv's capture server becomes a row with the tokens that the endpoint served.

It needs OpenEnv as tests/helpers/openenv.py has it, and openai, fastapi and uvicorn.
"""

import json
import shutil
import urllib.request
from typing import Any

import numpy as np
import pytest

from tba.tests.conftest import EXAMPLE_MODEL
from tba.tests.helpers import openenv
from tba.tests.helpers.checks import wait_until
from tba.tests.process.conftest import arithmetic, free_port
from tba.tests.process.test_agent_example import TEMPLATE, serves

pytestmark = [
    *(pytest.mark.slow, pytest.mark.torch, pytest.mark.needs("openai", "fastapi", "uvicorn")),
    pytest.mark.skipif(not openenv.is_there(), reason="openenv is not installed (tests/helpers/openenv.py)"),
]
# Its own program, in a process of its own: it ends with connections that are open.
CAPTURE = "from tba.tests.helpers import openenv; openenv.module('capture.server').main()"


def get(url: str, body: Any = None) -> Any:
    content = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, content, {"Content-Type": "application/json"})) as reply:
        return json.load(reply)


def test_a_trace_of_openenvs_capture_is_a_row_of_the_tokens_and_versions_that_were_served(
    make_config, start_tba, start_script, serve_weights, tba_here, tmp_path
):
    from openai import OpenAI

    model = shutil.copytree(EXAMPLE_MODEL, tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    address, port = f"127.0.0.1:{free_port()}", free_port()
    run = make_config(
        **arithmetic(model={"path": str(model)}, search={"serve": address}, train={"prompts_per_step": 1})
    )
    announcer = serve_weights(run)
    start_tba("search", "--config", run.file)
    announcer.wait_for(lambda searcher: searcher.weights_version == 0)
    url, upstream = f"http://127.0.0.1:{port}", {"llm_url": f"http://{address}", "model": "policy"}
    start_script(CAPTURE, "--port", str(port), "--llm-url", upstream["llm_url"], "--model", upstream["model"])
    wait_until(lambda: serves(f"{url}/v1"))
    session = get(f"{url}/sessions", {**upstream, "purpose": "train", "sampling": {"temperature": 1.0}})
    messages: list[Any] = [{"role": "user", "content": "38+36="}]
    served = []
    with OpenAI(base_url=f"{url}/v1", api_key=session["session_id"], max_retries=0) as agent:
        for version in (0, 0, 1):
            if version:
                announcer.announce(version)
                announcer.wait_for(lambda searcher: searcher.weights_version == 1)
            answer: Any = agent.chat.completions.create(model="any", messages=messages, max_tokens=6)
            choice = answer.choices[0]
            assert choice.version_spans == [[0, len(choice.token_ids), version]]
            served.append((answer.prompt_token_ids, choice.token_ids, choice.version_spans, choice.logprobs.content))
            messages += [choice.message, {"role": "user", "content": "+1="}]
    entries = get(f"{url}/sessions/{session['session_id']}/trace_entries")["entries"]
    entries[-1]["metadata"] |= {"verify": {"env_reward": 1.0}, "prompt_key": "a"}
    trace = openenv.module("training").TrainingTrace.from_entries(entries).model_dump_json()
    (tmp_path / "trace.jsonl").write_text(trace + "\n")
    where = "--config", run.file
    assert tba_here("buffer", "import", str(tmp_path / "trace.jsonl"), *where).exit_code == 0
    out = str(tmp_path / "out.jsonl")
    shown = tba_here("buffer", "export", out, "--format", "openenv", "--where", "searcher LIKE 'import.%'", *where)
    assert shown.exit_code == 0
    turns = json.loads((tmp_path / "out.jsonl").read_text())["turns"]
    for turn, (prompt, sampled, spans, logprobs) in zip(turns, served, strict=True):
        assert (turn["prompt_token_ids"], turn["completion_token_ids"]) == (prompt, sampled)
        assert turn["response"]["choices"][0]["version_spans"] == spans
        np.testing.assert_allclose(turn["per_token_logps"], [one.logprob for one in logprobs], atol=1e-6)
