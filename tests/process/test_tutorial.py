"""The tutorial, typed as printed; `make test` types fewer steps. test_game.py types the page on episodes."""

import json
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from urllib.request import urlopen

import pytest

from tba.common.system.process import PARENT_VARIABLE
from tba.tests.helpers.checks import wait_until
from tba.tests.process.conftest import ROOT, clean_environment, free_port
from tba.tests.runner import FULL_SIZE

BLOCK = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
# A command that starts no other. It is called in this process, which has torch already.
ALONE = re.compile(r"^(tba (?!run|ui|config).*\n)", re.MULTILINE)
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


def test_the_commands_of_the_tutorial_train_a_model(shell, tba_here, tmp_path, monkeypatch):
    text, shown = (ROOT / "docs/tutorial.md").read_text(), ""
    for printed, fewer in () if FULL_SIZE else FEWER.items():
        assert printed in text
        text = text.replace(printed, fewer)
    for block in BLOCK.findall(text):
        if block.startswith("tba ui"):
            check_browser(shell, block)
            continue
        shown += "".join(typed(shell, tba_here, commands) for commands in ALONE.split(block) if commands)
        monkeypatch.chdir(tmp_path / "tba-tutorial")
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


def typed(shell, tba_here, commands: str) -> str:
    """Type commands. Returns what they print."""
    if ALONE.match(commands):
        done = tba_here(*shlex.split(commands)[1:])
        assert done.exit_code == 0, f"{commands}{done.message}"
        return done.output + done.message
    process = shell(commands)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, f"{commands}{output}"
    return output


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
