"""Adapters from a real publisher to a node, whose merge is the trainer's bit for bit, on a base that stays."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tba.common import adapter, snapshot
from tba.common.clock import SystemClock
from tba.common.durable import sha256_of
from tba.common.errors import ConfigError, SnapshotCorrupt, SnapshotError
from tba.common.tensor_file import map_tensors, write_tensor_file
from tba.searcher.host_copy import HostCopy
from tba.searcher.node_cache import clear
from tba.tests.weights_lab import WEIGHTS, CountingServer, flip_a_byte
from tba.trainer.adapter_writer import _names_in_files
from tba.trainer.adapters import scalings

LORA = {"rank": 3, "alpha": 4.0, "publish": "adapter"}
FULL = "model.safetensors"


@pytest.fixture
def lab(press):
    return press(dtype="bfloat16", lora=LORA, steps=99)


@pytest.fixture
def copies(tmp_path):
    return HostCopy(tmp_path / "node", "path", SystemClock())


def publish(lab, publisher, steps) -> None:
    for step in steps:
        if step:
            lab.train_adapters(step)
        publisher.publish(step)
    assert publisher.flush(30)


def same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    kind = {2: torch.int16, 4: torch.int32}
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name].view(kind[one.itemsize]), one.view(kind[one.itemsize])) for name, one in theirs.items()
    )


def kinds(lab) -> list[tuple[int, int, int | None]]:
    """(version, step, base) of the snapshots on disk, oldest first."""
    manifests = [snapshot.read(path).manifest for path in snapshot.list_snapshots(lab.config.snapshots)]
    return [(manifest.version, manifest.step, manifest.base) for manifest in manifests]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tie", [True, False])
def test_what_a_node_merges_is_the_trainers_policy_and_its_canary(press, copies, dtype, tie):
    lab = press(dtype=dtype, tie=tie, lora=LORA, steps=99)
    publisher = lab.publisher()
    for step in range(5):
        publish(lab, publisher, [step])
        found, held = copies.prepare(lab.announced_ref())
        assert found.manifest.change == (adapter.FILE if step else None)
        assert same_bits(load_file(found.weight_files[0]), lab.merged())
        held.release()
    fresh = AutoModelForCausalLM.from_pretrained(shutil.copytree(found.path, found.path.parent / "eval"))
    tokens = torch.tensor(found.manifest.canary.sequences[:1])
    logits = fresh.float()(input_ids=tokens).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].detach()
    assert np.allclose(found.manifest.canary.logprobs[0], expected, atol=1e-5, rtol=0)


def test_an_adapter_snapshot_holds_the_factors_and_nothing_else(lab):
    publish(lab, lab.publisher(), [0, 1])
    found = lab.announced()
    assert {path.name for path in found.path.iterdir()} == {adapter.FILE, "manifest.json"}
    assert (found.manifest.base, found.delta, found.weight_files) == (0, found.path / adapter.FILE, [])
    factors = adapter.read_factors(found.path / adapter.FILE)
    assert factors.keys() == scalings(lab.model).keys()
    assert all(one.low.shape[0] == 3 and one.scaling == np.float32(4 / 3) for one in factors.values())
    assert found.manifest.complete.keys() == snapshot.read(lab.config.snapshots / "v00000000").manifest.files.keys()


def test_the_snapshot_of_step_0_is_the_base_and_those_for_people_are_complete(press):
    lab = press(dtype="bfloat16", lora=LORA, keep_snapshots=99, keep_snapshot_every=3, steps=5)
    publish(lab, lab.publisher(), range(6))
    assert kinds(lab) == [(0, 0, None), (1, 1, 0), (2, 2, 0), (3, 3, None), (4, 4, 0), (5, 5, None)]
    for version, step in ((3, 3), (5, 5)):
        lab.train_adapters(step)
        complete = lab.config.snapshots / f"v{version:08d}"
        assert same_bits(load_file(complete / FULL), lab.merged())
        assert AutoModelForCausalLM.from_pretrained(complete).dtype == torch.bfloat16


def test_the_base_is_kept_although_it_is_neither_new_nor_the_first(press):
    lab = press(dtype="bfloat16", lora=LORA, keep_snapshots=2, keep_snapshot_every=10, steps=99)
    publish(lab, lab.publisher(publish="merged"), [4])
    publisher = lab.publisher(next_version=1)
    publish(lab, publisher, [5, 6, 7, 8])
    assert kinds(lab) == [(0, 4, None), (1, 0, None), (4, 7, 1), (5, 8, 1)]
    publish(lab, publisher, [10, 20, 21])  # the first two in full: for a while none of the newest is on the base
    assert kinds(lab) == [(0, 4, None), (1, 0, None), (6, 10, None), (7, 20, None), (8, 21, 1)]


def test_a_restarted_trainer_finds_the_base_that_it_once_published(lab):
    publish(lab, lab.publisher(), [0, 1])
    publish(lab, lab.publisher(next_version=2), [2, 3])
    # It could not know when it took the number of version 2.
    assert kinds(lab) == [(0, 0, None), (1, 1, 0), (3, 2, 0), (4, 3, 0)]
    publish(lab, lab.publisher(next_version=5), [0])
    assert kinds(lab)[-1] == (5, 0, 0)


def test_a_base_that_somebody_deleted_is_published_again(lab, copies):
    publisher = lab.publisher()
    publish(lab, publisher, [0, 1])
    shutil.rmtree(lab.config.snapshots / "v00000000")
    publish(lab, publisher, [2])
    publish(lab, publisher, [3])
    assert kinds(lab) == [(1, 1, 0), (2, 0, None), (3, 2, 2), (4, 3, 2)]
    found, _ = copies.prepare(lab.announced_ref())
    assert same_bits(load_file(found.weight_files[0]), lab.merged())


def test_a_base_of_other_weights_is_not_built_upon(press):
    lab = press(dtype="bfloat16", lora=LORA, steps=99)
    publish(lab, lab.publisher(), [0])
    with torch.no_grad():
        next(tensor for name, tensor in lab.model.named_parameters() if "base_layer" in name)[0, 0] += 1.0
    publish(lab, lab.publisher(next_version=1), [3])
    assert kinds(lab) == [(0, 0, None), (1, 0, None), (2, 3, 1)]


@pytest.mark.parametrize("damage", [flip_a_byte, lambda path: path.write_bytes(bytes(path.stat().st_size))])
@pytest.mark.parametrize("file", [FULL, "config.json"])
def test_a_base_that_is_damaged_is_not_built_upon(lab, copies, damage, file):
    publish(lab, lab.publisher(), [0, 1])
    damage(lab.config.snapshots / "v00000000" / file)
    publish(lab, lab.publisher(next_version=2), [2, 3])
    assert kinds(lab) == [(0, 0, None), (1, 1, 0), (2, 0, None), (3, 2, 2), (4, 3, 2)]
    found, _ = copies.prepare(lab.announced_ref())
    assert same_bits(load_file(found.weight_files[0]), lab.merged())


def test_a_base_with_files_that_the_model_has_no_longer_is_not_built_upon(lab):
    publish(lab, lab.publisher(), [0])
    (lab.files / "chat_template.jinja").write_text("{{ messages }}")
    publish(lab, lab.publisher(next_version=1), [2])
    assert kinds(lab) == [(0, 0, None), (1, 0, None), (2, 2, 1)]
    template = lab.config.snapshots / "v00000001" / "chat_template.jinja"
    assert lab.announced().manifest.complete[template.name].sha256 == sha256_of(template)


def test_the_last_snapshot_brings_no_base_along(press):
    lab = press(dtype="bfloat16", lora=LORA, steps=5)
    publish(lab, lab.publisher(next_version=3), [5])
    assert kinds(lab) == [(3, 5, None)]
    lab.announced()


def test_a_base_that_comes_later_is_no_policy_and_does_not_count_as_the_newest(lab):
    directory = lab.config.snapshots
    publish(lab, lab.publisher(publish="merged"), [7])
    publish(lab, lab.publisher(next_version=1), [5])  # of an older checkpoint: what it had reached is given up
    shutil.rmtree(directory / "v00000002")  # as before it was written
    assert kinds(lab) == [(0, 7, None), (1, 0, None)]
    assert snapshot.choose_snapshots(directory, None, every=False) == [directory / "v00000000"]
    assert snapshot.choose_snapshots(directory, None, every=True) == [directory / "v00000000"]
    publish(lab, lab.publisher(next_version=3), [5])
    assert snapshot.choose_snapshots(directory, None, every=False) == [directory / "v00000004"]


def test_only_what_older_releases_cannot_read_has_another_format(lab):
    publish(lab, lab.publisher(), [0, 1])
    paths = [lab.config.snapshots / f"v0000000{version}" for version in range(2)]
    assert [json.loads((path / "manifest.json").read_text())["format"] for path in paths] == [1, 2]
    assert "only_base" not in (paths[0] / "manifest.json").read_text()  # older releases refuse keys they do not know
    reseal(paths[1], format=1)  # of a release before there were two
    assert snapshot.read(paths[1]).manifest.change == adapter.FILE
    reseal(paths[1], format=3)
    with pytest.raises(SnapshotError, match="format 3, this release reads 1 and 2"):
        snapshot.read(paths[1])


def test_a_node_that_joins_late_fetches_the_base_and_one_adapter_and_then_adapters_alone(lab, tmp_path):
    publisher = lab.publisher()
    publish(lab, publisher, [0, 1, 2, 3])
    server = CountingServer("tcp://127.0.0.1:*", lab.config.snapshots)
    copies = HostCopy(tmp_path / "node", "trainer", SystemClock())
    for step in range(4, 12):
        ref = lab.announced_ref().model_copy(update={"address": server.address})
        found, held = copies.prepare(ref)
        held.release()
        assert same_bits(load_file(found.weight_files[0]), lab.merged())
        publish(lab, publisher, [step])
    server.close()
    sizes = {name: entry.bytes for name, entry in found.manifest.files.items()}
    assert server.served[FULL] == found.manifest.complete[FULL].bytes
    assert server.served[adapter.FILE] == 8 * sizes[adapter.FILE]
    # The base, and the newest two.
    assert len(list((tmp_path / "node").glob("v*"))) == 3


def test_a_searcher_whose_neighbour_merged_keeps_the_base_as_well(lab, tmp_path):
    publisher = lab.publisher()
    neighbour, mine = (HostCopy(tmp_path / "node", "path", SystemClock()) for _ in range(2))
    for step in range(5):
        publish(lab, publisher, [step])
        ref = lab.announced_ref()
        for copies in (neighbour, mine):
            copies.prepare(ref)[1].release()
    neighbour.remove_made()
    mine.prepare(ref)[1].release()
    assert list((tmp_path / "node").glob("v00000000-*"))
    mine.close()
    clear(tmp_path / "node")
    assert not (tmp_path / "node").exists()


def test_a_damaged_base_on_the_node_is_brought_again(lab, copies):
    publisher = lab.publisher()
    for step in range(3):
        publish(lab, publisher, [step])
        copies.prepare(lab.announced_ref())[1].release()
    (base,) = copies._cache.directory.glob("v00000000-*")
    shutil.copyfile(base / WEIGHTS, base / "copy")  # its file is the trainer's under a second name
    (base / "copy").replace(base / WEIGHTS)
    map_tensors(base / WEIGHTS, writable=True)["model.layers.0.mlp.up_proj.weight"].bits[:] ^= 1
    publish(lab, publisher, [3])
    found, _ = copies.prepare(lab.announced_ref())
    assert same_bits(load_file(found.weight_files[0]), lab.merged())


@pytest.mark.parametrize("serves", ["the same searcher", "an idle neighbour"])
def test_a_damaged_base_that_somebody_serves_stops_no_adapter(lab, tmp_path, serves):
    publisher = lab.publisher()
    publish(lab, publisher, [0])
    copies = HostCopy(tmp_path / "node", "path", SystemClock())
    server = copies if serves == "the same searcher" else HostCopy(tmp_path / "node", "path", SystemClock())
    served, held = server.prepare(lab.announced_ref())
    (served.path / "copy").write_bytes((served.path / WEIGHTS).read_bytes())  # no second name of the trainer's file
    (served.path / "copy").replace(served.path / WEIGHTS)
    flip_a_byte(served.path / WEIGHTS)
    damaged = (served.path / WEIGHTS).read_bytes()
    for step in (1, 2):
        publish(lab, publisher, [step])
        found, newer = copies.prepare(lab.announced_ref())
        newer.release()
        assert same_bits(load_file(found.weight_files[0]), lab.merged())
        assert not (found.path / "chain").exists()
        assert (served.path / WEIGHTS).read_bytes() == damaged  # nobody takes away what is served
    held.release()
    publish(lab, publisher, [3])
    copies.prepare(lab.announced_ref())
    assert sha256_of(served.path / WEIGHTS) == sha256_of(lab.config.snapshots / "v00000000" / WEIGHTS)


@pytest.mark.parametrize("damage", [flip_a_byte, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_missing_or_damaged_adapter_is_refused_and_the_next_one_goes(lab, copies, damage):
    publisher = lab.publisher()
    publish(lab, publisher, [0, 1])
    damage(lab.config.snapshots / "v00000001" / adapter.FILE)
    with pytest.raises(SnapshotError, match="v00000001"):
        copies.prepare(lab.announced_ref())
    publish(lab, publisher, [2])
    found, _ = copies.prepare(lab.announced_ref())
    assert same_bits(load_file(found.weight_files[0]), lab.merged())


def reseal(path: Path, **changes) -> str:
    """Change fields of a manifest that nobody else has seen. Returns its new hash."""
    fields = json.loads((path / "manifest.json").read_text()) | changes
    (path / "manifest.json").write_text(json.dumps(fields))
    return sha256_of(path / "manifest.json")


def test_factors_that_make_other_weights_than_the_manifest_says_are_refused(lab, copies):
    publish(lab, lab.publisher(), [0, 1])
    ref = lab.announced_ref()
    path = lab.config.snapshots / "v00000001" / adapter.FILE
    factors = adapter.read_factors(path)
    name, one = next(iter(factors.items()))
    one.high[0, 0] += 1.0
    size, sha256 = write_tensor_file(path, adapter.tensors_of({**factors, name: one}))
    digest = reseal(path.parent, files={adapter.FILE: {"bytes": size, "sha256": sha256}})
    with pytest.raises(SnapshotCorrupt, match="does not hash"):
        copies.prepare(ref.model_copy(update={"manifest_sha256": digest}))


def test_a_manifest_with_a_base_and_no_change_or_two_is_refused(lab):
    publish(lab, lab.publisher(), [0, 1])
    path = lab.config.snapshots / "v00000001"
    entry = {"bytes": 1, "sha256": "0" * 64}
    for files in ({}, {adapter.FILE: entry, "delta.safetensors": entry}):
        reseal(path, files=files)
        with pytest.raises(SnapshotCorrupt, match="no word of what it makes"):
            snapshot.read(path)


def test_a_layer_that_files_store_in_another_form_is_refused_with_what_to_do():
    weights = {"a.weight": torch.zeros(2, 2), "b.weight": torch.zeros(2, 2)}
    saved = {"renamed": weights["a.weight"], "turned": weights["b.weight"].T.contiguous()}
    assert _names_in_files(weights, saved, ["a.weight"]) == {"a.weight": "renamed"}
    with pytest.raises(ConfigError, match=r'b\.weight.*lora\.publish = "merged"'):
        _names_in_files(weights, saved, ["a.weight", "b.weight"])
