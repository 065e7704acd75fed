"""Locks and records of the directory that a node's trainer and searchers share."""

import fcntl
import os
import shutil
import threading

import pytest

from tba.common import run_snapshots
from tba.common.config import Config
from tba.common.run_snapshots import weights_directory
from tba.common.weights import node_store
from tba.common.weights.node_store import is_verified, mark_verified, pin_path
from tba.common.weights.snapshot import SnapshotKey
from tba.tests.conftest import EXAMPLE_MODEL
from tba.tests.helpers.checks import not_none

KEY = SnapshotKey(3, "a" * 64)


@pytest.fixture
def snapshot(tmp_path):
    path = tmp_path / KEY.name
    path.mkdir()
    return path


def locked(path):
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def test_a_pin_does_not_wait_for_a_directory_that_its_owner_takes_back(snapshot, tmp_path):
    descriptor, found = locked(snapshot), []
    waiting = threading.Thread(target=lambda: found.append(pin_path(tmp_path / KEY.name)))
    waiting.start()
    # The trainer keeps its lock while it writes the next snapshot.
    snapshot.rename(tmp_path / ".v00000000-part")
    waiting.join(60)
    assert found == [None]
    os.close(descriptor)


def test_a_pin_waits_for_a_lock_that_ends(snapshot, tmp_path):
    descriptor, found = locked(snapshot), []
    waiting = threading.Thread(target=lambda: found.append(pin_path(tmp_path / KEY.name)))
    waiting.start()
    os.close(descriptor)
    waiting.join(60)
    assert not_none(found[0]).path == snapshot
    not_none(found[0]).release()


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
