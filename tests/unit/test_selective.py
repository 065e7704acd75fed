"""Selective log-probabilities against the plain log-softmax, values and gradients."""

import pytest
import torch
from torch import nn

from tba.trainer import selective
from tba.trainer.selective import selective_logprobs


def plain(head: nn.Linear, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return head(hidden).log_softmax(1).gather(1, target[:, None])[:, 0]


def case(bias: bool, dtype: torch.dtype = torch.float64):
    torch.manual_seed(0)
    head = nn.Linear(6, 11, bias=bias).to(dtype)
    return head, torch.randn(13, 6, dtype=dtype, requires_grad=True), torch.randint(11, (13,))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("positions", [1, 4, 100])
def test_values_and_gradients_are_those_of_log_softmax(monkeypatch, bias, positions):
    monkeypatch.setattr(selective, "_CPU_LOGITS", 11 * positions)
    head, hidden, target = case(bias)
    upstream = torch.randn(13, dtype=torch.float64)
    inputs = [hidden, *head.parameters()]
    found, expected = selective_logprobs(head, hidden, target), plain(head, hidden, target)
    assert torch.allclose(found, expected, atol=1e-14)
    ours, theirs = (torch.autograd.grad((value * upstream).sum(), inputs) for value in (found, expected))
    assert all(torch.allclose(a, b, atol=1e-13) for a, b in zip(ours, theirs, strict=True))


def test_gradcheck():
    head, hidden, target = case(bias=True)
    assert torch.autograd.gradcheck(
        lambda h, w, b: selective._Selective.apply(h, w, b, target), (hidden, head.weight, head.bias)
    )


def test_a_frozen_head_gets_no_gradient_and_hidden_states_still_do():
    head, hidden, target = case(bias=False)
    head.requires_grad_(False)
    torch.autograd.backward(selective_logprobs(head, hidden, target).sum())
    assert head.weight.grad is None
    assert hidden.grad.abs().max() > 0


def test_under_autocast_the_products_are_in_bfloat16_and_the_sums_are_not():
    head, hidden, target = case(bias=False, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = selective_logprobs(head, hidden, target)
    assert found.dtype == torch.float32
    difference = (found - plain(head, hidden, target)).abs().max().item()
    assert 0 < difference < 0.05
    torch.autograd.backward(found.sum())
    assert head.weight.grad.dtype == torch.float32


def test_no_tensor_of_all_positions_times_the_vocabulary_exists(monkeypatch):
    monkeypatch.setattr(selective, "_CPU_LOGITS", 22)
    head, hidden, target = case(bias=False)
    sizes: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes.extend(part.numel() for part in torch.utils._pytree.tree_leaves(result) if hasattr(part, "numel"))
            return result

    with Sizes():
        torch.autograd.backward(selective_logprobs(head, hidden, target).sum())
    assert max(sizes) == max(13 * 6, 11 * 6)
