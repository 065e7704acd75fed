"""What the canary of a snapshot takes on the trainer's GPU: one stream for all of them, one expert at a time."""

import contextlib
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tba.trainer.model.scorer import weights_of
from tba.trainer.publishing import canary, snapshot_writer
from tba.trainer.publishing.canary import make_canary, skeleton

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


def test_a_canary_with_experts_one_at_a_time_has_the_numbers_of_all_at_once(mixture, monkeypatch):
    found = make_canary(skeleton(mixture), rounded(mixture), SEQUENCES)
    monkeypatch.setattr(canary, "_holds_experts", lambda *_: False)
    expected = make_canary(skeleton(mixture), rounded(mixture), SEQUENCES)
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


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
