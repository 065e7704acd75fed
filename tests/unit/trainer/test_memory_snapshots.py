"""Snapshots in mapped files that are used again: published ones never change, kept ones reach the disk."""

import errno
import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.func import functional_call
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from tba.common.clock import SystemClock
from tba.common.run_snapshots import weights_directory
from tba.common.weights import node_store, snapshot
from tba.common.weights.node_store import pin_path
from tba.common.weights.snapshot import MANIFEST, SnapshotKey
from tba.searcher.weights.assembly import SnapshotAssembler
from tba.tests.helpers.checks import not_none, wait_until
from tba.tests.helpers.passes import counted
from tba.tests.helpers.weights import WEIGHTS
from tba.trainer.model.scorer import weights_of
from tba.trainer.publishing import canary
from tba.trainer.publishing.canary import make_canary, skeleton

pytestmark = pytest.mark.slow


@pytest.fixture
def lab(publisher_harness):
    return publisher_harness(dtype="bfloat16", snapshots_in="memory", steps=99)


def publish(lab, publisher, steps):
    """Publish one after the other, each with other weights. Returns the last announcement."""
    for step in steps:
        lab.change_a_few(step)
        publisher.publish(step)
        assert publisher.flush(60)
    return lab.announced_ref()


def directories(lab) -> list[str]:
    return sorted(path.name.split("-")[0] for path in weights_directory(lab.config).glob("v*"))


def key_of(ref) -> SnapshotKey:
    return SnapshotKey(ref.version, ref.manifest_sha256)


def test_a_snapshot_in_memory_is_a_complete_model_where_searchers_look_for_it_and_is_gone_after_the_run(lab):
    publisher = lab.publisher()
    ref = publish(lab, publisher, [0, 1, 2])
    found = lab.announced()
    assert found.path == weights_directory(lab.config) / key_of(ref).name
    stored = load_file(found.weight_files[0])
    assert stored.keys() == lab.weights().keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in lab.weights().items())
    assert AutoModelForCausalLM.from_pretrained(found.path).dtype == torch.bfloat16
    publisher.finish()
    publisher.close()
    assert not weights_directory(lab.config).exists()


def test_only_the_first_kept_and_last_snapshots_are_on_disk_and_they_are_the_same_bytes(publisher_harness):
    lab = publisher_harness(dtype="bfloat16", snapshots_in="memory", keep_snapshot_every=3, steps=7)
    publisher = lab.publisher()
    refs = [publish(lab, publisher, [step]) for step in range(1, 8)]
    on_disk = [snapshot.read(path).manifest.step for path in snapshot.list_snapshots(lab.config.snapshots)]
    assert on_disk == [1, 3, 6, 7]
    kept, served = lab.config.snapshots / "v00000006", Path(refs[-1].path)
    snapshot.check_manifest(kept, refs[-1].manifest_sha256)
    for name in (MANIFEST, *snapshot.read(served).manifest.files):
        assert (kept / name).read_bytes() == (served / name).read_bytes()


def test_files_are_used_again_and_what_a_searcher_holds_is_not(lab):
    publisher = lab.publisher()
    held = publish(lab, publisher, [0, 1])
    pinned = not_none(pin_path(weights_directory(lab.config) / key_of(held).name))
    before, inode = (pinned.path / WEIGHTS).read_bytes(), (pinned.path / WEIGHTS).stat().st_ino
    inodes = [Path(publish(lab, publisher, [step]).path, WEIGHTS).stat().st_ino for step in range(2, 10)]
    assert (pinned.path / WEIGHTS).read_bytes() == before
    assert inode not in inodes
    assert len(set(inodes)) == 2
    pinned.release()
    publish(lab, publisher, range(10, 13))
    assert directories(lab) == ["v00000012"]


def test_a_trainer_that_stops_keeps_its_newest_snapshot_on_disk_and_in_memory(lab):
    publisher = lab.publisher()
    ref = publish(lab, publisher, range(4))
    publisher.close()
    assert [path.name for path in snapshot.list_snapshots(lab.config.snapshots)] == ["v00000000", "v00000003"]
    assert directories(lab) == ["v00000003"]
    assert publish(lab, lab.publisher(next_version=4), [4]).version == ref.version + 1


