"""Snapshots over the socket: resumed, verified, and limited to the files that a manifest names."""

import contextlib
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.errors import SnapshotCorrupt, SnapshotError
from tba.common.weights.node_store import VERIFIED, try_lock
from tba.common.weights.snapshot import MANIFEST
from tba.common.weights.snapshot_server import NodeServer
from tba.searcher.engines.engine import LoadReport, Mismatch
from tba.searcher.weights import fetch
from tba.searcher.weights.assembly import SnapshotAssembler
from tba.searcher.weights.fetch import Fetcher, Progress
from tba.searcher.weights.follower import WeightsFollower
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.weights import WEIGHTS, CountingServer, RandomWeights, flip_a_byte

pytestmark = pytest.mark.slow

# Ten chunks of 1 MiB.
ELEMENTS = 5_000_000


@pytest.fixture
def server(tmp_path):
    server = CountingServer("tcp://127.0.0.1:*", tmp_path / "snapshots")
    yield server
    server.close()


@pytest.fixture
def trainer(tmp_path, server):
    return RandomWeights(tmp_path / "snapshots", elements=ELEMENTS, address=server.address)


@pytest.fixture
def assembler(tmp_path):
    return SnapshotAssembler(tmp_path / "node", "trainer", SystemClock())


@pytest.fixture
def fetcher(server):
    fetcher = Fetcher(server.address, SystemClock(), Progress())
    yield fetcher
    fetcher.close()


@pytest.fixture
def follower(tmp_path):
    """A follower whose engine accepts everything."""
    config = {"run": {"name": "r"}, "search": {"weights_dir": str(tmp_path / "node"), "weights_from": "trainer"}}
    report = LoadReport(Mismatch(0, 0, 0), "none", 0, 0, 0, 0)
    engine: Any = SimpleNamespace(prepare=lambda snapshot: None, load_weights=lambda snapshot: report)
    follower = WeightsFollower(Config.model_validate(config), engine, SystemClock())
    yield follower
    follower.close()


def serves(follower, ref) -> bool:
    """Whether a snapshot is loaded, after an update."""
    follower.update(ref)
    return follower.current == ref


@contextlib.contextmanager
def open_directory(path):
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def part_of(tmp_path, ref):
    """The directory in which a node assembles a snapshot."""
    part = tmp_path / f"node/.v{ref.version:08d}-{ref.manifest_sha256[:16]}.part"
    part.mkdir(parents=True)
    return part


def test_a_snapshot_is_read_from_its_path_if_that_exists_and_fetched_otherwise(trainer, server, assembler, tmp_path):
    auto = SnapshotAssembler(tmp_path / "node", "auto", SystemClock())
    auto.assemble(trainer.full())
    assert server.served == {}
    elsewhere = replace(trainer.full(), path="/not/on/this/node/v00000001")
    found, _ = auto.assemble(elsewhere)
    assert found.weight_files[0].read_bytes() == trainer.truth[1]
    assert server.served[WEIGHTS] == len(trainer.truth[1])
    # Without path and server.
    elsewhere = replace(trainer.full(), address="", path="/not/on/this/node/v00000002")
    with pytest.raises(SnapshotError, match="set train.serve_snapshots"):
        assembler.assemble(elsewhere)
    with pytest.raises(SnapshotError, match="or train.serve_snapshots in the trainer's configuration"):
        auto.assemble(elsewhere)


def test_a_fetch_resumes_where_an_earlier_one_was_interrupted(trainer, server, assembler, tmp_path):
    ref = trainer.full()
    kept = 3_000_001
    (part_of(tmp_path, ref) / WEIGHTS).write_bytes(trainer.truth[0][:kept])
    found, _ = assembler.assemble(ref)
    assert found.weight_files[0].read_bytes() == trainer.truth[0]
    assert server.served[WEIGHTS] == len(trainer.truth[0]) - kept


@pytest.mark.parametrize("size", [3_000_000, 2 * ELEMENTS + 100_000])
def test_a_partial_file_with_wrong_bytes_is_fetched_again(trainer, assembler, tmp_path, size):
    ref = trainer.full()
    (part_of(tmp_path, ref) / WEIGHTS).write_bytes(bytes(size))
    found, _ = assembler.assemble(ref)
    assert found.weight_files[0].read_bytes() == trainer.truth[0]


