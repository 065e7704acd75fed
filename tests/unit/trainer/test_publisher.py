"""Publishing with a real buffer: announced snapshots verify, load and match their canary."""

import json
import re
import socket
import weakref

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tba.common.clock import SystemClock
from tba.common.errors import SnapshotError
from tba.common.run_snapshots import weights_directory
from tba.common.weights import snapshot
from tba.searcher.weights.assembly import SnapshotAssembler
from tba.tests.helpers.checks import wait_until
from tba.trainer.publishing import snapshot_writer
from tba.trainer.publishing.canary import canary_sequences
from tba.trainer.publishing.snapshot_writer import as_bits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tie", [True, False])
def test_a_snapshot_is_a_model_whose_log_probabilities_are_the_canary(publisher_harness, dtype, tie):
    lab = publisher_harness(dtype=dtype, tie=tie)
    publisher = lab.publisher()
    lab.change_weights()
    assert publisher.publish(step=5) == 0
    assert publisher.flush(60)
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
def test_weights_are_rounded_to_the_published_type_and_tied_ones_are_stored_once(publisher_harness, tie):
    lab = publisher_harness(dtype="bfloat16", tie=tie)
    publisher = lab.publisher()
    publisher.publish(step=0)
    assert publisher.flush(60)
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


def test_only_files_of_the_model_are_copied_into_a_snapshot(publisher_harness):
    lab = publisher_harness()
    publisher = lab.publisher()
    publisher.publish(step=0)
    assert publisher.flush(60)
    found = lab.announced()
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer_notes.txt"}
    assert found.manifest.files.keys() == expected
    assert {path.name for path in found.path.iterdir()} == expected | {"manifest.json"}


def test_a_snapshot_has_the_weights_at_the_time_of_the_call(publisher_harness):
    lab = publisher_harness()
    publisher = lab.publisher()
    # Nothing can be announced before the weights change.
    lab.buffer.stop()
    before = {name: tensor.clone() for name, tensor in lab.model.state_dict().items()}
    publisher.publish(step=0)
    publisher.publish(step=1)
    lab.change_weights()
    assert not publisher.flush(0.1)
    lab.buffer.start()
    assert publisher.flush(60)
    loaded = AutoModelForCausalLM.from_pretrained(lab.announced().path).state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.items())


def test_old_snapshots_are_deleted(publisher_harness):
    lab = publisher_harness(keep_snapshots=2, keep_snapshot_every=4)
    publisher = lab.publisher()
    for step in range(0, 12, 2):
        publisher.publish(step)
        assert publisher.flush(60)
    assert [read_step(path) for path in snapshot.list_snapshots(lab.config.snapshots)] == [0, 4, 8, 10]


def publish_small_changes(lab, publisher, steps) -> list[snapshot.Manifest]:
    """Publish one after the other. Returns the manifests."""
    made = []
    for step in steps:
        lab.change_a_few(step)
        publisher.publish(step)
        assert publisher.flush(60)
        made.append(lab.announced().manifest)
    return made


def deltas(manifests) -> list[int | None]:
    return [None if manifest.delta is None else manifest.delta.base for manifest in manifests]


def test_a_trainer_that_serves_no_snapshots_writes_no_deltas_and_keeps_no_weights(publisher_harness, monkeypatch):
    made: list[weakref.ref] = []

    def noted(tensor):
        found = as_bits(tensor)
        made.append(weakref.ref(found.bits))
        return found

    monkeypatch.setattr(snapshot_writer, "as_bits", noted)
    lab = publisher_harness(dtype="bfloat16")
    assert deltas(publish_small_changes(lab, lab.publisher(), range(3))) == [None, None, None]
    assert [one() for one in made] == [None] * 3 * len(lab.weights())


def test_a_snapshot_with_a_delta_is_complete_all_the_same(publisher_harness):
    lab = publisher_harness(dtype="bfloat16", serve_snapshots="tcp://127.0.0.1:*")
    first, second, third = publish_small_changes(lab, lab.publisher(), range(3))
    assert deltas([first, second, third]) == [None, 0, 1]
    assert second.files.keys() == first.files.keys()
    assert second.delta is not None
    assert second.delta.file.bytes < second.files["model.safetensors"].bytes / 2


