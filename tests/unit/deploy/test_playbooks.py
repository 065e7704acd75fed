"""What site.yml does with a unit: its shell runs here, on a directory in place of the node, with another systemctl."""

import json
import os
import re
import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

import jinja2
import pytest

from tba.cli.inspection import for_machines
from tba.common.run_status import Facts
from tba.tests.helpers.statuses import make_status

# Packages of other extras bring it.
yaml = pytest.importorskip("yaml")
ROLE = Path(__file__).parents[3] / "deploy/ansible/roles/tba"
UNITS = {
    "buffer": "tba-buffer.service",
    "trainer": "tba-train@7.service",
    "searchers": "tba-search@0-6.service",
}
START = time.time() - 1000


class Node:
    """The files of a node, older than the start of its units, and what systemd and the buffer say."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for path in ("opt/tba", "etc/tba/tba.toml", *(f"etc/systemd/system/{self.file(unit)}" for unit in UNITS)):
            self.touch(path, START - 500)
        self.put(
            "systemctl", 'for word; do case $word in --property=*) grep "^${word#*=}=" %s | cut -d= -f2;; esac; done'
        )
        self.put("systemd-run", "cat %s")
        self.describe()
        self.finish(False)

    @staticmethod
    def file(role: str) -> str:
        return re.sub("@.*", "@.service", UNITS[role])

    def touch(self, path: str, at: float = START + 500) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        os.utime(file, (at, at))

    def put(self, command: str, text: str) -> None:
        """Install a command that reads a file of its own."""
        file = self.root / command
        file.write_text(f"#!/bin/sh\n{text % shlex.quote(f'{file}.said')}\n")
        file.chmod(0o755)

    def describe(self, state: str = "active", result: str = "success") -> None:
        started = time.strftime("%a %Y-%m-%d %H:%M:%S UTC", time.gmtime(START))
        said = f"ActiveState={state}\nResult={result}\nExecMainStartTimestamp={started}\n"
        (self.root / "systemctl.said").write_text(said)

    def finish(self, finished: bool) -> None:
        said = for_machines(Facts(make_status(8, finished=finished)))
        (self.root / "systemd-run.said").write_text(json.dumps(said))

    def wanted(self, role: str) -> str:
        """Return the state in which a playbook wants the unit of a role, empty for one that is started if need be."""
        variables: dict[str, Any] = {"tba_role": role, "tba_unit": UNITS[role], "tba_files": []}
        templates = jinja2.Environment()
        templates.filters["regex_replace"] = lambda text, old, new: re.sub(old, new, text)
        values = yaml.safe_load((ROLE / "vars/main.yml").read_text())
        for name in ("tba_state", "tba_as_a_role", "tba_read"):
            value = values.get(name)
            variables[name] = templates.from_string(value).render(variables) if isinstance(value, str) else value
        (task,) = [task for task in yaml.safe_load((ROLE / "tasks/start.yml").read_text()) if "find" in str(task)]
        script = templates.from_string(task["ansible.builtin.shell"]).render(variables)
        script = re.sub(r"(?<![\w.])/(opt|etc|var)/", rf"{self.root}/\1/", script)
        path = f"{self.root}:{os.environ['PATH']}"
        done = subprocess.run(["sh", "-c", script], env={"PATH": path}, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return done.stdout.strip()


@pytest.fixture
def node(tmp_path) -> Node:
    return Node(tmp_path)


def all_wanted(node: Node) -> dict[str, str]:
    return {role: node.wanted(role) for role in UNITS}


def test_a_unit_is_restarted_only_if_its_own_file_has_changed_and_all_if_the_configuration_has(node):
    assert all_wanted(node) == dict.fromkeys(UNITS, "")
    for role in UNITS:
        node.touch(f"etc/systemd/system/{node.file(role)}")
        assert all_wanted(node) == dict.fromkeys(UNITS, "") | {role: "restarted"}
        node.touch(f"etc/systemd/system/{node.file(role)}", START - 500)
    node.touch("etc/tba/tba.toml")
    assert all_wanted(node) == dict.fromkeys(UNITS, "restarted")


def test_trainer_and_searchers_of_a_finished_run_stay_as_they_ended_until_the_configuration_changes(node):
    node.describe("inactive")
    # By stop.yml, before the last step.
    assert all_wanted(node) == dict.fromkeys(UNITS, "")
    node.finish(True)
    assert all_wanted(node) == {"buffer": "", "trainer": "stopped", "searchers": "stopped"}
    node.touch("etc/tba/tba.toml")
    assert all_wanted(node) == dict.fromkeys(UNITS, "restarted")


def test_what_runs_or_has_failed_is_left_to_systemd_also_when_the_run_is_finished(node):
    node.finish(True)
    for state in ("active", "activating", "failed"):
        node.describe(state, "exit-code" if state == "failed" else "success")
        assert all_wanted(node) == dict.fromkeys(UNITS, "")
