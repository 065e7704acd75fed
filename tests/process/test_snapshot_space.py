"""Publishing onto a full disk: training goes on, the newest snapshot waits, and goes out when there is space."""

import os

import pytest
import torch
from safetensors import SafetensorError

from tba.common.snapshot import Canary, list_snapshots, read
from tba.tests.unit.publish_lab import Press
from tba.trainer.host_copies import HostCopies
from tba.trainer.snapshot_writer import Publication, SnapshotWriter, is_full_disk
from tba.trainer.whole_writer import WholeWriter

from .fault_lab import wait_for
from .test_storage_faults import small_disk  # noqa: F401


@pytest.fixture
def lab(small_disk):  # noqa: F811
    """A model of half a megabyte, whose run writes to a small disk."""
    lab = Press(small_disk.path, hidden=128, min_free_mib=12)
    lab.disk = small_disk
    yield lab
    lab.close()


def steps(lab) -> list[int]:
    return [read(path).manifest.step for path in list_snapshots(lab.config.snapshots)]


def test_below_the_floor_snapshots_wait_and_only_the_newest_is_published_afterwards(lab):
    publisher = lab.publisher()
    publisher.publish(0)
    assert publisher.flush(20)
    lab.disk.fill()
    for step in range(1, 6):
        publisher.publish(step)  # returns: training goes on
    wait_for(lambda: publisher.trouble.startswith("v5 waits for disk space"), 20, publisher.trouble)
    assert "train.min_free_mib = 12" in publisher.trouble
    assert not publisher.flush(0.1)
    lab.disk.relieve()
    assert publisher.flush(20)
    assert steps(lab) == [0, 5]
    assert publisher.trouble == ""
    assert lab.announced().manifest.step == 5


def test_a_disk_that_fills_up_while_writing_is_known_as_such_and_nothing_is_left(lab):
    copies = HostCopies(torch.device("cpu"))
    publication = Publication(0, 0, copies.copy(lab.weights().items()))
    made = SnapshotWriter(lab.config, lab.model, lab.files, lambda _: Canary([], []))
    writer = WholeWriter(made, lab.model, copies)
    lab.config.snapshots.mkdir(parents=True, exist_ok=True)
    with (lab.disk.path / "all").open("wb") as file:
        free = os.statvfs(lab.disk.path).f_bavail * os.statvfs(lab.disk.path).f_frsize
        os.posix_fallocate(file.fileno(), 0, free - (128 << 10))
    with pytest.raises((OSError, SafetensorError)) as caught:
        writer.write(publication)
    assert is_full_disk(caught.value)
    assert list(lab.config.snapshots.iterdir()) == []


def test_adapters_go_out_where_a_full_snapshot_has_to_wait(small_disk):  # noqa: F811
    lora = {"rank": 1, "publish": "adapter"}
    lab = Press(small_disk.path, hidden=256, min_free_mib=12, lora=lora, keep_snapshot_every=5, steps=99)
    publisher = lab.publisher()
    publisher.publish(0)
    assert publisher.flush(20)
    with small_disk.ballast.open("wb") as file:
        free = os.statvfs(small_disk.path).f_bavail * os.statvfs(small_disk.path).f_frsize
        os.posix_fallocate(file.fileno(), 0, free - (13 << 20))
    publisher.publish(1)
    assert publisher.flush(20)
    publisher.publish(5)
    wait_for(lambda: publisher.trouble.startswith("v2 waits for disk space"), 20, "it is full")
    small_disk.relieve()
    assert publisher.flush(20)
    assert steps(lab) == [0, 1, 5]
    lab.close()


@pytest.mark.parametrize("first", [0, 3])
def test_the_base_comes_with_the_next_snapshot_where_the_one_that_it_belonged_to_was_dropped(small_disk, first):  # noqa: F811
    lora = {"rank": 1, "publish": "adapter"}
    lab = Press(small_disk.path, hidden=128, min_free_mib=12, lora=lora, steps=99)
    small_disk.fill()
    publisher = lab.publisher()
    publisher.publish(first)
    publisher.publish(first + 1)
    number = publisher._next_version - 1
    wait_for(lambda: publisher.trouble.startswith(f"v{number} waits"), 20, publisher.trouble)
    small_disk.relieve()
    assert publisher.flush(20)
    publisher.publish(first + 2)
    assert publisher.flush(20)
    assert steps(lab) == [0, first + 1, first + 2]
    assert lab.announced().manifest.base == number - 1
    lab.close()