def test_there_is_no_delta_if_most_weights_change_or_the_trainer_was_restarted(publisher_harness):
    lab = publisher_harness(dtype="bfloat16", serve_snapshots="tcp://127.0.0.1:*")
    publisher = lab.publisher()
    manifests = publish_small_changes(lab, publisher, [0])
    lab.change_weights()
    manifests += publish_small_changes(lab, publisher, [1, 2])
    publisher.close()
    manifests += publish_small_changes(lab, lab.publisher(next_version=3), [3, 4])
    assert deltas(manifests) == [None, None, 1, None, 3]


def test_the_announcement_has_the_address_of_the_file_server(publisher_harness, tmp_path):
    lab = publisher_harness(serve_snapshots="tcp://0.0.0.0:*")
    publisher = lab.publisher()
    publisher.publish(0)
    assert publisher.flush(60)
    ref = lab.announced_ref()
    assert re.fullmatch(rf"tcp://{re.escape(socket.gethostname())}:\d+", ref.address)
    copies = SnapshotAssembler(tmp_path / "node", "trainer", SystemClock())
    local = ref.address.replace(socket.gethostname(), "127.0.0.1")
    found, _ = copies.assemble(replace(ref, address=local, path="/elsewhere/v00000000"))
    assert AutoModelForCausalLM.from_pretrained(found.path).dtype == torch.float32


def test_a_version_that_a_crashed_trainer_left_behind_is_not_used_again(publisher_harness):
    lab = publisher_harness()
    for name in ("v00000003", ".v00000004.tmp"):
        (lab.config.snapshots / name).mkdir(parents=True)
    publisher = lab.publisher(next_version=2)
    assert not (lab.config.snapshots / ".v00000004.tmp").exists()
    assert publisher.publish(step=0) == 4
    # The next trainer starts after the end of this one.
    assert publisher.flush(60)
    assert lab.publisher(next_version=9).publish(step=0) == 9


def test_a_failure_of_the_thread_is_raised_in_the_trainer(publisher_harness):
    lab = publisher_harness()
    publisher = lab.publisher()
    (lab.files / "config.json").unlink()
    publisher.publish(step=0)
    with pytest.raises(SnapshotError, match=r"publishing to .*snapshots failed: .*config\.json"):
        publisher.flush(60)
    with pytest.raises(SnapshotError):
        publisher.check()
    with pytest.raises(SnapshotError):
        publisher.publish(step=1)


def test_training_never_waits_and_the_newest_weights_win(publisher_harness):
    lab = publisher_harness(snapshots_in="memory", keep_snapshot_every=4, steps=99)
    publisher = lab.publisher()
    publisher.publish(0)
    assert publisher.flush(60)
    lab.buffer.stop()
    publisher.publish(1)
    memory = weights_directory(lab.config)
    wait_until(lambda: len([*memory.glob("v*")]) == 2, what="the first is being announced")
    for step in range(2, 8):
        lab.change_weights()
        publisher.publish(step)
    lab.buffer.start()
    assert publisher.flush(60)
    assert lab.announced().manifest.step == 7
    assert [read_step(path) for path in snapshot.list_snapshots(lab.config.snapshots)] == [0, 4]


def read_step(path) -> int:
    return snapshot.read(path).manifest.step


def test_a_canary_has_many_distinct_tokens_even_with_a_tiny_tokenizer(example_model):
    vocabulary = json.loads((example_model / "config.json").read_text())["vocab_size"]
    sequences = canary_sequences(example_model, vocabulary, long=False)
    assert [len(set(ids)) >= 4 and max(ids) < vocabulary for ids in sequences] == [True] * 3
    assert len(set(map(tuple, sequences))) == 3
    # A long one has 64 tokens.
    assert [len(ids) for ids in canary_sequences(example_model, 16, long=True)] == [16] * 4
