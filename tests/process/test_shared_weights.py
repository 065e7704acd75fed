"""Searcher processes of one node that share no file system with the trainer download a snapshot once."""

import signal
import subprocess
import time
from pathlib import Path

import msgspec
import pytest

from tba.common.clock import SystemClock
from tba.searcher.weights.assembly import SnapshotAssembler
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.weights import WEIGHTS, CountingServer, RandomWeights

# Does what the preparing thread of a searcher does, with chunks so small that the test can intervene.
CHILD = """
import sys
from pathlib import Path
import msgspec
from tba.common.clock import SystemClock
from tba.common.wire.messages import WeightsRef
from tba.searcher.weights import fetch
from tba.searcher.weights.assembly import SnapshotAssembler
from tba.searcher.weights.fetch import Progress

class Printed(Progress):
    def report(self, waits_for):
        print(waits_for, flush=True)

fetch._CHUNK_BYTES = int(sys.argv[3])
assembler = SnapshotAssembler(Path(sys.argv[1]), "trainer", SystemClock(), Printed())
snapshot, pinned = assembler.assemble(msgspec.json.decode(sys.argv[2], type=WeightsRef))
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
def start_searcher(start_script, tmp_path):
    """Starts processes that assemble a snapshot in this node's cache."""

    def start(ref, chunk_bytes: int = 1 << 20) -> subprocess.Popen[str]:
        return start_script(CHILD, str(tmp_path / "node"), msgspec.json.encode(ref).decode(), str(chunk_bytes))

    return start


def last_line(process: subprocess.Popen) -> str:
    """The path that a searcher prints when it has the snapshot."""
    for line in not_none(process.stdout):
        if line.startswith("has"):
            return line.removeprefix("has ").strip()
    raise AssertionError("it ended without the snapshot")


def wait_for_bytes(node: Path, least: int) -> None:
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size > least for path in node.glob(f".*.part/{WEIGHTS}")):
        assert time.monotonic() < deadline, "the fetch did not begin"
        time.sleep(0.001)


def test_two_searchers_fetch_a_snapshot_once(trainer, server, start_searcher):
    ref = trainer.full()
    both = [start_searcher(ref), start_searcher(ref)]
    files = [last_line(process) for process in both]
    assert files[0] == files[1]
    assert Path(files[0]).read_bytes() == trainer.truth[0]
    assert server.served[WEIGHTS] == len(trainer.truth[0])


def test_a_waiting_searcher_resumes_the_download_of_one_that_is_killed(trainer, server, start_searcher, tmp_path):
    ref = trainer.full()
    first = start_searcher(ref, chunk_bytes=512)
    resumed = 1_000_000
    wait_for_bytes(tmp_path / "node", resumed)
    # Its locks stay.
    first.send_signal(signal.SIGSTOP)
    second = start_searcher(ref, chunk_bytes=1 << 16)
    while "another searcher" not in second.stdout.readline():
        assert second.poll() is None
    first.kill()
    first.wait()
    assert Path(last_line(second)).read_bytes() == trainer.truth[0]
    # Repeated are at most the 8 chunks that were requested when it died, and 8 of the other one if a busy machine cuts
    # its connection.
    repeated = 8 * (512 + (1 << 16))
    assert repeated < resumed
    assert len(trainer.truth[0]) <= server.served[WEIGHTS] <= len(trainer.truth[0]) + repeated


def test_a_download_that_was_killed_resumes_after_a_restart(trainer, server, start_searcher, tmp_path):
    ref = trainer.full()
    killed = start_searcher(ref, chunk_bytes=512)
    wait_for_bytes(tmp_path / "node", 1_000_000)
    killed.kill()
    killed.wait()
    before = server.served[WEIGHTS]
    assert before < len(trainer.truth[0])
    found, _ = SnapshotAssembler(tmp_path / "node", "trainer", SystemClock()).assemble(ref)
    assert found.weight_files[0].read_bytes() == trainer.truth[0]
    assert server.served[WEIGHTS] - before < len(trainer.truth[0]) - 900_000


def test_weights_that_a_live_searcher_serves_are_not_deleted_by_others(trainer, start_searcher, tmp_path):
    served = Path(last_line(start_searcher(trainer.full())))
    neighbour = SnapshotAssembler(tmp_path / "node", "trainer", SystemClock())
    for _ in range(5):
        neighbour.assemble(trainer.delta())[1].release()
    assert served.read_bytes() == trainer.truth[0]
