"""Log-probabilities of given tokens from hidden states, without a tensor of [tokens x vocabulary].

The head is applied to chunks of positions. The logits of a chunk are dropped after use and computed again in the
backward pass, where they become the gradient in place. This second product is a quarter of the head's work; in return
memory does not grow with R x V.

Shape suffixes: R positions, C positions of a chunk, H hidden size, V vocabulary, S tokens of all positions.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# The number of logits that exist at the same time. A CPU is faster with chunks that stay near its caches.
_CPU_LOGITS = 1 << 24
_GPU_LOGITS = 1 << 27


class Kept(NamedTuple):
    """The tokens that were left to sample from.

    `token_S` are those of each position after another besides its target, `count_R` how many each position has.
    `is_whole_R`: all of the vocabulary was left, and the position has none here.
    """

    token_S: Tensor
    count_R: Tensor
    is_whole_R: Tensor


def token_logprobs(
    head: nn.Linear,
    hidden_RH: Tensor,
    target_R: Tensor,
    *,
    temperature_R: Tensor | None = None,
    kept: Kept | None = None,
    entropy: bool = False,
    exact: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log softmax(head(hidden))[target]: [R] in float32, or float64 for a float64 model.

    The second result is log softmax(head(hidden) / `temperature_R`)[target] over the `kept` tokens, [R], the third the
    `entropy` of each whole distribution at temperature 1, [R] in nats, without gradient: it reuses exponentials that
    the normaliser needs anyway. Either is empty where it is not asked for. Under autocast the matrix products are
    computed in its type, as `head(hidden)` would be. The logits are rounded to it too, unless they are to be `exact`:
    sums in float32 of products of rounded factors.
    """
    results: tuple[Tensor, Tensor, Tensor] = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_RH, head.weight, head.bias, target_R, temperature_R, kept, entropy, exact
    )
    return results


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target_R: Tensor,
        temperature_R: Tensor | None,
        kept: Kept | None,
        with_entropy: bool,
        exact: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.dtype, ctx.exact, ctx.kept = compute_dtype(hidden_RH, weight_VH), exact, kept
        weight = weight_VH.to(ctx.dtype)
        normaliser, logprob, entropy = [], [], [hidden_RH.new_zeros(0)]
        tempered_normaliser, tempered = [hidden_RH.new_zeros(0)], [hidden_RH.new_zeros(0)]
        scale_R = _scale(temperature_R, target_R, weight)
        chunks = _chunks(weight.shape[0], kept, hidden_RH, target_R, scale_R)
        for kept_C, hidden_CH, target_C, scale_C in chunks:
            logits_CV = _logits(hidden_CH, weight, bias_V, exact)
            chosen_C = logits_CV.gather(1, target_C[:, None])[:, 0]
            if temperature_R is not None:
                tempered_normaliser.append(_sampled(logits_CV, scale_C, target_C, kept_C).logsumexp(dim=1))
                tempered.append(chosen_C / scale_C - tempered_normaliser[-1])
            if with_entropy:
                normaliser_C, entropy_C = _normaliser_and_entropy(logits_CV)
                entropy.append(entropy_C)
            else:
                normaliser_C = logits_CV.logsumexp(dim=1)
            normaliser.append(normaliser_C)
            logprob.append(chosen_C - normaliser_C)
        # Only the normalisers of a chunk are kept, from which the backward pass recovers the softmax.
        normalisers = torch.cat(normaliser), torch.cat(tempered_normaliser)
        ctx.save_for_backward(hidden_RH, weight_VH, bias_V, target_R, temperature_R, *normalisers)
        entropy_R, tempered_R = torch.cat(entropy), torch.cat(tempered)
        ctx.mark_non_differentiable(*((entropy_R,) if temperature_R is not None else (entropy_R, tempered_R)))
        return torch.cat(logprob), tempered_R, entropy_R

    @staticmethod
    def backward(
        ctx: Any, gradient_R: Tensor, tempered_gradient_R: Tensor, _: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None, None, None]:
        hidden_RH, weight_VH, bias_V, target_R, temperature_R, normaliser_R, tempered_normaliser_R = ctx.saved_tensors
        if temperature_R is None:
            tempered_gradient_R = tempered_normaliser_R = torch.zeros_like(gradient_R)
        weight = weight_VH.to(ctx.dtype)
        to_hidden = torch.empty_like(hidden_RH)
        # Added up over the chunks in float32, also where FSDP has gathered the head in bfloat16.
        to_weight = torch.zeros_like(weight_VH, dtype=_at_least_float32(weight_VH)) if ctx.needs_input_grad[1] else None
        to_bias = torch.zeros_like(bias_V) if bias_V is not None and ctx.needs_input_grad[2] else None
        done = 0
        tempered = _scale(temperature_R, target_R, weight), tempered_normaliser_R, tempered_gradient_R
        for kept_C, hidden_CH, target_C, normaliser_C, gradient_C, *tempered_C in _chunks(
            weight.shape[0], ctx.kept, hidden_RH, target_R, normaliser_R, gradient_R, *tempered
        ):
            # Freed before the next logits exist.
            tempered_delta_CV = None
            logits_CV = _logits(hidden_CH, weight, bias_V, ctx.exact)
            if temperature_R is not None:
                scale_C, tempered_normaliser_C, tempered_gradient_C = tempered_C
                tempered_delta_CV = _sampled(logits_CV, scale_C, target_C, kept_C)
                _to_gradient(tempered_delta_CV, target_C, tempered_normaliser_C, tempered_gradient_C / scale_C)
            delta_CV = _to_gradient(logits_CV, target_C, normaliser_C, gradient_C)
            if tempered_delta_CV is not None:
                delta_CV += tempered_delta_CV
            if to_bias is not None:
                to_bias += delta_CV.sum(dim=0)
            delta_CV = delta_CV.to(ctx.dtype)
            to_hidden[done : done + len(target_C)] = delta_CV @ weight
            done += len(target_C)
            if to_weight is not None:
                _add_product(to_weight, delta_CV, hidden_CH.to(ctx.dtype))
        if to_weight is not None:
            to_weight = to_weight.to(weight_VH.dtype)
        return to_hidden, to_weight, to_bias, None, None, None, None, None


