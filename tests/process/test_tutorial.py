"""The tutorials, typed as printed; `make test` types fewer steps."""

import json
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from urllib.request import urlopen

import pytest

from tba.common.system.process import PARENT_VARIABLE
from tba.tests.helpers.buffer import ask
from tba.tests.helpers.checks import wait_until
from tba.tests.process.conftest import ROOT, clean_environment, free_port
from tba.tests.runner import FULL_SIZE

BLOCK = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
SECONDS = 900
# What `make test` types in place of numbers of steps.
FEWER = {
    "/steps = 60/": "/steps = 6/",
    "/steps = 80/": "/steps = 8/",
    "/prompts_per_step = 32/": "/prompts_per_step = 8/",
}


@pytest.fixture
def shell(tmp_path):
    """Return a function that types commands in a directory that looks like a clone with its environment active."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    programs = tmp_path / "bin"
    programs.mkdir()
    python = shlex.quote(sys.executable)
    # Scripts, since a symbolic link to the interpreter of a virtual environment does not find its packages.
    for name, command in {"tba": f"{python} -m tba", "python": python}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (programs / name).chmod(0o755)
    # The parent of `tba` is the shell, not this process.
    environment = {name: value for name, value in clean_environment().items() if name != PARENT_VARIABLE}
    environment |= {"PATH": f"{programs}:{environment['PATH']}", "HOME": str(tmp_path)}
    tutorial = tmp_path / "tba-tutorial"

    def start(commands: str) -> subprocess.Popen[str]:
        # The first commands make the directory for the others.
        return subprocess.Popen(
            ["bash", "-e", "-c", commands], cwd=tutorial if tutorial.exists() else tmp_path, env=environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    return start


def test_the_commands_of_the_tutorial_train_a_model(shell, tmp_path):
    text, shown = (ROOT / "docs/tutorial.md").read_text(), ""
    for printed, fewer in () if FULL_SIZE else FEWER.items():
        assert printed in text
        text = text.replace(printed, fewer)
    for block in BLOCK.findall(text):
        if block.startswith("tba ui"):
            check_browser(shell, block)
            continue
        shown += typed(shell, block)
    assert "the model is in models/warm" in shown
    # `tba config show` shows what the reader has just changed.
    assert re.search(r"train\.steps +60? +tba\.toml", shown)
    evaluations = [
        json.loads(line) for line in (tmp_path / "tba-tutorial/runs/reverse/eval.jsonl").read_text().splitlines()
    ]
    by_step = {row["step"]: row["accuracy"] for row in evaluations}
    first, last = (60, 80) if FULL_SIZE else (6, 8)
    assert {0, first, last} <= by_step.keys()
    # The answers of the warm start.
    assert by_step[0] > 0.05
    if FULL_SIZE:
        assert by_step[last] > by_step[0] + 0.05
    assert (tmp_path / "tba-tutorial/models/reverse/model.safetensors").is_file()


def typed(shell, block: str) -> str:
    """Type a block of commands. Returns what they print."""
    process = shell(block)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, f"{block}{output}"
    return output


def test_the_commands_of_your_own_environment_train_on_its_episodes(shell, tmp_path):
    page = (ROOT / "docs/episodes.md").read_text()
    code, commands = (page.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("python", "bash"))
    (tmp_path / "hotter.py").write_text(code)
    lines = commands.replace("DIR", "runs/demo-game-start").splitlines()
    assert [line.split()[1] for line in lines] == ["task", "init", "generate", "run"]
    if not FULL_SIZE:
        lines[-1] += " --set train.steps=3"
    shown = typed(shell, "\n".join(["python examples/game/prepare.py --out runs/demo-game-start", *lines]))
    assert "turns per second" in shown
    assert re.search(r"\nend: (completed|max_turns|parse_error) after [123] turns?: reward [01]\n", shown)
    assert re.search(r"held-out greedy accuracy: \S+% before, \S+% after", shown)
    (database,) = tmp_path.glob("runs/*/buffer.sqlite")
    assert ask(database, "SELECT MAX(turns), COUNT(error) FROM trajectories") == [(3, 0)]


def check_browser(shell, command: str) -> None:
    """Start `tba ui` at a free port, wait for its page, and end it."""
    pytest.importorskip("starlette", reason="the extra ui is not installed")
    port = free_port()
    process = shell(f"exec {command.strip()} --port {port}")

    def served() -> bool:
        with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/r/reverse") as page:
            return "reverse" in page.read().decode()
        return False

    try:
        wait_until(served)
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0
