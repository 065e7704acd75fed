"""The agent of examples/agent, as a process of its own, trains the policy that it asks."""

import json
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from tba.tests.conftest import EXAMPLE_MODEL
from tba.tests.helpers.checks import wait_until
from tba.tests.process.conftest import ROOT, arithmetic, clean_environment, free_port

# The agent, a process of its own, needs it. It is in no extra of tba.
pytest.importorskip("openai", reason="openai is not installed: `pip install openai`")
# The end token stays in the history, so that each question extends what was sampled before it.
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"


def serves(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/models", timeout=10) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def test_the_example_agent_trains_the_policy_that_it_asks(make_config, start_tba, tmp_path):
    model = shutil.copytree(EXAMPLE_MODEL, tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    address = f"127.0.0.1:{free_port()}"
    run = make_config(
        **arithmetic(
            model={"path": str(model)},
            task={"limit": 4, "held_out_limit": 2},
            buffer={"dedup": False},
            search={"serve": address},
            train={"steps": 5000, "prompts_per_step": 4},
        )
    )
    start_tba("run", run.file)
    wait_until(lambda: serves(f"http://{address}/v1"))
    command = [sys.executable, ROOT / "examples/agent/agent.py", f"http://{address}/v1", run.file, "1", "4"]
    agent = subprocess.run(command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=300)
    assert agent.returncode == 0, agent.stderr
    assert re.search(r"round 0: won \d+ of 40\n40 rows in \S+\.jsonl: 40 new in run test", agent.stdout)
    games = "FROM trajectories t JOIN payloads ON trajectory = t.id WHERE t.searcher LIKE 'import.%'"
    columns = "COUNT(*), COUNT(t.error), COUNT(DISTINCT t.prompt), MAX(t.turns)"
    assert run.query(f"SELECT {columns} {games}") == [(40, 0, 10, 4)]
    assert run.query(f"SELECT COUNT(*) {games} AND t.policy_version < 0") == [(0,)]
    wait_until(
        lambda: run.query(f"SELECT 1 FROM consumption WHERE trajectory IN (SELECT t.id {games}) AND NOT skipped")
    )