def _scale(temperature_R: Tensor | None, target_R: Tensor, weight: Tensor) -> Tensor:
    """Return the temperatures in the type of the logits, or ones, which are not used: [R]."""
    return torch.ones_like(target_R) if temperature_R is None else temperature_R.to(_at_least_float32(weight))


def _sampled(logits_CV: Tensor, scale_C: Tensor, target_C: Tensor, kept: Kept | None) -> Tensor:
    """Return the logits of the distribution that was sampled from: minus infinity for tokens that were cut off."""
    scaled_CV = logits_CV / scale_C[:, None]
    if kept is None:
        return scaled_CV
    cut_CV = ~kept.is_whole_R[:, None].expand_as(scaled_CV)
    position_S = torch.arange(len(target_C), device=target_C.device).repeat_interleave(kept.count_R)
    cut_CV[position_S, kept.token_S] = False
    cut_CV.scatter_(1, target_C[:, None], value=False)
    return scaled_CV.masked_fill_(cut_CV, float("-inf"))


def _to_gradient(logits_CV: Tensor, target_C: Tensor, normaliser_C: Tensor, gradient_C: Tensor) -> Tensor:
    """Turn logits, in place, into gradient x d logp[target] / d logits = gradient x (onehot - softmax): [C, V]."""
    logits_CV.sub_(normaliser_C[:, None]).exp_().mul_(-gradient_C[:, None])
    return logits_CV.scatter_add_(1, target_C[:, None], gradient_C[:, None])


def compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the type of a product with `weight`: that of autocast if it is on."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def _chunks(vocabulary: int, kept: Kept | None, *values_R: Tensor) -> Any:
    """Split several tensors into the same chunks, so long that the logits of a chunk have a fixed size.

    Yields the kept tokens of each chunk, None without any, and its part of each tensor.
    """
    limit = _CPU_LOGITS if values_R[0].device.type == "cpu" else _GPU_LOGITS
    size = max(limit // vocabulary, 1)
    parts = list(zip(*(torch.split(value_R, size) for value_R in values_R), strict=True))
    if kept is None:
        return [(None, *part) for part in parts]
    counts = torch.split(kept.count_R, size)
    tokens = torch.split(kept.token_S, [int(count_C.sum()) for count_C in counts])
    all_kept = map(Kept, tokens, counts, torch.split(kept.is_whole_R, size))
    return [(own, *part) for own, part in zip(all_kept, parts, strict=True)]


def _logits(hidden_CH: Tensor, weight: Tensor, bias_V: Tensor | None, exact: bool) -> Tensor:
    """Return the logits: [C, V] in at least float32, rounded to the type of the weight first unless `exact`."""
    factor_CH = hidden_CH.to(weight.dtype)
    if not exact or weight.dtype in (torch.float32, torch.float64):
        logits_CV = factor_CH @ weight.T
    elif weight.is_cuda:
        # The type in which the product is summed anyway; vLLM computes its logits by the same call.
        logits_CV = torch.mm(factor_CH, weight.T, out_dtype=torch.float32)
    else:
        with torch.autocast(weight.device.type, enabled=False):
            logits_CV = factor_CH.float() @ weight.T.float()
    if bias_V is not None:
        logits_CV += bias_V.to(logits_CV.dtype)
    return logits_CV.to(_at_least_float32(logits_CV))


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _normaliser_and_entropy(logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-sum-exp and entropy, both [C]. Overwrites the logits.

    With d = logits - max and p = softmax(d): H = log sum e^d - sum p d.
    """
    largest_C1 = logits_CV.amax(dim=1, keepdim=True)
    shifted_CV = logits_CV.sub_(largest_C1)
    weight_CV = shifted_CV.exp()
    total_C = weight_CV.sum(dim=1)
    mean_C = torch.linalg.vecdot(weight_CV, shifted_CV) / total_C
    log_total_C = total_C.log()
    return largest_C1[:, 0] + log_total_C, log_total_C - mean_C


def _add_product(sum_VH: Tensor, delta_CV: Tensor, hidden_CH: Tensor) -> None:
    """Add delta^T hidden to the sum, in the type of the sum."""
    if sum_VH.dtype == delta_CV.dtype:
        sum_VH.addmm_(delta_CV.T, hidden_CH)
    else:
        sum_VH += delta_CV.T @ hidden_CH
