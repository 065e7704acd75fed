"""Publishing to a full disk: training continues, and the newest snapshot is published when there is space."""

import os
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from tba.common.weights.snapshot import list_snapshots, read
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.publisher import PublisherHarness
from tba.tests.process.test_storage_faults import small_disk  # noqa: F401
from tba.trainer.model.host_buffers import HostBuffers
from tba.trainer.publishing.snapshot_writer import Publication, SnapshotWriter, is_full_disk


@pytest.fixture
def lab(small_disk):  # noqa: F811
    """A model of half a megabyte, whose run writes to a small disk."""
    lab = PublisherHarness(small_disk.path, hidden=128, min_free_mib=12)
    lab.disk = small_disk  # type: ignore[attr-defined]
    yield lab
    lab.close()


def steps(lab) -> list[int]:
    return [read(path).manifest.step for path in list_snapshots(lab.config.snapshots)]


def test_snapshots_wait_for_disk_space_and_only_the_newest_is_published_afterwards(lab):
    publisher = lab.publisher()
    publisher.publish(0)
    assert publisher.flush(60)
    lab.disk.fill()
    for step in range(1, 6):
        publisher.publish(step)  # returns: training continues
    wait_until(lambda: publisher.reason.startswith("v5 waits for disk space"), what=publisher.reason)
    assert "train.min_free_mib = 12" in publisher.reason
    assert not publisher.flush(0.1)
    lab.disk.relieve()
    assert publisher.flush(60)
    assert steps(lab) == [0, 5]
    assert publisher.reason == ""
    assert lab.announced().manifest.step == 5


def test_a_disk_that_fills_during_a_write_is_recognised_and_no_file_is_left(lab):
    copies = HostBuffers(torch.device("cpu"))
    publication = Publication(0, 0, copies.copy(lab.weights().items()))
    config = lab.config.model_copy(update={"train": lab.config.train.model_copy(update={"min_free_mib": 0})})
    writer = SnapshotWriter(config, lab.model, copies, unwrapped=lab.model, model_files=lab.files)
    lab.config.snapshots.mkdir(parents=True, exist_ok=True)
    with (lab.disk.path / "all").open("wb") as file:
        free = os.statvfs(lab.disk.path).f_bavail * os.statvfs(lab.disk.path).f_frsize
        os.posix_fallocate(file.fileno(), 0, free - (128 << 10))
    with pytest.raises((OSError, SafetensorError)) as caught:
        writer.write(publication)
    assert is_full_disk(caught.value)
    assert list(lab.config.snapshots.iterdir()) == []


def test_adapters_are_published_while_a_full_snapshot_waits_for_space(small_disk):  # noqa: F811
    lora = {"rank": 1, "publish": "adapter"}
    lab = PublisherHarness(small_disk.path, hidden=256, min_free_mib=12, lora=lora, keep_snapshot_every=5, steps=99)
    publisher = lab.publisher()
    publisher.publish(0)
    assert publisher.flush(60)
    with small_disk.ballast.open("wb") as file:
        free = os.statvfs(small_disk.path).f_bavail * os.statvfs(small_disk.path).f_frsize
        os.posix_fallocate(file.fileno(), 0, free - (13 << 20))
    publisher.publish(1)
    assert publisher.flush(60)
    publisher.publish(5)
    wait_until(lambda: publisher.reason.startswith("v2 waits for disk space"), what="it is full")
    small_disk.relieve()
    assert publisher.flush(60)
    assert steps(lab) == [0, 1, 5]
    lab.close()


@pytest.mark.parametrize("first", [0, 3])
def test_the_base_of_a_dropped_snapshot_is_published_with_the_next_one(small_disk, first):  # noqa: F811
    lora = {"rank": 1, "publish": "adapter"}
    lab = PublisherHarness(small_disk.path, hidden=128, min_free_mib=12, lora=lora, steps=99)
    small_disk.fill()
    publisher = lab.publisher()
    publisher.publish(first)
    publisher.publish(first + 1)
    number = publisher._next_version - 1
    wait_until(lambda: publisher.reason.startswith(f"v{number} waits"), what=publisher.reason)
    small_disk.relieve()
    assert publisher.flush(60)
    publisher.publish(first + 2)
    assert publisher.flush(60)
    assert steps(lab) == [0, first + 1, first + 2]
    assert lab.announced().manifest.base == number - 1
    lab.close()


@pytest.fixture
def memory_lab(small_disk):  # noqa: F811
    """The same, with snapshots in memory, which is the small disk as well."""
    train: dict[str, Any] = {"min_free_mib": 12, "snapshots_in": "memory", "keep_snapshot_every": 2, "steps": 99}
    lab = PublisherHarness(small_disk.path, hidden=128, **train)
    lab.disk = small_disk  # type: ignore[attr-defined]
    yield lab
    lab.close()


def test_without_room_for_one_more_copy_training_continues_and_the_next_attempt_is_published(memory_lab):
    publisher = memory_lab.publisher()
    memory_lab.disk.fill()
    assert publisher.publish(0) is None
    assert publisher.missed
    assert "train.min_free_mib = 12" in publisher.reason
    assert publisher.flush(1)
    memory_lab.disk.relieve()
    assert publisher.publish(0) == 0
    assert publisher.flush(60)
    assert (publisher.missed, publisher.reason) == (False, "")
    assert memory_lab.announced().manifest.step == 0


def test_a_kept_snapshot_waits_for_the_disk_while_newer_ones_are_published(memory_lab):
    publisher = memory_lab.publisher()
    publisher.publish(0)
    assert publisher.flush(60)
    memory_lab.disk.fill()
    for version, step in enumerate((2, 3), 1):
        publisher.publish(step)
        wait_until(lambda: memory_lab.announced_ref().version == version, what="it is announced")  # noqa: B023
        wait_until(lambda: not publisher._busy, what="the file of the one before is free")
    wait_until(lambda: publisher.reason.startswith("v1 waits for disk space"), what=publisher.reason)
    assert not publisher.flush(0.1)
    memory_lab.disk.relieve()
    assert publisher.flush(60)
    assert steps(memory_lab) == [0, 2]
