"""A fleet that deploy/ansible has made, and its run of examples/arithmetic, read from its database.

`make fleet-packages` makes the wheelhouse of the nodes, and installs Ansible.
"""

import json
import os
import re
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tba.tests.helpers.buffer import ask, steps_trained
from tba.tests.helpers.nodes import Fleet, Node, wait_until
from tba.tests.helpers.source_files import ROOT

FLEET = ROOT / "build/fleet"
WHEELS, PLAYBOOK = FLEET / "wheels", FLEET / "ansible/bin/ansible-playbook"
DATABASE = "var/lib/tba/runs/demo/buffer.sqlite"
# Steps without end, and searchers that wait for the trainer: the cores are those of four nodes and of Ansible.
SETTINGS = {
    "cpu_searchers = 2": "cpu_searchers = 1",
    "steps = 80": "steps = 1000000",
    "prompts_per_step = 32": "prompts_per_step = 8",
    "max_in_flight = 256": "max_in_flight = 32",
    "keep_snapshot_every = 10": "keep_snapshot_every = 0",
    "recency_fraction = 0.95": "recency_fraction = 0.95\nmax_staleness = 4",
}
RECAP = re.compile(r"^(\S+) +: ok=\d+ +changed=(\d+) +unreachable=(\d+) +failed=(\d+)", re.MULTILINE)
INVENTORY = """[buffer]
node0 tba_trainer=cpu
[nodes]
{nodes}
[removed]
{removed}
[all:vars]
ansible_user=root
tba_wheelhouse={wheels}
tba_package="tba[train]"
tba_files=["examples/arithmetic/model"]
tba_ready_seconds=600
tba_environment={{"OMP_NUM_THREADS": "1"}}
"""


@dataclass
class Site:
    """A fleet, its inventory, and the run on it."""

    fleet: Fleet
    directory: Path
    # Where `note` writes.
    results: Path
    wheels: Path = WHEELS
    measured: dict[str, float] = field(default_factory=dict)

    @property
    def database(self) -> Path:
        """The database of the run, on the node of the buffer."""
        return self.fleet.nodes["node0"].root / DATABASE

    def note(self, name: str, value: float) -> None:
        """Add a number to the results."""
        self.measured[name] = round(value, 1)
        self.results.write_text(json.dumps(self.measured, indent=1))

    def describe(self, nodes: list[str], removed: tuple[str, ...] = (), changes: dict[str, str] | None = None) -> None:
        """Write the inventory: the buffer and the trainer on node0, a searcher on each of the others, with changes."""
        text = INVENTORY.format(
            nodes="\n".join(f"{name} tba_searchers=cpu" for name in nodes),
            removed="\n".join(removed),
            wheels=self.wheels,
        )
        for name, node in self.fleet.nodes.items():
            text = re.sub(rf"^{name}\b", f"{name} ansible_host={node.address}", text, flags=re.MULTILINE)
        for old, new in (changes or {}).items():
            assert old in text
            text = text.replace(old, new)
        (self.directory / "inventory.ini").write_text(text)

    def play(self, name: str, *options: str) -> tuple[int, str]:
        """Run a playbook. Returns how many tasks changed something, and what it printed."""
        done = self.try_to_play(name, *options)
        results = [[int(number) for number in numbers] for _, *numbers in RECAP.findall(done.stdout)]
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert [numbers[1:] for numbers in results] == [[0, 0]] * len(results)
        return sum(changed for changed, *_ in results), done.stdout

    def try_to_play(self, name: str, *options: str) -> subprocess.CompletedProcess[str]:
        """Run a playbook that may fail."""
        started = time.monotonic()
        # As Ansible's own default, one login for all tasks: else logins are most of the time. Not longer than the play.
        options_of_ssh = [*self.fleet.ssh_options, "-o", "ControlMaster=auto", "-o", "ControlPersist=10s"]
        variables = {
            "ANSIBLE_SSH_ARGS": " ".join(options_of_ssh),
            "ANSIBLE_SSH_CONTROL_PATH_DIR": str(self.directory / "ssh"),
            "LC_ALL": "C.UTF-8",
        }
        done = subprocess.run(
            [*self.fleet.inside, PLAYBOOK, "-i", self.directory / "inventory.ini", f"{name}.yml", *options],
            cwd=ROOT / "deploy/ansible",
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        self.note(" ".join([f"{len(self.measured)} {name}", *options]), time.monotonic() - started)
        return done

    def query(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        return ask(self.database, sql, *values)

    def steps(self) -> int:
        return steps_trained(self.database)

    def wait_for_steps(self, more: int = 3) -> None:
        """Wait until training goes on."""
        seen = self.steps()
        wait_until(f"{more} steps after step {seen}", lambda: self.steps() >= seen + more, 300)

    def wait_for_rows(self, node: str) -> None:
        """Wait until a node delivers."""
        sql = "SELECT COUNT(*) FROM trajectory_rows t JOIN senders s ON s.id = t.sender WHERE s.host = ?"
        seen = self.query(sql, node)[0][0]
        wait_until(f"rows of {node}", lambda: self.query(sql, node)[0][0] > seen, 300)

    def rows(self) -> set[tuple[int, int]]:
        """Return the sender and the number of each row."""
        return set(self.query("SELECT sender, sequence FROM trajectory_rows"))

    def check_history(self) -> None:
        """Check that no row is missing and no step is missing or repeated."""
        assert self.query("PRAGMA integrity_check") == [("ok",)]
        # Each sender numbers its rows from 0, so a gap is a row that was lost.
        assert (
            self.query(
                """SELECT s.sender, COUNT(*), MAX(t.sequence) FROM trajectory_rows t JOIN senders s ON s.id = t.sender
                   GROUP BY s.id HAVING COUNT(*) != MAX(t.sequence) + 1"""
            )
            == []
        )
        steps = [step for (step,) in self.query("SELECT step FROM batches WHERE trained_at IS NOT NULL ORDER BY step")]
        assert steps == list(range(len(steps)))
        # The trainer has written the metrics of each step once, also of those that it repeated from a checkpoint.
        lines = self.database.with_name("metrics.jsonl").read_text().split("\n")[:-1]
        assert [json.loads(line)["step"] for line in lines] == list(range(len(lines)))


def main_pids(nodes: list[Node]) -> dict[str, list[str]]:
    """Return the process ids of the units of each node."""
    units = ["tba-buffer.service", "tba-train@cpu.service", "tba-search@cpu.service"]
    show = ["systemctl", "show", "--property=MainPID", "--value", *units]
    return {node.name: node.run(*show).stdout.split() for node in nodes}


def is_active(node: Node, unit: str) -> bool:
    return node.run("systemctl", "is-active", unit, check=False).stdout.strip() == "active"
