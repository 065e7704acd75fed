"""Searcher processes of one node that share no file system with the trainer: one download, whoever dies."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tba.common.clock import SystemClock
from tba.searcher.host_copy import HostCopy
from tba.tests.weights_lab import WEIGHTS, CountingServer, RandomWeights

from .conftest import clean_environment

# What a searcher's prefetch thread does, with chunks so small that the test can get in between.
CHILD = """
import sys
from pathlib import Path
from tba.common.clock import SystemClock
from tba.common.wire import WeightsRef
from tba.searcher import fetch
from tba.searcher.host_copy import HostCopy

fetch._CHUNK_BYTES = int(sys.argv[3])
copies = HostCopy(Path(sys.argv[1]), "trainer", SystemClock(), tell=lambda what: print(what, flush=True))
snapshot, held = copies.prepare(WeightsRef.model_validate_json(sys.argv[2]))
print("has", snapshot.weight_files[0], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server(tmp_path):
    server = CountingServer("tcp://127.0.0.1:*", tmp_path / "snapshots")
    yield server
    server.close()


@pytest.fixture
def trainer(tmp_path, server):
    return RandomWeights(tmp_path / "snapshots", elements=8_000_000, address=server.address)


@pytest.fixture
def start_searcher(tmp_path):
    """Starts processes that prepare a snapshot in this node's cache."""
    started = []

    def start(ref, chunk_bytes: int = 1 << 20) -> subprocess.Popen:
        command = [sys.executable, "-c", CHILD, str(tmp_path / "node"), ref.model_dump_json(), str(chunk_bytes)]
        started.append(
            subprocess.Popen(command, env=clean_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def last_line(process: subprocess.Popen) -> str:
    """What a searcher says when it has the snapshot."""
    for line in process.stdout:
        if line.startswith("has"):
            return line.removeprefix("has ").strip()
    raise AssertionError("it ended without the snapshot")


def wait_for_bytes(node: Path, least: int) -> None:
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size > least for path in node.glob(f".*.part/{WEIGHTS}")):
        assert time.monotonic() < deadline, "the fetch did not begin"
        time.sleep(0.001)


def test_two_searchers_fetch_once(trainer, server, start_searcher):
    ref = trainer.full()
    both = [start_searcher(ref), start_searcher(ref)]
    files = [last_line(process) for process in both]
    assert files[0] == files[1]
    assert Path(files[0]).read_bytes() == trainer.truth[0]
    assert server.served[WEIGHTS] == len(trainer.truth[0])


def test_a_searcher_that_waits_takes_over_from_one_that_is_killed_and_goes_on(
    trainer, server, start_searcher, tmp_path
):
    ref = trainer.full()
    first = start_searcher(ref, chunk_bytes=512)
    wait_for_bytes(tmp_path / "node", 1_000_000)
    first.send_signal(signal.SIGSTOP)  # its locks stay
    second = start_searcher(ref)
    while "another searcher" not in second.stdout.readline():
        assert second.poll() is None
    first.kill()
    first.wait()
    assert Path(last_line(second)).read_bytes() == trainer.truth[0]
    window = 8 * 512  # what was asked for when it died
    assert len(trainer.truth[0]) <= server.served[WEIGHTS] <= len(trainer.truth[0]) + 2 * window


def test_a_searcher_that_was_killed_in_the_middle_goes_on_after_its_restart(trainer, server, start_searcher, tmp_path):
    ref = trainer.full()
    killed = start_searcher(ref, chunk_bytes=512)
    wait_for_bytes(tmp_path / "node", 1_000_000)
    killed.kill()
    killed.wait()
    before = server.served[WEIGHTS]
    assert before < len(trainer.truth[0])
    found, _ = HostCopy(tmp_path / "node", "trainer", SystemClock()).prepare(ref)
    assert found.weight_files[0].read_bytes() == trainer.truth[0]
    assert server.served[WEIGHTS] - before < len(trainer.truth[0]) - 900_000


def test_weights_that_a_living_searcher_serves_outlive_the_collection_of_others(trainer, start_searcher, tmp_path):
    served = Path(last_line(start_searcher(trainer.full())))
    neighbour = HostCopy(tmp_path / "node", "trainer", SystemClock())
    for _ in range(5):
        neighbour.prepare(trainer.delta())[1].release()
    assert served.read_bytes() == trainer.truth[0]