def test_the_newest_snapshot_is_found_in_memory_but_not_that_of_an_earlier_run_of_the_same_name(lab):
    ref = publish(lab, lab.publisher(), [0, 1])
    memory, (kept,) = weights_directory(lab.config), snapshot.list_snapshots(lab.config.snapshots)
    left = memory / f"v00000009-{'0' * 16}"
    shutil.copytree(ref.path, left)
    fields = json.loads((left / MANIFEST).read_text())
    (left / MANIFEST).write_text(json.dumps(fields | {"created_at": 0.0}))
    choose = partial(snapshot.choose_snapshots, lab.config.snapshots, memory, None)
    assert choose(every=False) == [Path(ref.path)]
    assert choose(every=True) == [kept, Path(ref.path)]
    (kept / MANIFEST).write_text("{")
    # Whether those in memory are newer is not known. Reading this one raises an error that says what is wrong with it.
    assert choose(every=False) == [kept]


def test_leftovers_make_room_before_the_first_publication_and_the_newest_stays_until_then(lab):
    memory = weights_directory(lab.config)
    for version in (7, 8, 9):
        left = memory / f"v0000000{version}-{'0' * 16}"
        left.mkdir(parents=True)
        os.utime(left, (version, version))
    (memory / f".v00000000-{'1' * 16}.part").mkdir()
    (memory / f".deleted-1-v00000006-{'0' * 16}").mkdir()
    publisher = lab.publisher()
    assert [path.name[:9] for path in memory.iterdir() if path.name != "deltas"] == ["v00000009"]
    publish(lab, publisher, [0])
    assert directories(lab) == ["v00000000"]


def test_an_announced_snapshot_is_not_written_again_before_a_newer_one_is_announced(lab):
    publisher = lab.publisher()
    ref = publish(lab, publisher, [0, 1, 2])
    before = (Path(ref.path) / WEIGHTS).read_bytes()
    lab.buffer.stop()
    for step in (3, 4, 5):
        lab.change_a_few(step)
        publisher.publish(step)
        wait_until(lambda: len(directories(lab)) == 2)
    assert (Path(ref.path) / WEIGHTS).read_bytes() == before
    publisher.close()
    # The one that could not be announced is on disk, too.
    assert directories(lab) == ["v00000002", "v00000003"]
    assert [path.name for path in snapshot.list_snapshots(lab.config.snapshots)] == ["v00000000", "v00000003"]


def test_a_snapshot_whose_manifest_found_no_space_is_tried_again_and_does_not_name_it(lab, monkeypatch):
    failures, mark = [OSError(errno.ENOSPC, "No space left on device")], node_store.mark_verified

    def mark_verified(directory, digest):
        if failures:
            raise failures.pop()
        mark(directory, digest)

    monkeypatch.setattr(node_store, "mark_verified", mark_verified)
    monkeypatch.setattr("tba.trainer.publishing.publisher._SPACE_POLL_SECONDS", 0.05)
    publish(lab, lab.publisher(), [0])
    assert not failures
    assert lab.announced().manifest.files.keys().isdisjoint({MANIFEST, node_store.VERIFIED})


def test_a_file_that_is_linked_elsewhere_or_deleted_is_not_written_again_and_what_took_its_name_is_left_alone(
    lab, tmp_path
):
    publisher = lab.publisher()
    file = Path(publish(lab, publisher, [0, 1]).path, WEIGHTS)
    os.link(file, tmp_path / "linked")
    before = file.read_bytes()
    path = Path(publish(lab, publisher, range(2, 6)).path)
    assert (tmp_path / "linked").read_bytes() == before
    shutil.rmtree(path)
    path.mkdir()
    (path / "other").touch()
    pinned = not_none(pin_path(path))
    newer = Path(publish(lab, publisher, range(6, 10)).path)
    assert (lab.announced().path, (path / "other").exists()) == (newer, True)
    pinned.release()


def test_a_model_that_is_too_large_for_memory_is_published_next_to_its_run(lab):
    config = lab.config.model_copy(update={"search": lab.config.search.model_copy(update={"weights_dir": None})})
    assert not weights_directory(config).is_relative_to(config.run.dir)
    os.truncate(lab.files / "model.safetensors", shutil.disk_usage(lab.files).total)
    assert weights_directory(config) == config.run.dir / "weights" / "r"


