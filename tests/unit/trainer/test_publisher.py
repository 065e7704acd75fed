"""Publishing with a real buffer, the canary of a snapshot, and the pool of weights files."""

import contextlib
import json
import re
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tba.common.clock import SystemClock
from tba.common.errors import SnapshotError
from tba.common.run_snapshots import weights_directory
from tba.common.weights import snapshot
from tba.common.weights.node_store import pin_path
from tba.common.weights.snapshot import Canary, Manifest
from tba.common.weights.tensor_file import layout_of
from tba.searcher.weights.assembly import SnapshotAssembler
from tba.tests.helpers.checks import not_none, wait_until
from tba.trainer.model.scorer import weights_of
from tba.trainer.publishing import snapshot_writer, weights_files
from tba.trainer.publishing.canary import canary_sequences, make_canary, skeleton
from tba.trainer.publishing.snapshot_writer import as_bits
from tba.trainer.publishing.weights_files import WeightsFile, WeightsFilePool


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tie", [True, False])
def test_a_snapshot_is_the_rounded_model_whose_log_probabilities_are_the_canary(publisher_harness, dtype, tie):
    lab = publisher_harness(dtype=dtype, tie=tie)
    publisher = lab.publisher()
    lab.change_weights()
    assert publisher.publish(step=5) == 0
    assert publisher.flush(60)
    found = lab.announced()
    assert (found.manifest.version, found.manifest.step, found.manifest.run) == (0, 5, "r")
    files = {"config.json", "generation_config.json", "model.safetensors", "tokenizer_notes.txt"}
    assert found.manifest.files.keys() == files == {path.name for path in found.path.iterdir()} - {"manifest.json"}
    stored, state = load_file(found.path / "model.safetensors"), lab.model.state_dict()
    # A tied weight is stored once.
    assert stored.keys() == state.keys() - ({"lm_head.weight"} if tie else set())
    assert all(torch.equal(tensor, state[name].to(getattr(torch, dtype))) for name, tensor in stored.items())
    loaded = AutoModelForCausalLM.from_pretrained(found.path)
    assert str(loaded.dtype) == f"torch.{dtype}"
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tie
    fresh, canary = loaded.float(), found.manifest.canary
    assert len(canary.sequences) >= 3
    for sequence, logprobs in zip(canary.sequences, canary.logprobs, strict=True):
        tokens = torch.tensor([sequence])
        expected = fresh(input_ids=tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        assert np.allclose(logprobs, expected.detach().numpy(), atol=1e-5, rtol=0)


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


@pytest.mark.slow
def test_a_snapshot_with_a_delta_is_complete_and_one_after_a_large_change_or_a_restart_has_none(publisher_harness):
    lab = publisher_harness(dtype="bfloat16", serve_snapshots="tcp://127.0.0.1:*")
    publisher = lab.publisher()
    first, second = publish_small_changes(lab, publisher, [0, 1])
    assert second.files.keys() == first.files.keys()
    assert not_none(second.delta).file.bytes < second.files["model.safetensors"].bytes / 2
    lab.change_weights()
    manifests = publish_small_changes(lab, publisher, [2, 3])
    publisher.close()
    manifests += publish_small_changes(lab, lab.publisher(next_version=4), [5, 6])
    assert deltas([first, second, *manifests]) == [None, 0, None, 2, None, 4]


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


HIDDEN, INNER, EXPERTS = 32, 48, 16
SEQUENCES = [[1, 2, 3, 4, 5, 6, 7], [7, 5], [6, 3, 1]]


@pytest.fixture(scope="module")
def mixture() -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=40, hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=4,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.3,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def rounded(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().bfloat16() for name, tensor in weights_of(model).items()}


class Widened(TorchDispatchMode):
    """The bytes of the largest weight that was converted to float32."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.bfloat16:
            self.largest = max(self.largest, result.nbytes)
        return result


def test_of_routed_experts_one_matrix_at_a_time_is_widened(mixture):
    with Widened() as widened:
        make_canary(skeleton(mixture), rounded(mixture), SEQUENCES)
    # Gate and up of one expert are one matrix. Nothing else of this model is larger.
    assert widened.largest == 4 * 2 * INNER * HIDDEN


def test_all_canaries_of_a_writer_are_computed_on_one_stream(publisher_harness, monkeypatch):
    """torch's allocator keeps what is freed on a stream for that stream: each further one keeps memory of its own."""
    made: list[object] = []
    entered: list[object] = []

    def own_stream(_: torch.device) -> object:
        made.append(object())
        return made[-1]

    @contextlib.contextmanager
    def stream(one):
        entered.append(one)
        yield

    monkeypatch.setattr(snapshot_writer, "own_stream", own_stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    publisher = publisher_harness(snapshots_in="memory", steps=99).publisher()
    for step in range(3):
        publisher.publish(step)
        assert publisher.flush(60)
    assert entered == 3 * made
    assert len(made) == 1


class Gate:
    """Holds the first call of a function until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def before(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if not self.reached.is_set():
                self.reached.set()
                assert self.opened.wait(60)
            return real(*arguments, **named)

        return call


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[WeightsFilePool]:
    layout = layout_of({"a": ("F32", (4, 8))})
    made = WeightsFilePool(tmp_path / "weights", layout, torch.device("cpu"), floor=0)
    yield made
    made.close()


@pytest.fixture
def other_thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def seal(pool: WeightsFilePool, version: int) -> Path:
    """Fill and publish a file. Returns its directory."""
    file = not_none(pool.acquire())
    pool.seal(file, Manifest("r", version, version, 0.0, {}, Canary([], [])))
    return file.path


def finish(gate: Gate, *calls: Future[Any]) -> None:
    gate.opened.set()
    for call in calls:
        call.result(60)


def test_a_free_file_is_acquired_while_another_thread_makes_one(pool, other_thread, monkeypatch):
    held = not_none(pin_path(seal(pool, 0)))
    pool.announced()
    seal(pool, 1)
    gate = Gate()
    monkeypatch.setattr(weights_files, "_map", gate.before(weights_files._map))
    # The searcher's hold leaves no file free, so one is made.
    announced = other_thread.submit(pool.announced)
    assert gate.reached.wait(60)
    held.release()
    acquired = other_thread.submit(pool.acquire)
    try:
        assert acquired.result(20) is not None
        assert not announced.done()
    finally:
        finish(gate, announced, acquired)


def test_a_file_is_acquired_while_another_thread_deletes_one(pool, other_thread, monkeypatch):
    held = [not_none(pin_path(seal(pool, version))) for version in (0, 1)]
    pool.announced()
    seal(pool, 2)
    for one in held:
        one.release()
    gate = Gate()
    monkeypatch.setattr(WeightsFile, "delete", gate.before(WeightsFile.delete))
    announced = other_thread.submit(pool.announced)
    assert gate.reached.wait(60)
    acquired = other_thread.submit(pool.acquire)
    try:
        assert acquired.result(20) is not None
    finally:
        finish(gate, announced, acquired)


def test_without_a_free_file_the_one_that_another_thread_makes_is_waited_for(pool, other_thread, monkeypatch):
    seal(pool, 0)
    gate = Gate()
    monkeypatch.setattr(weights_files, "_map", gate.before(weights_files._map))
    announced = other_thread.submit(pool.announced)
    assert gate.reached.wait(60)
    acquired = other_thread.submit(pool.acquire)
    finish(gate, announced, acquired)
    made = [path for path in pool.directory.iterdir() if path.name.endswith(".part")]
    assert made == [not_none(acquired.result()).path]


def test_a_failure_to_make_a_file_is_not_waited_for(pool, other_thread, monkeypatch):
    gate = Gate()

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(weights_files, "_map", gate.before(fail))
    first = other_thread.submit(pool.acquire)
    assert gate.reached.wait(60)
    second = other_thread.submit(pool.acquire)
    gate.opened.set()
    for call in (first, second):
        with pytest.raises(OSError, match="Input/output"):
            call.result(60)
    assert not any(path.name.endswith(".part") for path in pool.directory.iterdir())
