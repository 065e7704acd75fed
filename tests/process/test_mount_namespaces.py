"""Searchers and a trainer in mount namespaces of their own, as systemd units have them, share one weights directory."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from tba.tests.helpers.weights import WEIGHTS, RandomWeights
from tba.tests.process.conftest import clean_environment

# What PrivateTmp=, ProtectSystem=strict and StateDirectory= do: a tmpfs on /tmp, a read-only tree, and a mount of the
# state directory ($STATE) on /mnt, which stands for /var/lib/tba.
UNIT = """
set -e
mount --make-rprivate /
mount --bind "$STATE" /mnt
mount -t tmpfs tmpfs /tmp
mount --bind / /
mount -o remount,bind,ro /
exec "$@"
"""
# Assembles a snapshot as a searcher does, and prints where it lies.
SEARCHER = """
import json, sys
import msgspec
from pathlib import Path
from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.weights import snapshot
from tba.common.weights.node_store import weights_directory
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


def can_unshare() -> bool:
    return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not can_unshare(), reason="this user may not create mount namespaces")


@pytest.fixture
def state():
    """The state directory, with a snapshot of a trainer."""
    with tempfile.TemporaryDirectory(prefix="tba-state-") as directory:
        yield Path(directory)


def in_unit(state, settings, ref):
    command = ["unshare", "-m", "sh", "-c", UNIT, "sh", sys.executable, "-c", SEARCHER]
    done = subprocess.run(
        [*command, json.dumps(settings), msgspec.json.encode(ref).decode()],
        env=clean_environment() | {"STATE": str(state)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def publish(state):
    ref = RandomWeights(state / "runs/snapshots").full()
    return replace(ref, path=ref.path.replace(str(state), "/mnt"))


def test_instances_share_weights_in_memory(state):
    name = f"namespaces-{os.getpid()}"
    settings, ref = {"run": {"dir": "/mnt/runs", "name": name}, "model": {"path": "none"}}, publish(state)
    path, inode, links, hashed = in_unit(state, settings, ref)
    try:
        assert path.startswith("/dev/shm/")
        assert (links, hashed) == (1, 2)
        # The other instance finds the same files, and trusts them.
        assert in_unit(state, settings, ref)[:2] == [path, inode]
        assert in_unit(state, settings, ref)[3] == 0
    finally:
        subprocess.run(["rm", "-r", str(Path(path).parent)], check=True)


def test_weights_in_the_state_directory_are_links_to_the_trainers_files(state):
    settings, ref = {"run": {"dir": "/mnt/runs"}, "search": {"weights_dir": "/mnt/weights"}}, publish(state)
    path, inode, links, _ = in_unit(state, settings, ref)
    assert path.startswith("/mnt/weights/")
    assert (inode, links) == ((state / "runs/snapshots/v00000000" / WEIGHTS).stat().st_ino, 2)
    assert in_unit(state, settings, ref)[1:4] == [inode, 2, 0]
