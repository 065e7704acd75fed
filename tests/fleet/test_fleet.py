"""Four nodes from nothing by deploy/ansible, and what happens to a fleet: each test continues where the last one ended.

Everything that is asserted of the run is read from its database on the node of the buffer.
"""

import os
import re
import shutil
import threading
import time
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tba.tests.helpers.nodes import wait_until
from tba.tests.helpers.site import FLEET, RECAP, WHEELS, is_active, main_pids

pytestmark = pytest.mark.timeout(3600)

# /var/lib/tba is a file system of its own.
DISK_MIB = 8192
NODES = ["node1", "node2", "node3"]


def test_four_nodes_train_after_one_command(site):
    started = time.monotonic()
    _, printed = site.play("site")
    wait_until("step 1", lambda: site.steps() >= 1, 300)
    site.note("seconds to step 1", time.monotonic() - started)
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


def test_only_the_unit_whose_file_has_changed_is_restarted(site):
    nodes = [*site.fleet.nodes.values()]
    before = main_pids(nodes)
    for name, unit in (("node0", "tba-train@.service"), ("node2", "tba-search@.service")):
        site.fleet.nodes[name].run("touch", f"/etc/systemd/system/{unit}")
    assert site.play("site")[0] == 2
    after = main_pids(nodes)
    changed = {(name, n) for name, pids in before.items() for n, pid in enumerate(pids) if pid != after[name][n]}
    assert changed == {("node0", 1), ("node2", 2)}
    site.wait_for_steps()


@pytest.mark.parametrize(
    ("changes", "options", "sentence"),
    [
        pytest.param({" tba_trainer=cpu": ""}, (), "One node must have tba_trainer, and none has it", id="no trainer"),
        pytest.param(
            {"node1 ": "node1 tba_trainer=cpu "},
            (),
            "One node must have tba_trainer, and node0, node1 has it",
            id="two trainers",
        ),
        pytest.param(
            {"[buffer]": "[first]"}, (), "The group `buffer` of the inventory must have one host", id="no buffer"
        ),
        pytest.param(
            {"tba_searchers=cpu": "tba_searchers=0-"}, (), "tba_searchers of node1 must be cpu, all, one GPU", id="GPUs"
        ),
        pytest.param(
            {"tba_trainer=cpu": "tba_trainer=cpu tba_address=node0"},
            (),
            "set tba_address to the IP address by which others reach it, not node0",
            id="no address",
        ),
        pytest.param({}, ("--limit", "node1"), "Run this for all nodes, without --limit", id="some nodes"),
        pytest.param(
            {"tba_trainer=cpu": "tba_trainer=cpu ansible_host=127.0.0.9"},
            (),
            "node0, the node of the buffer, cannot be reached",
            id="no way to the buffer",
        ),
    ],
)
def test_an_inventory_that_cannot_work_is_refused_before_anything_stops(site, changes, options, sentence):
    before = main_pids([*site.fleet.nodes.values()])
    site.describe(NODES, changes=changes)
    done = site.try_to_play("site", *options)
    site.describe(NODES)
    assert done.returncode != 0
    assert sentence in " ".join(done.stdout.split())
    assert main_pids([*site.fleet.nodes.values()]) == before


def test_an_address_that_is_not_the_buffers_is_named(site):
    address = site.fleet.nodes["node0"].address
    nowhere = address.rpartition(".")[0] + ".254"
    site.describe(NODES, changes={"node0 ": f"node0 tba_address={nowhere} "})
    done = site.try_to_play("site")
    assert f"cannot connect to the buffer, node0 ({nowhere}), port 5757: correct tba_address" in " ".join(
        done.stdout.split()
    )
    site.describe(NODES)
    site.play("site")


def test_a_searcher_that_does_not_start_is_shown_with_its_journal_and_the_others_go_on(site):
    others = [site.fleet.nodes[name] for name in ("node0", "node1", "node3")]
    before = main_pids(others)
    site.describe(NODES, changes={"node2 ": """node2 tba_environment='{"TBA_SEARCH__MAX_IN_FLIGHT": "none"}' """})
    done = site.try_to_play("site")
    printed = " ".join(done.stdout.split())
    assert re.findall(r"(\S+) of (\S+) did not become ready", printed) == [("tba-search@cpu.service", "node2")]
    assert "search.max_in_flight" in printed
    assert done.stdout.count("none failed") == 3
    assert {host: numbers[-1] for host, *numbers in RECAP.findall(done.stdout)} == {
        "node0": "0",
        "node1": "0",
        "node2": "1",
        "node3": "0",
    }
    assert main_pids(others) == before
    site.describe(NODES)
    site.play("site")
    site.wait_for_rows("node2")


