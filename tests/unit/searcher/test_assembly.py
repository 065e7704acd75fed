"""Assembled weights equal the trainer's bit for bit, whatever is missing or damaged on the way."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from tba.common.clock import SystemClock
from tba.common.errors import ConfigError, SnapshotError
from tba.common.weights import snapshot
from tba.common.weights.node_store import VERIFIED, clear, delete, mark_verified
from tba.common.weights.snapshot import DELTA, SnapshotKey
from tba.common.weights.tensor_file import blake3_of
from tba.searcher.weights import assembly
from tba.searcher.weights.assembly import SnapshotAssembler
from tba.tests.helpers.hands import HANDS, repair
from tba.tests.helpers.users import closed_directory
from tba.tests.helpers.weights import WEIGHTS, CountingServer, RandomWeights, flip_a_byte
from tba.tests.runner import size


@pytest.fixture
def trainer(tmp_path):
    server = CountingServer("tcp://127.0.0.1:*", tmp_path / "snapshots")
    yield RandomWeights(tmp_path / "snapshots", address=server.address)
    server.close()


@pytest.fixture
def assembler(tmp_path):
    """On a node that fetches."""
    return SnapshotAssembler(tmp_path / "node", "trainer", SystemClock())


def bits_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name].view(torch.int16), theirs[name].view(torch.int16)) for name in ours
    )


@pytest.mark.slow
def test_published_deltas_in_a_row_give_the_trainers_weights_bit_for_bit(publisher_harness, assembler):
    lab = publisher_harness(dtype="bfloat16", keep_snapshots=3, serve_snapshots="tcp://127.0.0.1:*")
    publisher = lab.publisher()
    pinned = None
    for step in range(size(16, 51)):
        lab.change_a_few(step)
        publisher.publish(step)
        assert publisher.flush(60)
        found, newer = assembler.assemble(lab.announced_ref())
        assert (found.manifest.delta is None) is (step == 0)
        assert bits_equal(load_file(found.weight_files[0]), lab.weights())
        if pinned:
            pinned.release()
        pinned = newer
    assert len(list((assembler._cache.directory).glob("v*"))) <= 3


def test_intermediate_versions_are_not_assembled(trainer, assembler):
    assembler.assemble(trainer.full())
    for _ in range(4):
        newest = trainer.delta()
    # Its files are in the cache.
    shutil.rmtree(trainer.directory / "v00000000")
    found, _ = assembler.assemble(newest)
    assert (found.path / WEIGHTS).read_bytes() == trainer.truth[4]
    assert {path.name for path in found.path.iterdir()} == {"manifest.json", "config.json", WEIGHTS, VERIFIED}
    assert not list(assembler._cache.directory.glob("v00000002-*"))


def damage_in_cache(trainer, found):
    """Flip a byte of weights in the cache, and not of the trainer's file that they are linked to."""
    found.weight_files[0].unlink()
    shutil.copyfile(trainer.path(0, WEIGHTS), found.weight_files[0])
    flip_a_byte(found.weight_files[0])


def test_weights_of_another_process_are_trusted_until_an_engine_has_refused_them(tmp_path, trainer):
    found, pinned = SnapshotAssembler(tmp_path / "node", "path", SystemClock()).assemble(trainer.full())
    pinned.release()
    damage_in_cache(trainer, found)
    other = SnapshotAssembler(tmp_path / "node", "path", SystemClock())
    trusted, pinned = other.assemble(trainer.refs[0])
    assert (trusted.path / WEIGHTS).read_bytes() != trainer.truth[0]
    # As the follower does after a refusal.
    pinned.release()
    again, _ = other.assemble(trainer.refs[0], refresh=True)
    assert (again.path / WEIGHTS).read_bytes() == trainer.truth[0]