def test_a_corrupted_file_is_fetched_once_more_and_then_refused(trainer, server, assembler):
    ref = trainer.full()
    flip_a_byte(trainer.path(0, WEIGHTS))
    with pytest.raises(SnapshotCorrupt, match="does not hash"):
        assembler.assemble(ref)
    assert server.served[WEIGHTS] == 2 * len(trainer.truth[0])
    flip_a_byte(trainer.path(0, WEIGHTS))
    found, _ = assembler.assemble(ref)
    assert found.weight_files[0].read_bytes() == trainer.truth[0]


def test_a_manifest_that_was_not_announced_is_refused(trainer, assembler):
    ref = trainer.full()
    flip_a_byte(trainer.path(0, MANIFEST))
    with pytest.raises(SnapshotCorrupt, match="manifest"):
        assembler.assemble(ref)


def test_only_files_that_a_manifest_names_are_served(trainer, fetcher, server, tmp_path):
    trainer.full()
    trainer.path(0, "secret.txt").write_text("not named")
    trainer.path(0, "link").symlink_to("/etc/hostname")
    for name in ("..", ".", "../v00000001/model.safetensors", "/etc/hostname", "secret.txt", "link", "no\0name"):
        with pytest.raises(SnapshotError, match="refused"):
            fetcher.fetch(0, name, tmp_path / "target")
    assert server.served == {}
    # One that is named, and became a link.
    trainer.path(0, WEIGHTS).unlink()
    trainer.path(0, WEIGHTS).symlink_to("/etc/hostname")
    with pytest.raises(SnapshotError, match="refused"):
        fetcher.fetch(0, WEIGHTS, tmp_path / "target")
    with pytest.raises(SnapshotError, match="v7 has no 'manifest.json' here"):
        fetcher.fetch(7, MANIFEST, tmp_path / "target")


def test_a_fetch_continues_after_the_trainer_went_away_and_came_back(trainer, server, tmp_path, monkeypatch, follower):
    monkeypatch.setattr(fetch, "_CHUNK_BYTES", 4096)
    monkeypatch.setattr(fetch, "_REPORT_SECONDS", 0.3)
    reached = threading.Event()
    original = server._chunk

    def chunk(reader, asked):
        if asked.file == WEIGHTS and asked.offset > 1_000_000:
            reached.set()
        return original(reader, asked)

    server._chunk = chunk
    ref = trainer.full()
    follower.update(ref)
    assert reached.wait(60)
    server.close()
    wait_until(lambda: "waiting for the trainer" in follower.reason)
    back = CountingServer(server.address, tmp_path / "snapshots")
    wait_until(lambda: serves(follower, ref))
    assert next((tmp_path / "node").rglob(f"v*/{WEIGHTS}")).read_bytes() == trainer.truth[0]
    assert follower.reason == ""
    assert back.served[WEIGHTS] < len(trainer.truth[0]) - 900_000
    back.close()


def test_a_fetch_ends_if_each_reply_comes_after_its_request_was_repeated(
    trainer, server, fetcher, tmp_path, monkeypatch
):
    monkeypatch.setattr(fetch, "_TIMEOUT_SECONDS", 0.05)
    original, fetched = server._chunk, threading.Event()

    def chunk(reader, asked):
        fetched.wait(0.2)
        return original(reader, asked)

    trainer.full()
    server._chunk = chunk
    fetcher.fetch(0, WEIGHTS, tmp_path / "weights", size=len(trainer.truth[0]))
    fetched.set()
    assert (tmp_path / "weights").read_bytes() == trainer.truth[0]


def test_a_snapshot_is_held_until_its_last_reader_asks_for_another_one(trainer, server, fetcher, tmp_path):
    paths = [Path(trainer.full().path) for _ in range(2)]

    def held() -> list[bool]:
        found = []
        for path in paths:
            with open_directory(path) as descriptor:
                found.append(not try_lock(descriptor))
        return found

    second = Fetcher(server.address, SystemClock(), Progress())
    fetcher.fetch(0, MANIFEST, tmp_path / "0")
    # Between two files it must not be written again.
    assert held() == [True, False]
    second.fetch(0, "config.json", tmp_path / "config")
    fetcher.fetch(1, MANIFEST, tmp_path / "1")
    assert held() == [True, True]
    second.fetch(1, "config.json", tmp_path / "config1")
    assert held() == [False, True]
    second.close()


def test_a_snapshot_whose_readers_are_gone_is_let_go(trainer, server, fetcher, tmp_path, monkeypatch):
    monkeypatch.setattr("tba.common.weights.snapshot_server._HOLD_SECONDS", 0.5)
    path = Path(trainer.full().path)
    fetcher.fetch(0, MANIFEST, tmp_path / "0")
    with open_directory(path) as descriptor:
        wait_until(lambda: try_lock(descriptor))