def status_rows(printed: str) -> list[list[str]]:
    """Return node, unit and state of each line of the table."""
    return sorted(line.split()[:3] for line in printed.splitlines() if re.match(r" +node\d ", line))


def test_the_status_of_all_units_is_one_table(site):
    site.fleet.nodes["node3"].run("systemctl", "stop", "tba-search@cpu")
    _, printed = site.play("status")
    site.fleet.nodes["node3"].run("systemctl", "start", "tba-search@cpu")
    assert status_rows(printed) == [
        ["node0", "tba-buffer", "active"],
        ["node0", "tba-train@cpu", "active"],
        *(["node" + number, "tba-search@cpu", "active"] for number in "12"),
        ["node3", "tba-search@cpu", "inactive"],
    ]


def test_a_node_that_is_cut_off_loses_nothing_and_does_not_hang_a_playbook(site):
    node, cut = site.fleet.nodes["node2"], threading.Event()

    def cut_in_the_middle() -> None:
        wait_until("the play is at work on the node", lambda: node.run("pgrep", "-f", "ansible", check=False).stdout)
        node.cut()
        cut.set()

    cutter = threading.Thread(target=cut_in_the_middle)
    cutter.start()
    done = site.try_to_play("site")
    cutter.join()
    assert cut.is_set()
    unreachable = {host: numbers[1] for host, *numbers in RECAP.findall(done.stdout)}
    assert unreachable == {"node0": "0", "node1": "0", "node2": "1", "node3": "0"}, done.stdout
    site.wait_for_steps()
    assert ["node2", "-", "unreachable"] in status_rows(site.try_to_play("status").stdout)
    # The others still know its name, as they admit its key.
    assert f"{node.address} node2" in site.fleet.nodes["node1"].run("cat", "/etc/hosts").stdout
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
    # It has delivered all that it had.
    assert gone.run("find", "/var/lib/tba", "-path", "*/spool/*.put").stdout == ""
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


@pytest.fixture(scope="module")
def next_wheels() -> Iterator[Path]:
    """A wheelhouse with a release of tba that speaks another protocol, for as long as the inventory names it."""
    directory = FLEET / f"wheels-{os.getpid()}"
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
    yield directory
    shutil.rmtree(directory)


def test_an_update_to_another_protocol_loses_no_trajectory(site, next_wheels):
    before, nodes = site.rows(), [*site.fleet.nodes.values()]
    old = {node.run("readlink", "/opt/tba").stdout for node in nodes}
    site.wheels = next_wheels
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


def test_a_finished_run_stays_so_until_its_configuration_has_more_steps(site):
    config = site.directory / "tba.toml"
    units = [("node0", "tba-train@cpu"), *((name, "tba-search@cpu") for name in ("node1", "node2", "node4"))]

    def ended() -> bool:
        return not any(is_active(site.fleet.nodes[name], unit) for name, unit in units)

    def is_at(step: int) -> bool:
        return site.steps() == step

    for more in (5, 10):
        # Else it takes more steps before the playbook comes to it.
        site.fleet.nodes["node0"].run("systemctl", "stop", "tba-train@cpu")
        steps = site.steps() + more
        config.write_text(re.sub("^steps = .*", f"steps = {steps}", config.read_text(), flags=re.M))
        site.play("site")
        wait_until("the last step", partial(is_at, steps), 300)
        wait_until("trainer and searchers have ended", ended, 600)
        before = main_pids([*site.fleet.nodes.values()])
        assert site.play("site", "--check")[0] == 0
        assert site.play("site")[0] == 0
        assert main_pids([*site.fleet.nodes.values()]) == before
    site.check_history()


def test_stop_and_teardown_keep_the_data_unless_told_otherwise(site):
    site.play("stop")
    nodes = [*site.fleet.nodes.values()]
    assert [node.run("pgrep", "-u", "tba", check=False).stdout for node in nodes] == [""] * 4
    site.check_history()
    rows = site.rows()
    site.play("teardown")
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