@pytest.mark.parametrize("record", ["another-boot {}", "{}", None, "of another size"])
def test_weights_of_another_size_or_without_a_record_of_this_boot_are_hashed_again(tmp_path, trainer, record):
    found, pinned = SnapshotAssembler(tmp_path / "node", "path", SystemClock()).assemble(trainer.full())
    pinned.release()
    damage_in_cache(trainer, found)
    if record == "of another size":
        with found.weight_files[0].open("ab") as file:
            file.write(b"more")
    else:
        (found.path / VERIFIED).unlink()
        if record:
            (found.path / VERIFIED).write_text(record.format(trainer.refs[0].manifest_sha256))
    again, _ = SnapshotAssembler(tmp_path / "node", "path", SystemClock()).assemble(trainer.refs[0])
    assert (again.path / WEIGHTS).read_bytes() == trainer.truth[0]


@pytest.fixture
def hashed(monkeypatch):
    """The names of the files that were read to be hashed."""
    names = []

    def counting(path):
        names.append(path.name)
        return blake3_of(path)

    monkeypatch.setattr(snapshot, "blake3_of", counting)
    return names


def test_a_node_hashes_linked_weights_once_and_fetched_ones_while_receiving(tmp_path, trainer, hashed):
    linked = trainer.full()
    hashed.clear()
    for _ in range(7):
        SnapshotAssembler(tmp_path / "linked", "path", SystemClock()).assemble(linked)
    assert sorted(hashed) == ["config.json", WEIGHTS]
    hashed.clear()
    for _ in range(7):
        SnapshotAssembler(tmp_path / "fetched", "trainer", SystemClock()).assemble(linked)
    assert not hashed
    # A delta costs one copy, and one hash of the weights.
    newest = trainer.delta()
    hashed.clear()
    for _ in range(7):
        SnapshotAssembler(tmp_path / "fetched", "trainer", SystemClock()).assemble(newest)
    assert hashed == [WEIGHTS]


def test_what_the_trainer_wrote_into_the_nodes_directory_is_only_pinned(tmp_path, trainer, hashed):
    ref, node = trainer.full(), tmp_path / "node"
    key = SnapshotKey(ref.version, ref.manifest_sha256)
    shutil.copytree(ref.path, node / key.name)
    mark_verified(node / key.name, ref.manifest_sha256)
    before = (node / key.name / WEIGHTS).stat()
    hashed.clear()
    ref = replace(ref, path=str(node / key.name))
    found, pinned = SnapshotAssembler(node, "auto", SystemClock()).assemble(ref)
    assert not hashed
    assert found.weight_files == [node / key.name / WEIGHTS]
    assert found.weight_files[0].stat().st_ino == before.st_ino
    # The trainer cannot write to it again before it is released.
    assert not delete(found.path)
    pinned.release()
    assert delete(found.path)


def test_a_copy_that_could_have_been_a_link_is_logged_once(tmp_path, trainer, monkeypatch, caplog):
    def link(source, target):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", link)
    # The directory of the test may be in memory, where a copy of what is on disk is no surprise.
    monkeypatch.setattr(assembly, "MEMORY", tmp_path / "memory")
    assembler = SnapshotAssembler(tmp_path / "node", "path", SystemClock())
    for _ in range(3):
        assembler.assemble(trainer.full())[1].release()
    (warning,) = [one for one in caplog.records if "copied, not linked" in one.message]
    assert "search.weights_dir" in warning.message
    assert warning.fields["reason"] == "Invalid cross-device link"


def test_remove_created_deletes_only_unused_snapshots_that_this_process_created(tmp_path, trainer):
    searcher, evaluation = (SnapshotAssembler(tmp_path / "node", "path", SystemClock()) for _ in range(2))
    full = trainer.full()
    searcher.assemble(full)[1].release()
    own, shared = trainer.delta(), trainer.delta()
    for ref in (full, own, shared):
        evaluation.assemble(ref)[1].release()
    served, pinned = searcher.assemble(shared)
    evaluation.remove_created()
    assert {path.name[:9] for path in (tmp_path / "node").iterdir()} <= {"v00000000", "v00000002"}
    assert (served.path / WEIGHTS).read_bytes() == trainer.truth[2]
    pinned.release()
    searcher.remove_created()
    evaluation.remove_created()
    assert not (tmp_path / "node").exists()
    # Unfinished ones, too.
    ref = trainer.full()
    trainer.path(ref.version, WEIGHTS).unlink()
    with pytest.raises(SnapshotError):
        searcher.assemble(ref)
    assert list((tmp_path / "node").iterdir())
    searcher.remove_created()
    assert not (tmp_path / "node").exists()


