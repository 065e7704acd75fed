"""Chunked log-probabilities against torch's log-softmax: values and gradients."""

import pytest
import torch
from torch import nn

from tba.trainer.model import chunked_logprobs
from tba.trainer.model.chunked_logprobs import token_logprobs


def expected_logprobs(head: nn.Linear, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return head(hidden).log_softmax(1).gather(1, target[:, None])[:, 0]


def case(bias: bool, dtype: torch.dtype = torch.float64):
    torch.manual_seed(0)
    head = nn.Linear(6, 11, bias=bias).to(dtype)
    return head, torch.randn(13, 6, dtype=dtype, requires_grad=True), torch.randint(11, (13,))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("positions", [1, 4, 100])
def test_values_and_gradients_equal_those_of_log_softmax(monkeypatch, bias, positions):
    monkeypatch.setattr(chunked_logprobs, "_CPU_LOGITS", 11 * positions)
    head, hidden, target = case(bias)
    upstream = torch.randn(13, dtype=torch.float64)
    inputs = [hidden, *head.parameters()]
    found, expected = token_logprobs(head, hidden, target)[0], expected_logprobs(head, hidden, target)
    assert torch.allclose(found, expected, atol=1e-14)
    ours, theirs = (torch.autograd.grad((value * upstream).sum(), inputs) for value in (found, expected))
    assert all(torch.allclose(a, b, atol=1e-13) for a, b in zip(ours, theirs, strict=True))


def test_gradients_equal_finite_differences():
    head, hidden, target = case(bias=True)
    assert torch.autograd.gradcheck(
        lambda h, w, b: chunked_logprobs._ChunkedLogprobs.apply(h, w, b, target, None, False, False)[0],
        (hidden, head.weight, head.bias),
    )


@pytest.mark.parametrize("positions", [4, 100])
def test_log_probabilities_at_temperatures_are_computed_from_the_same_logits(monkeypatch, positions):
    monkeypatch.setattr(chunked_logprobs, "_CPU_LOGITS", 11 * positions)
    head, hidden, target = case(bias=True)
    temperature = torch.linspace(0.5, 1.5, 13, dtype=torch.float64)
    inputs, (first, second) = [hidden, *head.parameters()], torch.randn(2, 13, dtype=torch.float64)
    plain, tempered, entropy = token_logprobs(head, hidden, target, temperature_R=temperature, entropy=True)
    scaled = (head(hidden) / temperature[:, None]).log_softmax(1).gather(1, target[:, None])[:, 0]
    assert torch.allclose(tempered, scaled, atol=1e-14)
    ours = torch.autograd.grad((plain * first + tempered * second).sum(), inputs)
    theirs = torch.autograd.grad((expected_logprobs(head, hidden, target) * first + scaled * second).sum(), inputs)
    assert all(torch.allclose(a, b, atol=1e-13) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(entropy, token_logprobs(head, hidden, target, entropy=True)[2])


def test_with_a_frozen_head_hidden_states_still_get_a_gradient():
    head, hidden, target = case(bias=False)
    head.requires_grad_(False)
    torch.autograd.backward(token_logprobs(head, hidden, target)[0].sum())
    assert head.weight.grad is None
    assert hidden.grad.abs().max() > 0


def test_autocast_computes_products_in_bfloat16_and_sums_in_float32():
    head, hidden, target = case(bias=False, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = token_logprobs(head, hidden, target)[0]
    assert found.dtype == torch.float32
    difference = (found - expected_logprobs(head, hidden, target)).abs().max().item()
    assert 0 < difference < 0.05
    torch.autograd.backward(found.sum())
    assert head.weight.grad.dtype == torch.float32


def test_exact_logits_round_the_factors_only_and_have_the_same_gradient_types():
    head, hidden, target = case(bias=True, dtype=torch.float32)
    rounded = nn.Linear(6, 11)
    rounded.weight.data, rounded.bias.data = head.weight.data.bfloat16().float(), head.bias.data
    with torch.autocast("cpu", torch.bfloat16):
        found = token_logprobs(head, hidden, target, exact=True)[0]
    expected = expected_logprobs(rounded, hidden.bfloat16().float(), target)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    found_gradients = torch.autograd.grad(found.sum(), [hidden, head.weight, head.bias])
    gradients = torch.autograd.grad(expected.sum(), [hidden, rounded.weight, rounded.bias])
    for one, other in zip(found_gradients, gradients, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, atol=0.03, rtol=0.02)


def test_no_tensor_has_the_size_of_positions_times_vocabulary(monkeypatch):
    monkeypatch.setattr(chunked_logprobs, "_CPU_LOGITS", 22)
    head, hidden, target = case(bias=False)
    sizes: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes.extend(part.numel() for part in torch.utils._pytree.tree_leaves(result) if hasattr(part, "numel"))
            return result

    with Sizes():
        torch.autograd.backward(token_logprobs(head, hidden, target)[0].sum())
    assert max(sizes) == max(13 * 6, 11 * 6)
