"""Snapshots over the socket: the right bytes, resumed, checked, and nothing but what a manifest names."""

import threading

import pytest

from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.errors import SnapshotCorrupt, SnapshotError
from tba.common.snapshot import MANIFEST
from tba.searcher import fetch
from tba.searcher.fetch import Fetcher
from tba.searcher.host_copy import HostCopy
from tba.searcher.prefetch import Prefetcher
from tba.tests.weights_lab import WEIGHTS, CountingServer, RandomWeights, flip_a_byte

ELEMENTS = 5_000_000  # five chunks of 2 MiB


@pytest.fixture
def server(tmp_path):
    server = CountingServer("tcp://127.0.0.1:*", tmp_path / "snapshots")
    yield server
    server.close()


@pytest.fixture
def trainer(tmp_path, server):
    return RandomWeights(tmp_path / "snapshots", elements=ELEMENTS, address=server.address)


@pytest.fixture
def copies(tmp_path):
    return HostCopy(tmp_path / "node", "trainer", SystemClock())


@pytest.fixture
def fetcher(server):
    fetcher = Fetcher(server.address, SystemClock(), wanted=lambda: True, tell=lambda _: None)
    yield fetcher
    fetcher.close()


@pytest.fixture
def prefetcher(tmp_path):
    config = {"run": {"name": "r"}, "search": {"weights_dir": str(tmp_path / "node"), "weights_from": "trainer"}}
    prefetcher = Prefetcher(Config.model_validate(config), SystemClock())
    yield prefetcher
    prefetcher.close()


def part_of(tmp_path, ref):
    """The directory where a node collects a snapshot's files."""
    part = tmp_path / f"node/.v{ref.version:08d}-{ref.manifest_sha256[:16]}.part"
    part.mkdir(parents=True)
    return part


def test_full_snapshots_and_deltas_come_through_the_socket(trainer, copies):
    for version, publish in enumerate([trainer.full, trainer.delta, trainer.delta]):
        found, _ = copies.prepare(publish())
        assert found.weight_files[0].read_bytes() == trainer.truth[version]


def test_the_path_is_taken_where_it_is_there_and_the_trainer_else(trainer, server, tmp_path):
    auto = HostCopy(tmp_path / "node", "auto", SystemClock())
    auto.prepare(trainer.full())
    assert server.served == {}
    elsewhere = trainer.full().model_copy(update={"path": "/not/on/this/node/v00000001"})
    found, _ = auto.prepare(elsewhere)
    assert found.weight_files[0].read_bytes() == trainer.truth[1]
    assert server.served[WEIGHTS] == len(trainer.truth[1])


def test_without_path_and_server_the_sentence_says_what_to_set(trainer, copies):
    with pytest.raises(SnapshotError, match="set train.serve_snapshots"):
        copies.prepare(trainer.full().model_copy(update={"address": ""}))


def test_a_fetch_goes_on_where_an_earlier_one_was_cut_off(trainer, server, copies, tmp_path):
    ref = trainer.full()
    kept = 3_000_001
    (part_of(tmp_path, ref) / WEIGHTS).write_bytes(trainer.truth[0][:kept])
    found, _ = copies.prepare(ref)
    assert found.weight_files[0].read_bytes() == trainer.truth[0]
    assert server.served[WEIGHTS] == len(trainer.truth[0]) - kept


@pytest.mark.parametrize("size", [3_000_000, 2 * ELEMENTS + 100_000])
def test_what_was_left_and_is_wrong_is_fetched_again(trainer, copies, tmp_path, size):
    ref = trainer.full()
    (part_of(tmp_path, ref) / WEIGHTS).write_bytes(bytes(size))
    found, _ = copies.prepare(ref)
    assert found.weight_files[0].read_bytes() == trainer.truth[0]