def test_passes_over_the_weights_at_the_trainer_are_one_hash_and_one_canary_after_the_copy(publisher_harness):
    lab = publisher_harness(dtype="bfloat16", snapshots_in="memory", hidden=256, tie=False, steps=99)
    publisher = lab.publisher()
    publish(lab, publisher, [0, 1])
    lab.change_weights()
    with counted() as passed:
        publisher.publish(2)
        assert publisher.flush(60)
    whole = sum(tensor.nbytes for tensor in lab.weights().values())
    assert whole <= passed["copied"] < 1.05 * whole
    # Of the embedding, the rows of the canary's tokens alone are widened; the norms are copied, too.
    assert passed["hashed"] + passed["widened"] < 2.05 * whole
    assert passed["written"] + passed["synced"] < 0.05 * whole


def test_a_searcher_of_the_trainers_node_makes_no_pass_and_does_not_delete_files_that_are_used_again(lab):
    publisher = lab.publisher()
    publish(lab, publisher, [0])
    node, inodes = SnapshotAssembler(weights_directory(lab.config), "auto", SystemClock()), set()
    for step in range(1, 12):
        ref = publish(lab, publisher, [step])
        with counted() as passed:
            found, pinned = node.assemble(ref)
        assert not passed
        inodes.add(found.weight_files[0].stat().st_ino)
        pinned.release()
    assert len(inodes) <= 3


def test_a_node_that_fetches_gets_there_by_deltas_although_the_trainer_uses_its_files_again(
    publisher_harness, tmp_path
):
    served = {"serve_snapshots": "tcp://127.0.0.1:*", "steps": 99}
    lab = publisher_harness(dtype="bfloat16", hidden=64, snapshots_in="memory", **served)
    publisher = lab.publisher()
    node = SnapshotAssembler(tmp_path / "node", "trainer", SystemClock())
    for steps in ([0], [1], range(2, 6), range(6, 20)):
        found, pinned = node.assemble(publish(lab, publisher, steps))
        stored = load_file(found.weight_files[0])
        assert all(torch.equal(stored[name], tensor) for name, tensor in lab.weights().items())
        pinned.release()
    deltas = [path.stat().st_size for path in weights_directory(lab.config).glob("deltas/*/delta.safetensors.zst")]
    assert 2 < len(deltas) < 20
    assert sum(deltas) < sum(entry.bytes for entry in found.manifest.files.values())


def test_a_mixture_whose_files_have_its_experts_one_by_one_is_published_as_its_files_are(publisher_harness, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MixtralConfig(vocab_size=64, num_key_value_heads=1, num_local_experts=4, **sizes)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "mixture")
    lab = publisher_harness(dtype="bfloat16", snapshots_in="memory", files=tmp_path / "mixture", steps=99)
    ref = publish(lab, lab.publisher(), [0, 1])
    lab.model.save_pretrained(tmp_path / "expected")
    stored, expected = load_file(Path(ref.path) / WEIGHTS), load_file(tmp_path / "expected" / WEIGHTS)
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], tensor.bfloat16()) for name, tensor in expected.items())


@pytest.mark.parametrize("tie", [False, True])
def test_the_canary_by_layers_of_a_mixture_is_that_of_the_whole_model_in_float32(monkeypatch, tie):
    # Rows of a layer in several blocks.
    monkeypatch.setattr(canary, "_CPU_BLOCK", 100)
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, tie_word_embeddings=tie,
    )  # fmt: skip
    model = MixtralForCausalLM(config).eval()
    weights = {name: tensor.detach().bfloat16() for name, tensor in weights_of(model).items()}
    sequences = [[1, 2, 3, 4, 5, 6, 7], [7, 5], [6, 3, 1]]
    modules = skeleton(model)
    wide = {name: tensor.float() for name, tensor in weights.items()}
    made = make_canary(modules, weights, sequences)
    for sequence, logprobs in zip(sequences, made.logprobs, strict=True):
        tokens = torch.tensor([sequence])
        with torch.no_grad():
            logits = functional_call(modules, wide, (), {"input_ids": tokens, "use_cache": False}).logits[0, :-1]
        expected = logits.log_softmax(1).gather(1, tokens[0, 1:, None])[:, 0]
        assert torch.allclose(torch.tensor(logprobs), expected, atol=1e-5, rtol=0)
