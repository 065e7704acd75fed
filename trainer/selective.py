"""Log-probabilities of chosen tokens from hidden states, without ever holding [tokens x vocabulary] numbers.

Shape suffixes: R positions, C positions of a chunk, H hidden size, V vocabulary.

A chunk's logits are dropped after use and computed again in the backward pass, where they become the gradient in
place. That second product is a quarter of the head's work; what it buys is memory that does not grow with R x V.
"""

from typing import Any

import torch
from torch import Tensor, nn

# Logits that exist at the same time, in numbers: 64 MiB of float32 on a CPU, whose caches want it small.
_CPU_LOGITS = 1 << 24
_GPU_LOGITS = 1 << 27


def selective_logprobs(head: nn.Linear, hidden_RH: Tensor, target_R: Tensor) -> Tensor:
    """[R] in float32 (float64 for a float64 model): log softmax(head(hidden))[target].

    Under autocast the products are computed in its type, as `head(hidden)` would be.
    """
    logprob_R: Tensor = _Selective.apply(hidden_RH, head.weight, head.bias, target_R)  # type: ignore[no-untyped-call]
    return logprob_R


def selective_logprobs_and_entropy(head: nn.Linear, hidden_RH: Tensor, target_R: Tensor) -> tuple[Tensor, Tensor]:
    """`selective_logprobs`, and [R] the entropy of each whole distribution in nats, without gradient.

    The entropy comes out of the exponentials that the normaliser needs anyway.
    """
    pair: tuple[Tensor, Tensor] = _Selective.apply(  # type: ignore[no-untyped-call]
        hidden_RH, head.weight, head.bias, target_R, True
    )
    return pair


class _Selective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target_R: Tensor,
        with_entropy: bool = False,
    ) -> Any:
        ctx.dtype = _compute_dtype(hidden_RH, weight_VH)
        weight = weight_VH.to(ctx.dtype)
        normaliser, logprob, entropy = [], [], []
        for hidden_CH, target_C in _chunks(weight.shape[0], hidden_RH, target_R):
            logits_CV = _logits(hidden_CH, weight, bias_V)
            chosen_C = logits_CV.gather(1, target_C[:, None])[:, 0]
            if with_entropy:
                normaliser_C, entropy_C = _normaliser_and_entropy(logits_CV)
                entropy.append(entropy_C)
            else:
                normaliser_C = logits_CV.logsumexp(dim=1)
            normaliser.append(normaliser_C)
            logprob.append(chosen_C - normaliser_C)
        ctx.save_for_backward(hidden_RH, weight_VH, bias_V, target_R, torch.cat(normaliser))
        if not with_entropy:
            return torch.cat(logprob)
        entropy_R = torch.cat(entropy)
        ctx.mark_non_differentiable(entropy_R)
        return torch.cat(logprob), entropy_R

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        gradient_R = gradients[0]
        hidden_RH, weight_VH, bias_V, target_R, normaliser_R = ctx.saved_tensors
        weight = weight_VH.to(ctx.dtype)
        to_hidden = torch.empty_like(hidden_RH)
        to_weight = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] else None
        to_bias = torch.zeros_like(bias_V) if bias_V is not None and ctx.needs_input_grad[2] else None
        done = 0
        for hidden_CH, target_C, normaliser_C, gradient_C in _chunks(
            weight.shape[0], hidden_RH, target_R, normaliser_R, gradient_R
        ):
            # d logp[target] / d logits = onehot(target) - softmax(logits)
            delta_CV = _logits(hidden_CH, weight, bias_V).sub_(normaliser_C[:, None]).exp_()
            delta_CV.mul_(-gradient_C[:, None])
            delta_CV.scatter_add_(1, target_C[:, None], gradient_C[:, None])
            if to_bias is not None:
                to_bias += delta_CV.sum(dim=0)
            delta_CV = delta_CV.to(ctx.dtype)
            to_hidden[done : done + len(target_C)] = delta_CV @ weight
            done += len(target_C)
            if to_weight is not None:
                _add_product(to_weight, delta_CV, hidden_CH.to(ctx.dtype))
        return to_hidden, to_weight, to_bias, None, None


def _compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def _chunks(vocabulary: int, *values_R: Tensor) -> Any:
    """Chunks of several tensors side by side, so long that their logits are of a fixed size."""
    limit = _CPU_LOGITS if values_R[0].device.type == "cpu" else _GPU_LOGITS
    size = max(limit // vocabulary, 1)
    return zip(*(torch.split(value_R, size) for value_R in values_R), strict=True)


def _logits(hidden_CH: Tensor, weight: Tensor, bias_V: Tensor | None) -> Tensor:
    """[C, V] in at least float32."""
    logits_CV = hidden_CH.to(weight.dtype) @ weight.T
    if bias_V is not None:
        logits_CV += bias_V.to(logits_CV.dtype)
    return logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))


def _normaliser_and_entropy(logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    """[C] log sum exp and [C] entropy; the logits are destroyed. With d = logits - max: H = log sum e^d - <d>."""
    largest_C1 = logits_CV.amax(dim=1, keepdim=True)
    shifted_CV = logits_CV.sub_(largest_C1)
    weight_CV = shifted_CV.exp()
    total_C = weight_CV.sum(dim=1)
    mean_C = torch.linalg.vecdot(weight_CV, shifted_CV) / total_C
    log_total_C = total_C.log()
    return largest_C1[:, 0] + log_total_C, log_total_C - mean_C


def _add_product(sum_VH: Tensor, delta_CV: Tensor, hidden_CH: Tensor) -> None:
    """sum += delta^T hidden, in the type of the sum."""
    if sum_VH.dtype == delta_CV.dtype:
        sum_VH.addmm_(delta_CV.T, hidden_CH)
    else:
        sum_VH += delta_CV.T @ hidden_CH
