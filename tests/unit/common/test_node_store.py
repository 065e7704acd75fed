"""Locks and records of the directory of a node's weights; and a FIFO in the place of a file stops no process."""

import contextlib
import fcntl
import os
import shutil
import threading

import pytest

from tba.common import run_snapshots
from tba.common.config import Config
from tba.common.errors import TbaError
from tba.common.evaluations import record_evaluations
from tba.common.run_snapshots import weights_directory
from tba.common.system.durable import exclusive_lock, open_regular, sync, write_text
from tba.common.weights import node_store
from tba.common.weights.delta import unpack_delta
from tba.common.weights.model_files import weights_digest
from tba.common.weights.node_store import VERIFIED, is_verified, mark_verified, pin_path
from tba.common.weights.snapshot import SnapshotKey
from tba.common.weights.tensor_file import blake3_of, read_layout
from tba.common.wire.keys import OWN, own_pair, read_authorized
from tba.deploy.child import Child
from tba.deploy.run_directory import last_launch
from tba.tests.conftest import EXAMPLE_MODEL
from tba.tests.helpers.checks import not_none
from tba.trainer.metrics.metrics_log import MetricsLog
from tba.trainer.model.adapters import base_digest

KEY = SnapshotKey(3, "a" * 64)


@pytest.fixture
def snapshot(tmp_path):
    path = tmp_path / KEY.name
    path.mkdir()
    return path


@pytest.mark.parametrize("ends", [False, True])
def test_a_pin_waits_for_a_lock_that_ends_and_not_for_a_directory_that_its_owner_takes_back(snapshot, tmp_path, ends):
    descriptor, found = os.open(snapshot, os.O_RDONLY), []
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    waiting = threading.Thread(target=lambda: found.append(pin_path(tmp_path / KEY.name)))
    waiting.start()
    if ends:
        os.close(descriptor)
        waiting.join(60)
        assert not_none(found[0]).path == snapshot
        not_none(found[0]).release()
    else:
        # The trainer keeps its lock while it writes the next snapshot.
        snapshot.rename(tmp_path / ".v00000000-part")
        waiting.join(60)
        assert found == [None]
        os.close(descriptor)


def test_a_record_is_for_one_manifest_one_user_and_one_boot(snapshot, tmp_path, monkeypatch):
    assert not is_verified(snapshot, KEY.manifest_sha256)
    mark_verified(snapshot, KEY.manifest_sha256)
    assert is_verified(snapshot, KEY.manifest_sha256)
    assert not is_verified(snapshot, "b" * 64)
    monkeypatch.setattr(os, "getuid", lambda: snapshot.stat().st_uid + 1)
    assert not is_verified(snapshot, KEY.manifest_sha256)
    monkeypatch.undo()
    (tmp_path / "boot_id").write_text("another\n")
    monkeypatch.setattr(node_store, "_BOOT", tmp_path / "boot_id")
    assert not is_verified(snapshot, KEY.manifest_sha256)


@pytest.mark.parametrize(("mebibytes", "in_memory"), [(64, False), (515, False), (2048, True)])
def test_a_memory_file_system_that_is_too_small_for_what_must_stay_free_is_not_used(
    tmp_path, monkeypatch, mebibytes, in_memory
):
    """As the 64 MiB of a container: the trainer would wait for memory before its first weights, and never publish."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(total=mebibytes << 20))
    config = Config.model_validate({"run": {"dir": str(tmp_path)}, "model": {"path": str(EXAMPLE_MODEL)}})
    assert weights_directory(config).is_relative_to(run_snapshots.MEMORY) == in_memory


# A file, and what opens it.
OPENED = {
    "lock": lambda folder: exclusive_lock(folder / "lock", "taken").__enter__(),
    ".eval.jsonl.lock": lambda folder: record_evaluations(folder, []),
    "eval.jsonl": lambda folder: record_evaluations(folder, []),
    ".text.PID.tmp": lambda folder: write_text(folder / "text", "content"),
    "launcher.lock": last_launch,
    "trainer.log": lambda folder: Child("trainer", "trainer", [], folder / "trainer.log").open_log(),
    "metrics.jsonl": lambda folder: MetricsLog(folder, first_step=0).close(),
    OWN: own_pair,
    "node1.pub": read_authorized,
    VERIFIED: lambda folder: is_verified(folder, ""),
    "model.safetensors": weights_digest,
    "base.safetensors": base_digest,
    "delta": lambda folder: unpack_delta(folder / "delta", folder / "unpacked", 1),
    "hashed": lambda folder: blake3_of(folder / "hashed"),
    "mapped": lambda folder: read_layout(folder / "mapped"),
    "synced": lambda folder: sync(folder / "synced"),
    "appended": lambda folder: open_regular(folder / "appended", "ab"),
}


@pytest.mark.parametrize(("name", "use"), OPENED.items(), ids=OPENED)
def test_a_fifo_in_the_place_of_a_file_is_refused_or_left_alone(tmp_path, name, use):
    def open_it() -> None:
        with contextlib.suppress(OSError, TbaError):
            use(tmp_path)

    name = name.replace("PID", str(os.getpid()))
    os.mkfifo(tmp_path / name)
    thread = threading.Thread(target=open_it, daemon=True)
    thread.start()
    thread.join(10)
    waits = thread.is_alive()
    if waits:
        # Both ends, so that it waits no longer.
        os.close(os.open(tmp_path / name, os.O_RDWR))
    assert not waits