def test_a_fetch_that_only_waits_is_abandoned_for_a_newer_snapshot(trainer, follower):
    assert not serves(follower, replace(trainer.full(), address="tcp://127.0.0.1:9"))
    newer = trainer.full()
    wait_until(lambda: serves(follower, newer))


def test_a_partial_file_that_is_linked_elsewhere_is_not_written_to(trainer, fetcher, tmp_path):
    ref = trainer.full()
    linked, served = tmp_path / "part", tmp_path / "served"
    served.write_bytes(b"of another snapshot")
    linked.hardlink_to(served)
    fetcher.fetch(ref.version, WEIGHTS, linked, size=len(trainer.truth[0]))
    assert linked.read_bytes() == trainer.truth[0]
    assert served.read_bytes() == b"of another snapshot"


@pytest.fixture
def other(tmp_path):
    """Another node: its directory and its server."""
    directory = tmp_path / "other"
    directory.mkdir()
    server = NodeServer("tcp://127.0.0.1:*", directory)
    yield directory, server
    server.close()


def test_weights_are_fetched_from_another_node_and_the_manifest_from_the_trainer(
    trainer, server, assembler, other, tmp_path
):
    directory, node = other
    ref = trainer.full()
    _, pinned = SnapshotAssembler(directory, "trainer", SystemClock()).assemble(ref)
    pinned.release()
    server.served.clear()
    found, _ = assembler.assemble(ref, nodes=[node.address])
    assert (found.path / WEIGHTS).read_bytes() == trainer.truth[0]
    assert server.served.keys() == {MANIFEST}


def test_what_another_node_has_fetched_so_far_is_fetched_from_it_and_the_rest_from_the_trainer(
    trainer, server, assembler, other, tmp_path, monkeypatch
):
    monkeypatch.setattr(fetch, "_NODE_SECONDS", 0.5)
    directory, node = other
    ref = trainer.full()
    part = directory / f".v00000000-{ref.manifest_sha256[:16]}.part"
    part.mkdir()
    shutil.copyfile(trainer.path(0, MANIFEST), part / MANIFEST)
    shutil.copyfile(trainer.path(0, "config.json"), part / "config.json")
    begun = 2 * fetch._CHUNK_BYTES
    (part / WEIGHTS).write_bytes(trainer.truth[0][: begun + 1000])
    found, _ = assembler.assemble(ref, nodes=[node.address])
    assert (found.path / WEIGHTS).read_bytes() == trainer.truth[0]
    assert server.served[WEIGHTS] == len(trainer.truth[0]) - begun


def test_a_node_with_wrong_bytes_costs_one_more_fetch_and_one_without_a_mark_none(
    trainer, server, tmp_path, other, monkeypatch
):
    monkeypatch.setattr(fetch, "_NODE_SECONDS", 0.5)
    directory, node = other
    ref = trainer.full()
    theirs, _ = SnapshotAssembler(directory, "trainer", SystemClock()).assemble(ref)
    flip_a_byte(theirs.path / WEIGHTS)
    for name in ("trusting", "warned"):
        server.served.clear()
        assembler = SnapshotAssembler(tmp_path / name, "trainer", SystemClock())
        found, _ = assembler.assemble(ref, nodes=[node.address])
        assert (found.path / WEIGHTS).read_bytes() == trainer.truth[0]
        assert server.served[WEIGHTS] == len(trainer.truth[0])
        (theirs.path / VERIFIED).unlink(missing_ok=True)


def test_sources_that_cannot_be_reached_are_left_out(trainer, assembler, monkeypatch):
    monkeypatch.setattr(fetch, "_NODE_SECONDS", 0.2)
    found, _ = assembler.assemble(trainer.full(), nodes=["tcp://127.0.0.1:1", "nonsense"])
    assert (found.path / WEIGHTS).read_bytes() == trainer.truth[0]


def test_a_node_serves_no_file_that_no_manifest_names(trainer, other):
    directory, node = other
    ref = trainer.full()
    _, pinned = SnapshotAssembler(directory, "trainer", SystemClock()).assemble(ref)
    pinned.release()
    fetcher = Fetcher(node.address, SystemClock(), Progress())
    for name in (VERIFIED, "../secret", ".hidden"):
        with pytest.raises(SnapshotError, match="refused"):
            fetcher.fetch(0, name, directory / "stolen")
    fetcher.close()
