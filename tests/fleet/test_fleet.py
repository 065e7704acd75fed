"""Four nodes from nothing by deploy/ansible, and what happens to a fleet: each test continues where the last one ended.

Everything that is asserted of the run is read from its database on the node of the buffer.
"""

import json
import os
import re
import shutil
import sqlite3
import subprocess
import time
import zipfile
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tba.tests.helpers.nodes import Fleet, Node, wait_until
from tba.tests.helpers.source_files import ROOT

pytestmark = pytest.mark.timeout(3600)

FLEET = ROOT / "build/fleet"
WHEELS, PLAYBOOK = FLEET / "wheels", FLEET / "ansible/bin/ansible-playbook"
DATABASE = "var/lib/tba/runs/demo/buffer.sqlite"
# Steps without end, and searchers that wait for the trainer: the cores are those of four nodes and of Ansible.
SETTINGS = {
    "cpu_searchers = 2": "cpu_searchers = 1",
    "steps = 80": "steps = 1000000",
    "prompts_per_step = 32": "prompts_per_step = 8",
    "max_in_flight = 256": "max_in_flight = 32",
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
    wheels: Path = WHEELS
    measured: dict[str, float] = field(default_factory=dict)

    def describe(self, nodes: list[str], removed: tuple[str, ...] = ()) -> None:
        """Write the inventory: the buffer and the trainer on node0, a searcher on each of the others."""
        text = INVENTORY.format(
            nodes="\n".join(f"{name} tba_searchers=cpu" for name in nodes),
            removed="\n".join(removed),
            wheels=self.wheels,
        )
        for name, node in self.fleet.nodes.items():
            text = re.sub(rf"^{name}\b", f"{name} ansible_host={node.address}", text, flags=re.MULTILINE)
        (self.directory / "inventory.ini").write_text(text)

    def play(self, name: str, *options: str) -> tuple[int, str]:
        """Run a playbook. Returns how many tasks changed something, and what it printed."""
        started = time.monotonic()
        done = subprocess.run(
            [*self.fleet.inside, PLAYBOOK, "-i", self.directory / "inventory.ini", f"{name}.yml", *options],
            cwd=ROOT / "deploy/ansible",
            env=os.environ | {"ANSIBLE_SSH_ARGS": " ".join(self.fleet.ssh_options), "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        self.measured[" ".join([f"{len(self.measured)} {name}", *options])] = round(time.monotonic() - started, 1)
        (FLEET / "measured.json").write_text(json.dumps(self.measured, indent=1))
        results = [[int(number) for number in numbers] for _, *numbers in RECAP.findall(done.stdout)]
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert [numbers[1:] for numbers in results] == [[0, 0]] * len(results)
        return sum(changed for changed, *_ in results), done.stdout

    def query(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        path = self.fleet.nodes["node0"].root / DATABASE
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as database:
            return database.execute(sql, values).fetchall()

    def steps(self) -> int:
        try:
            return int(self.query("SELECT COUNT(trained_at) FROM batches")[0][0])
        except sqlite3.OperationalError:
            return 0

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
        lines = (self.fleet.nodes["node0"].root / DATABASE).with_name("metrics.jsonl").read_text().split("\n")[:-1]
        assert [json.loads(line)["step"] for line in lines] == list(range(len(lines)))


def main_pids(nodes: list[Node]) -> dict[str, list[str]]:
    """Return the process ids of the units of each node."""
    units = ["tba-buffer.service", "tba-train@cpu.service", "tba-search@cpu.service"]
    show = ["systemctl", "show", "--property=MainPID", "--value", *units]
    return {node.name: node.run(*show).stdout.split() for node in nodes}


def is_active(node: Node, unit: str) -> bool:
    return node.run("systemctl", "is-active", unit, check=False).stdout.strip() == "active"


@pytest.fixture(scope="module")
def site(fleet, tmp_path_factory):
    if not PLAYBOOK.exists() or not list(WHEELS.glob("tba-*.whl")):
        pytest.skip("`make test-fleet` makes the wheelhouse and installs Ansible")
    directory = tmp_path_factory.mktemp("site")
    text = (ROOT / "examples/arithmetic/demo.toml").read_text()
    for old, new in SETTINGS.items():
        assert old in text
        text = text.replace(old, new)
    (directory / "tba.toml").write_text(text)
    shutil.copytree(ROOT / "examples/arithmetic/model", directory / "examples/arithmetic/model")
    for number in range(4):
        fleet.add(f"node{number}")
    site = Site(fleet, directory)
    site.describe(["node1", "node2", "node3"])
    return site


def test_four_nodes_train_after_one_command(site):
    started = time.monotonic()
    _, printed = site.play("site")
    wait_until("step 1", lambda: site.steps() >= 1, 300)
    site.measured["seconds to step 1"] = round(time.monotonic() - started, 1)
    assert printed.count("none failed") == 4
    for node in ("node1", "node2", "node3"):
        site.wait_for_rows(node)
    for node in site.fleet.nodes.values():
        modes = node.run("stat", "--format=%U %a", "/etc/tba/keys/node.key", "/var/lib/tba", "/etc/tba/tba.env").stdout
        assert modes.split("\n")[:3] == ["root 600", "tba 700", "root 640"]
    assert len({node.run("cat", "/etc/tba/keys/node.key").stdout for node in site.fleet.nodes.values()}) == 4


def test_a_second_run_changes_nothing(site):
    before = main_pids([*site.fleet.nodes.values()])
    assert site.play("site", "--check")[0] == 0
    assert site.play("site")[0] == 0
    assert main_pids([*site.fleet.nodes.values()]) == before


def test_the_status_of_all_units_is_one_table(site):
    _, printed = site.play("status")
    rows = [line.split()[:3] for line in printed.splitlines() if re.match(r" +node\d ", line)]
    found = sorted(rows)
    assert found == [
        ["node0", "tba-buffer", "active"],
        ["node0", "tba-train@cpu", "active"],
        *(["node" + number, "tba-search@cpu", "active"] for number in "123"),
    ]


def test_a_node_that_is_cut_off_for_30_seconds_loses_nothing(site):
    node = site.fleet.nodes["node2"]
    node.cut()
    until = time.monotonic() + 30
    site.wait_for_steps()
    # The cut itself: there is no event to wait for.
    time.sleep(max(0.0, until - time.monotonic()))
    node.connect()
    site.wait_for_rows("node2")
    site.check_history()
    assert is_active(node, "tba-search@cpu")


def test_a_power_failure_of_the_buffers_node_loses_no_row_and_all_go_on(site):
    node, before = site.fleet.nodes["node0"], site.rows()
    others = main_pids([site.fleet.nodes["node1"], site.fleet.nodes["node3"]])
    node.fail()
    node.start()
    site.wait_for_steps()
    site.wait_for_rows("node3")
    assert before <= site.rows()
    site.check_history()
    assert main_pids([site.fleet.nodes["node1"], site.fleet.nodes["node3"]]) == others


def test_a_node_is_removed_and_another_one_joins_by_the_inventory(site):
    before = main_pids([site.fleet.nodes["node0"], site.fleet.nodes["node1"]])
    site.describe(["node1", "node2"], removed=("node3",))
    site.play("site")
    gone = site.fleet.nodes["node3"]
    assert not is_active(gone, "tba-search@cpu")
    assert gone.run("ls", "/etc/tba/keys/node.key", check=False).returncode != 0
    site.fleet.remove("node3")
    site.fleet.add("node4")
    site.describe(["node1", "node2", "node4"])
    site.play("site")
    site.wait_for_rows("node4")
    site.wait_for_steps()
    admitted = site.fleet.nodes["node0"].run("ls", "/etc/tba/keys/authorized").stdout.split()
    assert admitted == ["node0.pub", "node1.pub", "node2.pub", "node4.pub"]
    # Nothing that was there has been restarted.
    assert main_pids([site.fleet.nodes["node0"], site.fleet.nodes["node1"]]) == before
    site.check_history()


def another_release(directory: Path) -> Path:
    """Return a wheelhouse with a release of tba that speaks another protocol."""
    shutil.copytree(WHEELS, directory, copy_function=os.link)
    wheel = next(directory.glob("tba-*.whl"))
    wheel.unlink()
    name = "tba/common/wire/messages.py"
    with zipfile.ZipFile(WHEELS / wheel.name) as old, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            text = old.read(entry)
            if entry.filename == name:
                text, changed = re.subn(rb"^PROTOCOL_VERSION = (\d+)", rb"PROTOCOL_VERSION = 1\1", text, flags=re.M)
                assert changed == 1
            new.writestr(entry, text)
    return directory


def test_an_update_to_another_protocol_loses_no_trajectory(site, tmp_path):
    before, nodes = site.rows(), [*site.fleet.nodes.values()]
    old = {node.run("readlink", "/opt/tba").stdout for node in nodes}
    site.wheels = another_release(FLEET / f"wheels-{os.getpid()}")
    try:
        site.describe(["node1", "node2", "node4"])
        site.play("update")
        site.wait_for_steps()
        for name in ("node1", "node2", "node4"):
            site.wait_for_rows(name)
        assert before <= site.rows()
        site.check_history()
        new = {node.run("readlink", "/opt/tba").stdout for node in nodes}
        assert (len(old), len(new), old & new) == (1, 1, set())
        # No earlier release is left.
        assert {node.run("sh", "-c", "ls -d /opt/tba-*").stdout for node in nodes} == new
        # No searcher has left rows behind.
        left = ["find", "/var/lib/tba/runs/demo/spool/aside", "-type", "f"]
        assert [node.run(*left, check=False).stdout for node in nodes] == [""] * 4
    finally:
        shutil.rmtree(site.wheels)


def test_stop_and_teardown_keep_the_data_unless_told_otherwise(site):
    site.play("stop")
    nodes = [*site.fleet.nodes.values()]
    assert [node.run("pgrep", "-u", "tba", check=False).stdout for node in nodes] == [""] * 4
    site.check_history()
    rows = site.rows()
    site.play("teardown", "--extra-vars", "tba_wheelhouse=")
    for node in nodes:
        left = node.run(
            "sh", "-c", "ls -d /etc/tba /opt/tba* /etc/systemd/system/tba* /etc/systemd/system/*/tba*", check=False
        )
        assert left.stdout == ""
        assert "tba" not in node.run("cat", "/etc/hosts").stdout
    assert site.rows() == rows
    site.play("teardown", "--extra-vars", "tba_remove_data=true")
    assert [node.run("ls", "/var/lib/tba", check=False).stdout for node in nodes] == [""] * 4
    assert [node.run("id", "tba", check=False).returncode for node in nodes] == [1] * 4