def test_a_corrupted_file_is_fetched_once_more_and_then_refused(trainer, server, copies):
    ref = trainer.full()
    flip_a_byte(trainer.path(0, WEIGHTS))
    with pytest.raises(SnapshotCorrupt, match="does not hash"):
        copies.prepare(ref)
    assert server.served[WEIGHTS] == 2 * len(trainer.truth[0])
    flip_a_byte(trainer.path(0, WEIGHTS))
    found, _ = copies.prepare(ref)
    assert found.weight_files[0].read_bytes() == trainer.truth[0]


def test_a_manifest_that_was_not_announced_is_refused(trainer, copies):
    ref = trainer.full()
    flip_a_byte(trainer.path(0, MANIFEST))
    with pytest.raises(SnapshotCorrupt, match="manifest"):
        copies.prepare(ref)


@pytest.mark.parametrize(
    "name", ["..", ".", "../v00000001/model.safetensors", "/etc/hostname", "secret.txt", "link", "no\0name"]
)
def test_only_files_that_a_manifest_names_are_served(trainer, fetcher, server, tmp_path, name):
    trainer.full()
    trainer.path(0, "secret.txt").write_text("not named")
    trainer.path(0, "link").symlink_to("/etc/hostname")
    with pytest.raises(SnapshotError, match="refused"):
        fetcher.fetch(0, name, tmp_path / "target")
    assert server.served == {}


def test_a_named_file_that_became_a_link_is_not_followed(trainer, fetcher, tmp_path):
    trainer.full()
    trainer.path(0, WEIGHTS).unlink()
    trainer.path(0, WEIGHTS).symlink_to("/etc/hostname")
    with pytest.raises(SnapshotError, match="refused"):
        fetcher.fetch(0, WEIGHTS, tmp_path / "target")


def test_a_snapshot_that_was_collected_is_a_clear_refusal(trainer, fetcher, tmp_path):
    with pytest.raises(SnapshotError, match="v7 has no 'manifest.json' here"):
        fetcher.fetch(7, MANIFEST, tmp_path / "target")


def test_a_trainer_that_goes_away_in_the_middle_and_comes_back_is_gone_on_with(
    trainer, server, tmp_path, monkeypatch, prefetcher
):
    monkeypatch.setattr(fetch, "_CHUNK_BYTES", 4096)
    monkeypatch.setattr(fetch, "_SAY_SO_SECONDS", 0.3)
    reached = threading.Event()
    original = server._chunk

    def chunk(asked):
        if asked.file == WEIGHTS and asked.offset > 1_000_000:
            reached.set()
        return original(asked)

    server._chunk = chunk
    prefetcher.want(trainer.full(), anew=False)
    assert reached.wait(20)
    server.close()
    assert not prefetcher.wait(1.0)
    assert "waiting for the trainer" in prefetcher.waits_for
    back = CountingServer(server.address, tmp_path / "snapshots")
    assert prefetcher.wait(20)
    assert prefetcher.take().snapshot.weight_files[0].read_bytes() == trainer.truth[0]
    assert prefetcher.waits_for == ""
    assert back.served[WEIGHTS] < len(trainer.truth[0]) - 900_000
    back.close()


def test_what_only_waits_gives_way_to_a_newer_snapshot(trainer, prefetcher):
    nowhere = trainer.full().model_copy(update={"address": "tcp://127.0.0.1:9"})
    prefetcher.want(nowhere, anew=False)
    assert not prefetcher.wait(0.5)
    newer = trainer.full()
    prefetcher.want(newer, anew=False)
    assert prefetcher.wait(20)
    assert prefetcher.take().ref == newer


def test_a_file_with_another_name_is_not_written_to(trainer, fetcher, tmp_path):
    ref = trainer.full()
    linked, served = tmp_path / "part", tmp_path / "served"
    served.write_bytes(b"of another snapshot")
    linked.hardlink_to(served)
    fetcher.fetch(ref.version, WEIGHTS, linked, size=len(trainer.truth[0]))
    assert linked.read_bytes() == trainer.truth[0]
    assert served.read_bytes() == b"of another snapshot"
