"""The spool as files: what is appended comes back, whatever happens to the end of a file, and space is given back."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.common.errors import RecordLost, StorageError
from tba.searcher.spool import Orphan, Owner, Spool, find_orphans
from tba.searcher.spool_records import Damage, Record, encode, scan

OWNER = Owner(run="r" * 32, run_name="run", sender="node-cpu0.1", host="node")
RECORDS = st.lists(
    st.builds(Record, st.integers(0, 2**63 - 1), st.lists(st.binary(max_size=40), max_size=6)), max_size=6
)
BIG = 1 << 20


def written(records: list[Record]) -> list[bytes]:
    return [b"".join(encode(record)) for record in records]


@given(RECORDS)
def test_records_come_back_as_they_were(records):
    assert list(scan(b"".join(written(records)))) == records


@given(RECORDS, st.builds(Record, st.integers(0, 9), st.lists(st.binary(max_size=30), max_size=3)))
def test_a_tail_that_is_torn_at_any_byte_costs_the_torn_record_only(records, last):
    whole, tail = b"".join(written(records)), b"".join(encode(last))
    for cut in range(1, len(tail)):
        assert list(scan(whole + tail[:cut])) == [*records, Damage(len(whole), len(whole) + cut, torn=True)]


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=2, max_size=5), st.data())
def test_a_changed_byte_costs_one_record_and_is_told(bodies, data):
    records = [Record(n, [body]) for n, body in enumerate(bodies)]
    parts = written(records)
    hit = data.draw(st.integers(0, len(parts) - 1))
    at = data.draw(st.integers(0, len(parts[hit]) - 1))
    changed = bytearray(parts[hit])
    changed[at] ^= data.draw(st.integers(1, 255))
    found = list(scan(b"".join([*parts[:hit], bytes(changed), *parts[hit + 1 :]])))
    assert [item for item in found if isinstance(item, Record)] == [r for r in records if r.id != hit]
    (damage,) = [item for item in found if isinstance(item, Damage)]
    assert (damage.start, damage.stop) == (sum(map(len, parts[:hit])), sum(map(len, parts[: hit + 1])))


@given(RECORDS, st.integers(1, 64))
def test_zeros_at_the_end_after_a_power_cut_are_no_record(records, zeros):
    found = list(scan(b"".join(written(records)) + bytes(zeros)))
    assert [item for item in found if isinstance(item, Record)] == records


@pytest.fixture
def spool(tmp_path):
    spool = Spool(tmp_path, OWNER, limit_bytes=BIG)
    yield spool
    spool.close()


def files_of(spool: Spool) -> list[Path]:
    return sorted(spool.directory.glob("*.puts"))


def record(id_: int, size: int = 1000) -> Record:
    return Record(id_, [id_.to_bytes(4, "little") * (size // 4)])


def test_a_record_is_read_back_from_any_segment(spool):
    places = [spool.append(record(n, 100_000)) for n in range(8)]
    assert len(files_of(spool)) > 2
    assert [spool.read(place) for place in places] == [record(n, 100_000) for n in range(8)]


def test_a_segment_goes_when_all_its_records_are_acknowledged(spool):
    places = [spool.append(record(n, 100_000)) for n in range(8)]
    before = spool.bytes
    first = [place for place in places if place.segment == 0]
    for place in first[:-1]:
        spool.acknowledge(place)
    assert spool.bytes == before
    spool.acknowledge(first[-1])
    assert spool.bytes == before - sum(place.bytes for place in first)
    assert not any(path.name == "00000000.puts" for path in files_of(spool))


def test_when_the_buffer_is_quick_one_segment_is_written_over_and_over(spool):
    for n in range(100):
        spool.acknowledge(spool.append(record(n, 50_000)))
    assert len(files_of(spool)) == 1
    assert spool.bytes < BIG / 4


def test_the_spool_is_full_at_its_limit_and_is_not_when_a_part_is_acknowledged(spool):
    places = []
    while not spool.is_full:
        places.append(spool.append(record(len(places), 20_000)))
    assert BIG <= sum(path.stat().st_size for path in files_of(spool)) < BIG + 21_000
    for place in places[: len(places) // 2]:
        spool.acknowledge(place)
    assert not spool.is_full
    assert [spool.read(place) for place in places[len(places) // 2 :]] == [
        record(n, 20_000) for n in range(len(places) // 2, len(places))
    ]


def test_a_record_larger_than_the_spool_fills_it_only_until_it_is_acknowledged(spool):
    place = spool.append(record(1, spool.limit_bytes + 1))
    assert spool.is_full
    spool.acknowledge(place)
    assert not spool.is_full
    assert spool.read(spool.append(record(2))) == record(2)


def test_what_the_disk_refuses_leaves_the_spool_as_it_was(spool, monkeypatch):
    good = spool.append(record(1))
    real = os.pwritev

    def full_after_100_bytes(file, parts, at):
        real(file, [b"".join(parts)[:100]], at)
        return 100

    monkeypatch.setattr(os, "pwritev", full_after_100_bytes)
    with pytest.raises(StorageError, match="the disk is full|the disk took a part"):
        spool.append(record(2))
    monkeypatch.undo()
    after = spool.append(record(3))
    assert [spool.read(good), spool.read(after)] == [record(1), record(3)]
    assert list(scan(files_of(spool)[0].read_bytes())) == [record(1), record(3)]


def test_a_record_that_the_disk_has_changed_is_not_delivered_and_its_segment_is_kept(spool, tmp_path):
    places = [spool.append(record(n)) for n in range(2)]
    damage(files_of(spool)[0], places[0].offset + 500)
    with pytest.raises(RecordLost, match=r"00000000\.puts: the record at byte 0 is damaged"):
        spool.read(places[0])
    assert spool.read(places[1]) == record(1)
    for place in places:
        assert not (tmp_path / "aside").exists()
        spool.acknowledge(place)
    kept = (tmp_path / "aside/node-cpu0.1-00000000.puts").read_bytes()
    assert [found for found in scan(kept) if isinstance(found, Record)] == [record(1)]
    assert spool.read(spool.append(record(2))) == record(2)


def test_a_segment_that_somebody_has_removed_costs_its_records_only(spool):
    place = spool.append(record(1))
    files_of(spool)[0].unlink()
    with pytest.raises(RecordLost, match="no such file"):
        spool.read(place)
    spool.acknowledge(place)
    assert spool.read(spool.append(record(2))) == record(2)


def test_a_record_that_the_disk_does_not_read_now_is_not_lost(spool, tmp_path):
    place = spool.append(record(1))
    (path,) = files_of(spool)
    restore = make_unreadable(path)
    with pytest.raises(StorageError, match="Input/output error") as raised:
        spool.read(place)
    assert not isinstance(raised.value, RecordLost)
    restore()
    assert spool.read(place) == record(1)
    spool.acknowledge(place)
    spool.close()
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_segment_that_cannot_be_put_aside_is_left_to_the_next_searcher(spool, tmp_path):
    place = spool.append(record(1))
    damage(files_of(spool)[0], 500)
    with pytest.raises(RecordLost):
        spool.read(place)
    (tmp_path / "aside").write_text("a file in the way")
    with pytest.raises(StorageError, match="File exists"):
        spool.acknowledge(place)
    spool.acknowledge(spool.append(record(2)))
    spool.close()
    (tmp_path / "aside").unlink()
    orphan = the_orphan(tmp_path)
    assert record(1) not in [item for _, item in orphan.records()]
    orphan.remove()
    assert [path.name for path in (tmp_path / "aside").iterdir()] == ["node-cpu0.1-00000000.puts"]


def damage(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_a_spool_without_anything_left_leaves_no_directory(tmp_path):
    spool = Spool(tmp_path, OWNER, limit_bytes=BIG)
    spool.acknowledge(spool.append(record(1)))
    spool.close()
    assert list(tmp_path.iterdir()) == []


def test_a_spool_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="the spool .*file"):
        Spool(tmp_path / "file", OWNER, limit_bytes=BIG)


# ---------------------------------------------------------------- dead searchers


def abandoned(root: Path, count: int, owner: Owner = OWNER) -> list[Record]:
    """A spool as a searcher leaves it that ends without its puts acknowledged."""
    spool = Spool(root, owner, limit_bytes=BIG)
    records = [record(n, 50_000) for n in range(count)]
    for item in records:
        spool.append(item)
    spool.close()
    return records


def the_orphan(root: Path) -> Orphan:
    (orphan,) = find_orphans(root, "node")
    return orphan


def test_the_spool_of_a_dead_searcher_is_found_with_all_its_records_in_order(tmp_path):
    records = abandoned(tmp_path, 6)
    orphan = the_orphan(tmp_path)
    assert orphan.owner == OWNER
    assert [item for _, item in orphan.records()] == records
    orphan.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_spool_of_a_living_searcher_is_not_taken(spool, tmp_path):
    spool.append(record(1))
    assert find_orphans(tmp_path, "node") == []


def test_a_spool_is_taken_by_one_searcher_only_and_by_another_when_that_gives_it_up(tmp_path):
    abandoned(tmp_path, 2)
    orphan = the_orphan(tmp_path)
    assert find_orphans(tmp_path, "node") == []
    orphan.close()
    the_orphan(tmp_path).close()


def test_the_spool_of_another_machine_is_not_taken(tmp_path):
    abandoned(tmp_path, 2)
    assert find_orphans(tmp_path, "elsewhere") == []


def test_what_is_damaged_is_counted_and_kept_aside_and_the_rest_comes(tmp_path):
    records = abandoned(tmp_path, 2)
    segment = next(tmp_path.glob("*/*.puts"))
    damage(segment, 30_000)
    orphan = the_orphan(tmp_path)
    assert [item for _, item in orphan.records()] == records[1:]
    assert orphan.damaged == 1
    orphan.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["aside"]
    assert [path.is_file() for path in orphan.kept] == [True]
    assert find_orphans(tmp_path, "node") == []


def test_a_segment_that_the_disk_does_not_read_now_comes_at_the_next_start_and_the_others_at_once(tmp_path, caplog):
    records = abandoned(tmp_path, 9)
    first, second, *_ = sorted(tmp_path.glob("*/*.puts"))
    lost = len(list(scan(second.read_bytes())))
    restore = make_unreadable(second)
    orphan = the_orphan(tmp_path)
    before = len(list(scan(first.read_bytes())))
    assert [item for _, item in orphan.records()] == records[:before] + records[before + lost :]
    (told,) = caplog.records
    assert told.fields["path"] == second
    assert told.fields["reason"] == "Input/output error"
    with pytest.raises(StorageError, match=f"{second.name} could not be read; the next start tries again"):
        orphan.remove()
    orphan.close()
    restore()
    orphan = the_orphan(tmp_path)
    assert [item for _, item in orphan.records()] == records
    assert orphan.damaged == 0
    orphan.remove()
    assert list(tmp_path.iterdir()) == []


def make_unreadable(path: Path) -> Callable[[], object]:
    """From now on each read of a file is an I/O error, as of the memory at address 0, until what this returns."""
    real = path.rename(path.with_name("real"))
    path.symlink_to("/proc/self/mem")
    return lambda: real.rename(path)


def test_a_directory_that_is_no_spool_is_left_alone(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/owner.json").write_text("{")
    assert find_orphans(tmp_path, "node") == []
    assert find_orphans(tmp_path / "missing", "node") == []
