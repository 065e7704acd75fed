"""The spool's files: puts come back as they were appended, damage costs one put, and space is released."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tba.common.errors import RecordLost, StorageError
from tba.searcher.delivery.spool import Owner, Spool, find_dead_spools, read_put
from tba.tests.helpers.weights import flip_a_byte

OWNER = Owner(run="r" * 32, run_name="run", sender="node-cpu0.1", host="node")
FRAMES = st.lists(st.binary(max_size=40), max_size=6)
BLOCK = 4096


@pytest.fixture
def spool(tmp_path):
    spool = Spool.create(tmp_path, OWNER)
    yield spool
    spool.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(FRAMES, st.data())
def test_a_put_is_read_as_it_was_written_and_a_cut_or_changed_one_is_recognized_as_damaged(spool, frames, data):
    spool.append(1, frames)
    file = spool.path(1)
    assert read_put(file) == frames
    content = file.read_bytes()
    changed = bytearray(content)
    changed[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    # The last is what a power cut can leave: a length without content.
    for damaged in (content[: data.draw(st.integers(0, len(content) - 1))], changed, bytes(len(content))):
        file.write_bytes(damaged)
        with pytest.raises(RecordLost, match="the put is damaged"):
            read_put(file)


def frames_of(id_: int, size: int = 1000) -> list[bytes]:
    return [id_.to_bytes(4, "little") * (size // 4), b"tail"]


def append(spool: Spool, *ids: int, size: int = 1000) -> None:
    for id_ in ids:
        spool.append(id_, frames_of(id_, size))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix in (".put", ".tmp"))


def test_a_put_is_read_back_and_counts_in_blocks_of_the_disk_until_it_is_acknowledged(spool):
    append(spool, 1, 2, 3, size=5_000)
    assert [read_put(spool.path(id_)) for id_ in (3, 1, 2)] == [frames_of(id_, 5_000) for id_ in (3, 1, 2)]
    assert spool.bytes == 6 * BLOCK
    spool.acknowledge(2)
    with pytest.raises(RecordLost, match="no such file"):
        read_put(spool.path(2))
    assert [read_put(spool.path(id_)) for id_ in (1, 3)] == [frames_of(1, 5_000), frames_of(3, 5_000)]
    assert spool.bytes == 4 * BLOCK
    spool.acknowledge(1)
    spool.acknowledge(3)
    spool.close()
    assert not spool.directory.exists()


def test_a_put_that_the_disk_takes_only_in_part_leaves_no_trace(spool, monkeypatch):
    append(spool, 1)
    monkeypatch.setattr(os, "writev", lambda file, parts: os.write(file, b"".join(parts)[:100]))
    with pytest.raises(StorageError, match="only a part of a put: it is full"):
        append(spool, 2)
    monkeypatch.undo()
    append(spool, 3)
    assert [read_put(spool.path(1)), read_put(spool.path(3))] == [frames_of(1), frames_of(3)]
    assert names(spool.directory) == ["0000000000000001.put", "0000000000000003.put"]


def test_an_acknowledged_put_that_the_disk_does_not_release_no_longer_counts(spool):
    append(spool, 1)
    spool.path(1).unlink()
    spool.path(1).mkdir()
    with pytest.raises(StorageError, match="Is a directory"):
        spool.acknowledge(1)
    assert spool.bytes == 0


def test_a_damaged_put_that_cannot_be_quarantined_is_left_to_the_next_searcher(spool, tmp_path):
    append(spool, 1)
    flip_a_byte(spool.path(1))
    (tmp_path / "aside").write_text("a file in the way")
    with pytest.raises(StorageError, match="File exists"):
        spool.quarantine(1)
    spool.close()
    assert list(the_dead_spool(tmp_path).load()) == [1]


# ---------------------------------------------------------------- dead searchers


def the_dead_spool(root: Path) -> Spool:
    (dead,) = find_dead_spools(root, "node")
    return dead


def test_a_dead_spool_belongs_to_one_searcher_until_it_is_released(spool, tmp_path):
    append(spool, 1)
    assert find_dead_spools(tmp_path, "node") == []
    spool.close()
    dead = the_dead_spool(tmp_path)
    assert find_dead_spools(tmp_path, "node") == []
    dead.release()
    assert list(the_dead_spool(tmp_path).load()) == [1]


def test_the_spool_of_another_host_is_left_alone_and_named_when_its_puts_are_old(spool, tmp_path, caplog):
    append(spool, 1)
    spool.close()
    assert find_dead_spools(tmp_path, "elsewhere") == []
    assert not caplog.records
    os.utime(spool.path(1), (0, 0))
    assert find_dead_spools(tmp_path, "elsewhere") == []
    assert "spool of another host left alone" in caplog.text


def test_a_directory_that_is_not_a_spool_is_left_alone_and_a_file_in_its_place_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="the spool .*file"):
        Spool.create(tmp_path / "file", OWNER)
    (tmp_path / "other").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/owner.json").write_text("{")
    assert find_dead_spools(tmp_path, "node") == []
    assert find_dead_spools(tmp_path / "missing", "node") == []
    assert len(list(tmp_path.iterdir())) == 3
