"""Publishing against a real buffer: what is announced verifies, loads, and is what the canary says."""

import json
import threading
import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tba.common import snapshot
from tba.common.errors import SnapshotError
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
