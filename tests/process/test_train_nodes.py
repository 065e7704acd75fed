"""`tba train` on two nodes of one or two ranks: nodes are network namespaces, and share no directory but the test's."""

import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tba.common.errors import EXIT_FAILED
from tba.tests.helpers.checks import PATIENCE_SECONDS, not_none, wait_until
from tba.tests.helpers.namespaces import address, cut, inside, namespaces
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


@pytest.fixture
def network() -> Iterator[list[str]]:
    """The names of two namespaces."""
    with namespaces(2) as names:
        yield names


class Nodes:
    """Starts the same run on two nodes. The second has a model without weights, and another run directory."""

    def __init__(self, network: list[str], root: Path, make_config_in: Any, start_tba: Any) -> None:
        self._network, self._root = network, root
        self._make, self._start = make_config_in, start_tba
        # That of systemd on the second node.
        self.unit = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.unit.bind(str(root / "unit"))
        self.unit.settimeout(PATIENCE_SECONDS)

    def make(self, name: str) -> TrainRun:
        """Make a run with adapters."""
        buffer = {"address": f"ipc://{self._root}/{name}.sock"}
        run = TrainRun(self._root / name, self._make, self._start, lora={"rank": 2}, buffer=buffer, **TRAIN)
        other = self._root / "other"
        (other / "model").mkdir(parents=True, exist_ok=True)
        shutil.copy(run.config.model.path / Path("config.json"), other / "model")
        return run

    def start(self, run: TrainRun, *arguments: str, processes: int = 2) -> list[Any]:
        """Start `tba train` on both nodes."""
        common = {"NNODES": "2", "MASTER_ADDR": address(0)}
        other = self._root / "other"
        own = [{}, {"TBA_MODEL__PATH": f"{other}/model", "TBA_RUN__DIR": f"{other}/run"}]
        own[1]["NOTIFY_SOCKET"] = f"{self._root}/unit"
        return [
            run.start(
                "--processes",
                str(processes),
                *arguments,
                inside=inside(name),
                NODE_RANK=str(node),
                **common | own[node],
            )
            for node, name in enumerate(self._network)
        ]


@pytest.fixture
def nodes(network, tmp_path, make_config_in, start_tba) -> Iterator[Nodes]:
    nodes = Nodes(network, tmp_path, make_config_in, start_tba)
    yield nodes
    nodes.unit.close()


@pytest.mark.needs("peft")
def test_a_run_outlives_a_killed_node_and_a_stopped_one_and_one_node_ends_the_same_training(nodes, tba_here, tmp_path):
    """Two ranks on each node, whose model is whole, as `auto` chooses on a CPU; then one on each, which share one."""
    straight, run = nodes.make("straight"), nodes.make("run")
    train_here(straight, tba_here)
    first, second = nodes.start(run)
    while nodes.unit.recv(100) != b"READY=1":
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
    started = nodes.start(run, "--set", "train.sharding=all", "--resume", processes=1)
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
    monkeypatch.setenv("MASTER_ADDR", address(0))
    started = []
    for rank, name in enumerate(network):
        monkeypatch.setenv("RANK", str(rank))
        started.append(start_script(RANK, work, inside=inside(name)))
    assert [one.stdout.readline() for one in started] == ["joined\n"] * 2
    cut(network, 1)
    heard: list[str] = []
    listeners = [threading.Thread(target=lambda one=one: heard.append(one.stdout.readline())) for one in started]
    for one in listeners:
        one.start()
    for one in listeners:
        one.join(PATIENCE_SECONDS)
    assert heard == ["lost\n"] * 2
