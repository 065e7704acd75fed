"""Complete weights on the node: bit for bit the trainer's, whatever is missing or damaged on the way."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tba.common import delta, snapshot
from tba.common.clock import SystemClock
from tba.common.errors import SnapshotError
from tba.common.tensor_file import map_tensors
from tba.searcher.host_copy import HostCopy
from tba.searcher.node_cache import clear
from tba.tests.weights_lab import WEIGHTS, RandomWeights, flip_a_byte


@pytest.fixture
def trainer(tmp_path):
    return RandomWeights(tmp_path / "snapshots")


@pytest.fixture
def copies(tmp_path):
    return HostCopy(tmp_path / "node", "path", SystemClock())


def bits_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name].view(torch.int16), theirs[name].view(torch.int16)) for name in ours
    )


def test_fifty_published_deltas_in_a_row_give_the_trainers_weights_bit_for_bit(press, copies):
    lab = press(dtype="bfloat16", full_snapshot_every=1000, keep_snapshots=3)
    publisher = lab.publisher()
    held = None
    for step in range(51):
        lab.change_a_few(step)
        publisher.publish(step)
        assert publisher.flush(20)
        found, newer = copies.prepare(lab.announced_ref())
        assert (found.manifest.base is None) is (step == 0)
        assert bits_equal(load_file(found.weight_files[0]), lab.weights())
        if held:
            held.release()
        held = newer
    # Of a chain nothing is collected on the trainer's side, and nearly all on ours.
    assert len(snapshot.list_snapshots(lab.config.snapshots)) == 51
    assert len(list((copies._cache.directory).glob("v*"))) <= 3


def test_a_node_that_joins_late_makes_the_whole_chain_at_once(trainer, copies):
    trainer.full()
    for _ in range(12):
        newest = trainer.delta()
    found, _ = copies.prepare(newest)
    assert (found.path / WEIGHTS).read_bytes() == trainer.truth[12]
    assert {path.name for path in found.path.iterdir()} == {"manifest.json", "config.json", WEIGHTS, delta.FILE}


def test_versions_in_between_are_skipped(trainer, copies):
    copies.prepare(trainer.full())
    for _ in range(4):
        newest = trainer.delta()
    shutil.rmtree(trainer.directory / "v00000000")  # the base is held here; nothing else is needed of it
    found, _ = copies.prepare(newest)
    assert (found.path / WEIGHTS).read_bytes() == trainer.truth[4]
    assert not list(copies._cache.directory.glob("v00000002-*"))


def test_the_file_of_an_older_version_stays_as_it_was(trainer, copies):
    old, _held = copies.prepare(trainer.full())
    copies.prepare(trainer.delta())
    assert old.weight_files[0].read_bytes() == trainer.truth[0]


def test_what_the_trainer_collects_is_still_there(trainer, copies):
    found, _ = copies.prepare(trainer.full())
    shutil.rmtree(trainer.directory)
    assert found.weight_files[0].read_bytes() == trainer.truth[0]


def test_a_damaged_base_leads_back_to_the_full_snapshot(tmp_path, trainer):
    first = HostCopy(tmp_path / "node", "path", SystemClock())
    trainer.full()
    held = first.prepare(trainer.delta())
    held[1].release()
    tensors = map_tensors(held[0].weight_files[0], writable=True)
    tensors["a"].bits[7] ^= 1
    newest = trainer.delta()
    found, _ = first.prepare(newest)  # this process had proved it, before it was damaged
    assert (found.path / WEIGHTS).read_bytes() == trainer.truth[2]


def test_damaged_weights_of_an_earlier_process_are_made_anew(tmp_path, trainer):
    found, held = HostCopy(tmp_path / "node", "path", SystemClock()).prepare(trainer.full())
    held.release()
    found.weight_files[0].unlink()
    shutil.copyfile(trainer.path(0, WEIGHTS), found.weight_files[0])
    flip_a_byte(found.weight_files[0])
    again, _ = HostCopy(tmp_path / "node", "path", SystemClock()).prepare(trainer.refs[0])
    assert (again.path / WEIGHTS).read_bytes() == trainer.truth[0]


def test_who_leaves_takes_along_what_it_made_and_nobody_holds_and_nothing_else(tmp_path, trainer):
    searcher, evaluation = (HostCopy(tmp_path / "node", "path", SystemClock()) for _ in range(2))
    full = trainer.full()
    searcher.prepare(full)[1].release()
    own, shared = trainer.delta(), trainer.delta()
    for ref in (full, own, shared):
        evaluation.prepare(ref)[1].release()
    served, held = searcher.prepare(shared)
    evaluation.remove_made()
    assert {path.name[:9] for path in (tmp_path / "node").iterdir()} <= {"v00000000", "v00000002"}
    assert (served.path / WEIGHTS).read_bytes() == trainer.truth[2]
    held.release()
    searcher.remove_made()
    evaluation.remove_made()
    assert not (tmp_path / "node").exists()


def test_what_was_begun_goes_as_well(tmp_path, trainer):
    copies = HostCopy(tmp_path / "node", "path", SystemClock())
    ref = trainer.full()
    trainer.path(0, WEIGHTS).unlink()
    with pytest.raises(SnapshotError):
        copies.prepare(ref)
    assert list((tmp_path / "node").iterdir())
    copies.remove_made()
    assert not (tmp_path / "node").exists()


@pytest.mark.parametrize("damage", [flip_a_byte, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_missing_or_damaged_delta_is_refused_and_the_next_full_snapshot_goes(trainer, copies, damage):
    copies.prepare(trainer.full())
    broken = trainer.delta()
    damage(trainer.path(1, delta.FILE))
    with pytest.raises(SnapshotError, match="v00000001"):
        copies.prepare(broken)
    with pytest.raises(SnapshotError, match="v00000001"):
        copies.prepare(trainer.delta())
    found, _ = copies.prepare(trainer.full())
    assert (found.path / WEIGHTS).read_bytes() == trainer.truth[3]


def test_a_damaged_delta_does_no_harm_where_a_newer_full_snapshot_follows(trainer, copies):
    copies.prepare(trainer.full())
    trainer.delta()
    trainer.path(1, delta.FILE).unlink()
    trainer.full()
    found, _ = copies.prepare(trainer.delta())
    assert (found.path / WEIGHTS).read_bytes() == trainer.truth[3]


def test_a_delta_is_not_applied_to_another_runs_snapshot_of_the_same_version(tmp_path, copies):
    one, other = RandomWeights(tmp_path / "one"), RandomWeights(tmp_path / "another")
    other.full()
    copies.prepare(other.refs[0])
    one.full()
    found, _ = copies.prepare(one.delta())
    assert (found.path / WEIGHTS).read_bytes() == one.truth[1]


def test_weights_in_use_are_never_collected(trainer, copies, tmp_path):
    served, held = copies.prepare(trainer.full())
    neighbour = HostCopy(tmp_path / "node", "path", SystemClock())
    for _ in range(6):
        neighbour.prepare(trainer.delta())[1].release()
    assert served.weight_files[0].read_bytes() == trainer.truth[0]
    held.release()
    neighbour.prepare(trainer.delta())[1].release()
    assert not served.path.exists()
    assert len(list((tmp_path / "node").glob("v*"))) == 2


def test_the_end_of_a_run_leaves_alone_what_is_not_ours(trainer, tmp_path):
    directory = tmp_path / "node"
    copies = HostCopy(directory, "path", SystemClock())
    _, held = copies.prepare(trainer.full())
    for name in ("v2-sft", ".v3.part"):
        (directory / name).mkdir()
    (directory / "v1-notes.txt").write_text("mine")
    held.release()
    clear(directory)
    assert {path.name for path in directory.iterdir()} == {"v2-sft", ".v3.part", "v1-notes.txt"}
