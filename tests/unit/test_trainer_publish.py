"""Publishing against a real buffer: what is announced verifies, loads, and is what the canary says."""

import json
import re
import shutil
import socket
import threading

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tba.common import snapshot
from tba.common.clock import SystemClock
from tba.common.errors import SnapshotError
from tba.searcher.host_copy import HostCopy
from tba.trainer.canary import canary_sequences


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tie", [True, False])
def test_a_snapshot_is_a_model_whose_log_probabilities_are_the_canary(press, dtype, tie):
    lab = press(dtype=dtype, tie=tie)
    publisher = lab.publisher()
    lab.change_weights()
    assert publisher.publish(step=5) == 0
    assert publisher.flush(20)
    found = lab.announced()
    assert (found.manifest.version, found.manifest.step, found.manifest.run) == (0, 5, "r")
    fresh = AutoModelForCausalLM.from_pretrained(found.path, dtype=torch.float32)
    canary = found.manifest.canary
    assert len(canary.sequences) >= 3
    for sequence, logprobs in zip(canary.sequences, canary.logprobs, strict=True):
        tokens = torch.tensor([sequence])
        expected = fresh(input_ids=tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        assert np.allclose(logprobs, expected.detach().numpy(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("tie", [True, False])
def test_weights_are_rounded_to_the_published_type_and_tied_ones_are_stored_once(press, tie):
    lab = press(dtype="bfloat16", tie=tie)
    publisher = lab.publisher()
    publisher.publish(step=0)
    assert publisher.flush(20)
    path = lab.announced().path
    with safe_open(path / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    assert ("lm_head.weight" in stored) is not tie
    state = lab.model.state_dict()
    assert all(torch.equal(tensor, state[name].bfloat16()) for name, tensor in stored.items())
    assert stored.keys() == state.keys() - ({"lm_head.weight"} if tie else set())
    assert json.loads((path / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert loaded.dtype == torch.bfloat16
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tie


def test_files_that_belong_to_the_model_come_along_and_others_do_not(press):
    lab = press()
    publisher = lab.publisher()
    publisher.publish(step=0)
    assert publisher.flush(20)
    found = lab.announced()
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer_notes.txt"}
    assert found.manifest.files.keys() == expected
    assert {path.name for path in found.path.iterdir()} == expected | {"manifest.json"}


def test_a_snapshot_holds_the_weights_of_the_call_whatever_is_trained_afterwards(press):
    lab = press()
    publisher = lab.publisher()
    lab.buffer.stop()  # nothing can be announced before the weights change
    before = {name: tensor.clone() for name, tensor in lab.model.state_dict().items()}
    publisher.publish(step=0)
    publisher.publish(step=1)
    lab.change_weights()
    assert not publisher.flush(0.1)
    lab.buffer.start()
    assert publisher.flush(20)
    loaded = AutoModelForCausalLM.from_pretrained(lab.announced().path).state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.items())


def test_old_snapshots_are_collected(press):
    lab = press(keep_snapshots=2, keep_snapshot_every=4)
    publisher = lab.publisher()
    for step in range(0, 12, 2):
        publisher.publish(step)
    assert publisher.flush(30)
    steps = [snapshot.read(path).manifest.step for path in snapshot.list_snapshots(lab.config.snapshots)]
    assert steps == [0, 4, 8, 10]


def kinds(lab) -> list[tuple[int, int | None]]:
    """(step, base) of the snapshots on disk, oldest first."""
    manifests = [snapshot.read(path).manifest for path in snapshot.list_snapshots(lab.config.snapshots)]
    return [(manifest.step, manifest.base) for manifest in manifests]


def publish_small_changes(lab, publisher, steps) -> None:
    for step in steps:
        lab.change_a_few(step)
        publisher.publish(step)
    assert publisher.flush(30)


def test_the_first_every_nth_the_kept_and_the_last_are_full_and_deltas_lie_between(press):
    lab = press(dtype="bfloat16", full_snapshot_every=4, keep_snapshot_every=6, keep_snapshots=99, steps=9)
    publish_small_changes(lab, lab.publisher(), range(1, 10))
    assert kinds(lab) == [(1, None), (2, 0), (3, 1), (4, 2), (5, None), (6, None), (7, 5), (8, 6), (9, None)]


def test_a_change_of_nearly_everything_is_published_in_full(press):
    lab = press(dtype="bfloat16", full_snapshot_every=100)
    publisher = lab.publisher()
    publisher.publish(0)
    lab.change_weights()
    publisher.publish(1)
    publish_small_changes(lab, publisher, [2])
    assert kinds(lab) == [(0, None), (1, None), (2, 1)]


def test_a_delta_names_its_base_what_it_makes_and_holds_nothing_else(press):
    lab = press(dtype="bfloat16", full_snapshot_every=100)
    publisher = lab.publisher()
    publish_small_changes(lab, publisher, [0])
    full = lab.announced_ref()
    publish_small_changes(lab, publisher, [1])
    manifest = lab.announced().manifest
    assert (manifest.base, manifest.base_manifest_sha256) == (0, full.manifest_sha256)
    assert manifest.files.keys() == {"delta.safetensors"}
    assert manifest.complete.keys() == snapshot.read(lab.config.snapshots / "v00000000").manifest.files.keys()
    assert manifest.files["delta.safetensors"].bytes < manifest.complete["model.safetensors"].bytes / 2


def test_a_restarted_trainer_begins_with_a_full_snapshot(press):
    lab = press(dtype="bfloat16", full_snapshot_every=100)
    publish_small_changes(lab, lab.publisher(), [0, 1])
    publish_small_changes(lab, lab.publisher(next_version=2), [2, 3])
    assert kinds(lab) == [(0, None), (1, 0), (2, None), (3, 2)]


def test_a_base_that_somebody_deleted_is_not_built_upon(press):
    lab = press(dtype="bfloat16", full_snapshot_every=100)
    publisher = lab.publisher()
    publish_small_changes(lab, publisher, [0, 1])
    shutil.rmtree(lab.config.snapshots / "v00000001")
    publish_small_changes(lab, publisher, [2])
    assert kinds(lab) == [(0, None), (2, None)]


def test_what_a_kept_delta_is_based_on_is_kept(press):
    lab = press(dtype="bfloat16", full_snapshot_every=4, keep_snapshots=2)
    publish_small_changes(lab, lab.publisher(), range(11))
    assert kinds(lab) == [(0, None), (8, None), (9, 8), (10, 9)]
    publish_small_changes(lab, lab.publishers[0], [11, 12, 13])
    assert kinds(lab) == [(0, None), (12, None), (13, 12)]


def test_the_announcement_says_where_snapshots_are_served(press, tmp_path):
    lab = press(serve_snapshots="tcp://0.0.0.0:*")
    publisher = lab.publisher()
    publisher.publish(0)
    assert publisher.flush(20)
    ref = lab.announced_ref()
    assert re.fullmatch(rf"tcp://{re.escape(socket.gethostname())}:\d+", ref.address)
    copies = HostCopy(tmp_path / "node", "trainer", SystemClock())
    local = ref.address.replace(socket.gethostname(), "127.0.0.1")
    found, _ = copies.prepare(ref.model_copy(update={"address": local, "path": "/elsewhere/v00000000"}))
    assert AutoModelForCausalLM.from_pretrained(found.path).dtype == torch.float32


def test_a_version_that_a_crashed_trainer_left_behind_is_not_used_again(press):
    lab = press()
    for name in ("v00000003", ".v00000004.tmp"):
        (lab.config.snapshots / name).mkdir(parents=True)
    publisher = lab.publisher(next_version=2)
    assert not (lab.config.snapshots / ".v00000004.tmp").exists()
    assert publisher.publish(step=0) == 4
    assert lab.publisher(next_version=9).publish(step=0) == 9


def test_what_the_thread_fails_on_is_raised_in_the_trainer(press):
    lab = press()
    publisher = lab.publisher()
    (lab.files / "config.json").unlink()
    publisher.publish(step=0)
    with pytest.raises(SnapshotError, match=r"publishing to .*snapshots failed: .*config\.json"):
        publisher.flush(20)
    with pytest.raises(SnapshotError):
        publisher.check()
    with pytest.raises(SnapshotError):
        publisher.publish(step=1)


def test_a_third_publication_waits_and_a_stop_ends_the_wait(press):
    lab = press()
    stop = threading.Event()
    publisher = lab.publisher(stop=stop.is_set)
    lab.buffer.stop()
    for step in range(2):  # one is being announced, one is queued
        publisher.publish(step)
    third = threading.Thread(target=publisher.publish, args=[2])
    third.start()
    third.join(0.5)
    assert third.is_alive()
    stop.set()
    third.join(10)
    assert not third.is_alive()
    lab.buffer.start()


def test_a_canary_exercises_different_tokens_also_with_a_tokenizer_of_a_few_characters(example_model):
    vocabulary = json.loads((example_model / "config.json").read_text())["vocab_size"]
    sequences = canary_sequences(example_model, vocabulary)
    assert len(sequences) == 4
    assert all(len(set(ids)) >= 6 and max(ids) < vocabulary for ids in sequences)
    assert len(set(map(tuple, sequences))) == 4
