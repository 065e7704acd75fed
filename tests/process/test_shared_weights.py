"""Searcher processes of one node download a snapshot once, or share weights over mount namespaces."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from tba.tests.helpers.checks import not_none
from tba.tests.helpers.weights import WEIGHTS, CountingServer, RandomWeights
from tba.tests.process.conftest import clean_environment

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


# What PrivateTmp=, ProtectSystem=strict and StateDirectory= do: a private temporary directory, a read-only tree, and a
# mount of the state directory. The clone or the interpreter may lie in /tmp or /mnt, so all mounts are in directories
# of the test: $SEEN stands for /var/lib/tba, and the temporary directory hides $STATE.
UNIT = """
set -e
mount --make-rprivate /
mount --bind "$STATE" "$SEEN"
mount -t tmpfs tmpfs "$STATE"
mount -o remount,bind,ro /
TMPDIR=$STATE exec "$@"
"""
# The second one is for users who are not root: it takes a user namespace, too.
UNSHARE = ["unshare", "--mount"], ["unshare", "--mount", "--map-current-user", "--keep-caps"]
# Assembles a snapshot as a searcher does, and prints where it lies.
SEARCHER = """
import json, sys
import msgspec
from pathlib import Path
from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.weights import snapshot
from tba.common.run_snapshots import weights_directory
from tba.common.wire.messages import WeightsRef
from tba.searcher.weights.assembly import SnapshotAssembler

settings, ref = json.loads(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=WeightsRef)
directory = weights_directory(Config.model_validate(settings))
hashed = []
blake3_of = snapshot.blake3_of
snapshot.blake3_of = lambda path: hashed.append(path.name) or blake3_of(path)
found, pinned = SnapshotAssembler(directory, "path", SystemClock()).assemble(ref)
status = found.weight_files[0].stat()
print(json.dumps([str(found.path), status.st_ino, status.st_nlink, len(hashed)]))
"""


def may_mount(unshare: list[str]) -> bool:
    mounts = "mount --make-rprivate / && mount -t tmpfs tmpfs /proc && mount -o remount,bind,ro /"
    try:
        done = subprocess.run([*unshare, "sh", "-c", mounts], capture_output=True, check=False)
    # This system has no unshare.
    except FileNotFoundError:
        return False
    return done.returncode == 0


@pytest.fixture(scope="module")
def unshare():
    """The command that starts a program in a mount namespace. Skips the test if this user may not create one."""
    allowed = next((command for command in UNSHARE if may_mount(command)), None)
    return allowed or pytest.skip("this user may not mount file systems in a namespace of its own")


@pytest.fixture
def state(tmp_path):
    """The state directory as the trainer sees it."""
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


@pytest.fixture
def seen(tmp_path):
    """The state directory as the searchers see it."""
    (tmp_path / "seen").mkdir()
    return tmp_path / "seen"


@pytest.fixture
def in_unit(unshare, state, seen):
    """Runs a searcher as a unit does."""

    def run(settings, ref):
        command = [*unshare, "sh", "-c", UNIT, "sh", sys.executable, "-c", SEARCHER]
        done = subprocess.run(
            [*command, json.dumps(settings), msgspec.json.encode(ref).decode()],
            env=clean_environment() | {"STATE": str(state), "SEEN": str(seen)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture
def ref(state, seen):
    """A snapshot of the trainer, with the path by which searchers know it."""
    published = RandomWeights(state / "runs/snapshots").full()
    return replace(published, path=published.path.replace(str(state), str(seen)))


def test_instances_share_weights_in_memory(in_unit, seen, ref):
    settings = {"run": {"dir": f"{seen}/runs", "name": f"namespaces-{os.getpid()}"}, "model": {"path": "none"}}
    path, inode, links, hashed = in_unit(settings, ref)
    try:
        assert path.startswith("/dev/shm/")
        assert (links, hashed) == (1, 2)
        # The other instance finds the same files, and trusts them.
        assert in_unit(settings, ref)[:2] == [path, inode]
        assert in_unit(settings, ref)[3] == 0
    finally:
        subprocess.run(["rm", "-r", str(Path(path).parent)], check=True)


def test_weights_in_the_state_directory_are_links_to_the_trainers_files(in_unit, state, seen, ref):
    settings = {"run": {"dir": f"{seen}/runs"}, "search": {"weights_dir": f"{seen}/weights"}}
    path, inode, links, _ = in_unit(settings, ref)
    assert path.startswith(f"{seen}/weights/")
    assert (inode, links) == ((state / "runs/snapshots/v00000000" / WEIGHTS).stat().st_ino, 2)
    assert in_unit(settings, ref)[1:4] == [inode, 2, 0]