@pytest.mark.parametrize("damage", [flip_a_byte, Path.unlink, lambda path: path.write_bytes(b""), None])
def test_all_weights_are_fetched_if_a_delta_or_the_base_is_missing_or_damaged(trainer, assembler, damage):
    base, _ = assembler.assemble(trainer.full())
    trainer.delta()
    if damage:
        damage(trainer.path(1, DELTA))
    else:
        damage_in_cache(trainer, base)
    found, _ = assembler.assemble(trainer.delta())
    assert (found.path / WEIGHTS).read_bytes() == trainer.truth[2]


def test_a_delta_is_not_applied_to_another_runs_snapshot_of_the_same_version(tmp_path, trainer, assembler):
    other = RandomWeights(tmp_path / "another")
    SnapshotAssembler(tmp_path / "node", "path", SystemClock()).assemble(other.full())
    trainer.full()
    found, _ = assembler.assemble(trainer.delta())
    assert (found.path / WEIGHTS).read_bytes() == trainer.truth[1]


def test_weights_in_use_are_never_deleted(trainer, assembler, tmp_path):
    served, pinned = assembler.assemble(trainer.full())
    neighbour = SnapshotAssembler(tmp_path / "node", "path", SystemClock())
    for _ in range(6):
        neighbour.assemble(trainer.delta())[1].release()
    assert served.weight_files[0].read_bytes() == trainer.truth[0]
    pinned.release()
    neighbour.assemble(trainer.delta())[1].release()
    assert not served.path.exists()
    assert len(list((tmp_path / "node").glob("v*"))) == 2


def test_clearing_the_cache_keeps_files_of_others(trainer, tmp_path):
    directory = tmp_path / "node"
    assembler = SnapshotAssembler(directory, "path", SystemClock())
    _, pinned = assembler.assemble(trainer.full())
    for name in ("v2-sft", ".v3.part"):
        (directory / name).mkdir()
    (directory / "v1-notes.txt").write_text("mine")
    pinned.release()
    clear(directory)
    assert {path.name for path in directory.iterdir()} == {"v2-sft", ".v3.part", "v1-notes.txt"}


@pytest.mark.parametrize("hand", HANDS)
def test_a_weights_directory_that_changes_hands_costs_an_error_at_most_and_works_again_when_it_is_put_back(
    trainer, assembler, tmp_path, hand
):
    node = tmp_path / "node"
    served, _ = assembler.assemble(trainer.full())
    newest = trainer.delta()
    # As an engine maps a file.
    with (served.path / WEIGHTS).open("rb") as kept:
        hand(node)
        assert kept.read() == trainer.truth[0]
    try:
        found, _ = assembler.assemble(newest)
    except (SnapshotError, ConfigError) as error:
        assert str(node) in str(error)  # noqa: PT017
    else:
        assert (found.path / WEIGHTS).read_bytes() == trainer.truth[1]
    repair(node)
    found, _ = assembler.assemble(trainer.delta())
    assert (found.path / WEIGHTS).read_bytes() == trainer.truth[2]


def test_a_read_only_weights_directory_is_an_error_that_names_it(trainer, tmp_path):
    newest = trainer.full()
    with closed_directory(0o555) as directory:
        assembler = SnapshotAssembler(directory, "trainer", SystemClock())
        with pytest.raises(SnapshotError, match=f"{directory}.*(Permission denied|Read-only)"):
            assembler.assemble(newest)
