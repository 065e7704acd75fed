"""`tba train` on two nodes of one or two ranks: nodes are network namespaces, and share no directory but the test's."""

import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tba.common.errors import EXIT_FAILED
from tba.tests.helpers.checks import PATIENCE_SECONDS, not_none, wait_until
from tba.tests.helpers.trainer import TrainRun
from tba.tests.process.test_train_ranks import STEPS, TRAIN, assert_same_training, children_of, train_here
from tba.trainer import checkpoint

# One of two ranks, which works until it loses the other. It allows a node 4 seconds of silence.
RANK = """
import sys, torch
from tba.common.errors import RankLost
from tba.trainer import distributed

distributed._SILENT_SECONDS = 4
try:
    with distributed.until_lost():
        ranks = distributed.join(torch.device("cpu"))
        print("joined", flush=True)
        while True:
            ranks.receive() if sys.argv[1:] == ["waits"] and ranks.rank else ranks.sum(torch.ones(1))
except RankLost:
    print("lost", flush=True)
"""


FIRST = "10.77.0.1"


def ip(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)


def inside(name: str) -> list[str]:
    """Return the command that starts another one in a namespace."""
    return ["ip", "netns", "exec", name]


@pytest.fixture
def network() -> Iterator[list[str]]:
    """The names of two network namespaces on a bridge in the first. They need root; the test is skipped without."""
    first, second = names = [f"tba-{os.getpid()}-{number}" for number in range(2)]
    commands = [
        *(f"netns add {name}" for name in names),
        *(f"-n {name} link set lo up" for name in names),
        f"-n {first} link add name br0 type bridge",
        f"-n {first} link set br0 up",
        f"-n {first} addr add {FIRST}/24 dev br0",
        f"-n {first} link add name port1 type veth peer name eth0 netns {second}",
        f"-n {first} link set port1 master br0",
        f"-n {first} link set port1 up",
        f"-n {second} addr add 10.77.0.2/24 dev eth0",
        f"-n {second} link set eth0 up",
    ]
    try:
        for command in commands:
            if (done := ip(command)).returncode:
                pytest.skip(f"no network namespaces here: ip {command}: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            ip(f"netns del {name}")


@pytest.fixture
def unit(tmp_path) -> Iterator[socket.socket]:
    """The socket of systemd on the second node."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unit:
        unit.bind(str(tmp_path / "unit"))
        unit.settimeout(PATIENCE_SECONDS)
        yield unit


@pytest.mark.needs("peft")
def test_a_run_outlives_a_killed_node_and_a_stopped_one_and_one_node_ends_the_same_training(
    network, unit, make_config_in, start_tba, tba_here, tmp_path
):
    """Two ranks on each node, whose model is whole, as `auto` chooses on a CPU; then one on each, which share one."""
    straight, run = (
        TrainRun(tmp_path / name, make_config_in, start_tba, lora={"rank": 2}, buffer=buffer, **TRAIN)
        for name, buffer in (("straight", {}), ("run", {"address": f"ipc://{tmp_path}/run.sock"}))
    )
    # The second node has a model without weights, and another run directory.
    other = tmp_path / "other"
    (other / "model").mkdir(parents=True)
    shutil.copy(run.config.model.path / Path("config.json"), other / "model")
    own = {"TBA_MODEL__PATH": f"{other}/model", "TBA_RUN__DIR": f"{other}/run", "NOTIFY_SOCKET": f"{tmp_path}/unit"}

    def start(*arguments: str) -> list[Any]:
        """Start `tba train` on both nodes."""
        return [
            run.start(*arguments, inside=inside(name), NNODES="2", NODE_RANK=node, MASTER_ADDR=FIRST, **environment)
            for node, name, environment in zip("01", network, ({}, own), strict=True)
        ]

    train_here(straight, tba_here)
    first, second = start("--processes", "2")
    while unit.recv(100) != b"READY=1":
        pass
    run.feed()
    wait_until(lambda: len(run.lines()) >= 8)
    for pid in children_of(second.pid).values():
        os.kill(pid, signal.SIGKILL)
    assert (first.wait(PATIENCE_SECONDS), second.wait(PATIENCE_SECONDS)) == (1, 1)
    lost = (tmp_path / "tba0.log").read_text().splitlines()[-1]
    assert lost.startswith("error: rank0 of 4 failed with exit code 69: another process of this trainer has ended")

    # Only the first node has the checkpoint.
    before = len(run.lines())
    started = start("--processes", "1", "--set", "train.sharding=all", "--resume")
    wait_until(lambda: len(run.lines()) >= before + 3)
    started[1].send_signal(signal.SIGTERM)
    # A supervisor starts the first one again, as after a loss of the second.
    assert [node.wait(PATIENCE_SECONDS) for node in started] == [EXIT_FAILED, 0]
    assert before < len(run.lines()) < STEPS
    assert not_none(checkpoint.newest(run.config.checkpoints)).step == len(run.lines())

    assert run.start("--processes", "2", "--resume").wait(PATIENCE_SECONDS) == 0
    assert_same_training(run, straight)
    straight.buffer.stop()
    run.buffer.stop()


@pytest.mark.parametrize("work", ["waits", "computes"])
def test_a_node_behind_a_cut_cable_is_lost_on_both_sides(network, start_script, monkeypatch, work):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", FIRST)
    started = []
    for rank, name in enumerate(network):
        monkeypatch.setenv("RANK", str(rank))
        started.append(start_script(RANK, work, inside=inside(name)))
    assert [one.stdout.readline() for one in started] == ["joined\n"] * 2
    # Packets are lost, and nothing is closed.
    assert ip(f"-n {network[0]} link set port1 down").returncode == 0
    heard: list[str] = []
    listeners = [threading.Thread(target=lambda one=one: heard.append(one.stdout.readline())) for one in started]
    for one in listeners:
        one.start()
    for one in listeners:
        one.join(PATIENCE_SECONDS)
    assert heard == ["lost\n"] * 2
