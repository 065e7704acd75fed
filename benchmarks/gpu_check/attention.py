"""Packed attention, and the scores of whole rows, forward and backward, against float64."""

import copy
import math
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import MistralConfig

from benchmarks import bare
from benchmarks.gpu_check.findings import Findings
from tba.tests.helpers.gpu_steps import error, flat, qwen, random_model, random_steps
from tba.trainer.batch.batch import Row
from tba.trainer.model.packed_attention import Sequences, attend, has_kernel, torch_has_kernel
from tba.trainer.model.packing import obstacle, packs
from tba.trainer.model.scorer import Scorer, enable_gradient_checkpointing

# Attention heads, heads of keys and values, head size.
_HEADS = ((8, 8, 64), (14, 2, 64), (12, 2, 128), (28, 4, 128), (8, 2, 256), (4, 2, 32))


def use_kernel(device: str) -> str:
    """Use torch's attention kernel also where its torch is older than tba asks for. Returns how it is used."""
    if device != "cuda":
        return "none: on a CPU packed rows use SDPA"
    if torch_has_kernel():
        return "as shipped"
    if find_spec("torch.nn.attention.varlen") is None:
        return "none: it came with torch 2.10"
    from torch.nn.attention import varlen

    original = varlen.varlen_attn

    # Without `enable_gqa`. To be removed when tba needs a torch that has it.
    def repeated(
        query: Tensor, key: Tensor, value: Tensor, *places: Any, enable_gqa: bool, scale: Any, window_size: Any
    ) -> Any:
        times = query.shape[1] // key.shape[1] if enable_gqa else 1
        key, value = (tensor.repeat_interleave(times, 1) for tensor in (key, value))
        return original(query, key, value, *places, scale=scale, window_size=window_size)

    varlen.varlen_attn = repeated
    torch_has_kernel.cache_clear()
    return f"with repeated keys and values, which torch {torch.__version__} needs"


def kernel(findings: Findings, options: Any) -> None:
    """`attend` by itself: grouped heads and windows, outputs and gradients. On a CPU it is SDPA in float32."""
    cuda = options.device == "cuda"
    findings.note("kernel", use_kernel(options.device))
    findings.check("one kernel attends in all sequences", has_kernel(options.device, [64], half=True), cuda)
    lengths = [1, 9, 30] if options.tiny else [1, 30, 129, 700, 64]
    for (heads, groups, size), window in product(_HEADS, (None, 7 if options.tiny else 100)):
        torch.manual_seed(0)
        kind: Any = {"device": options.device, "dtype": torch.bfloat16 if cuda else None, "requires_grad": True}
        tensors = [torch.randn(1, n, sum(lengths), size, **kind) for n in (heads, groups, groups)]
        wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
        places = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
        sequences = Sequences(places, torch.device(options.device))
        out = attend(nn.Identity(), *tensors, None, sliding_window=window, sequences=sequences)[0][0]
        exact = torch.cat([_formula(wide, place, heads // groups, window) for place in places])
        seed = torch.randn_like(out)
        found = [out, *torch.autograd.grad(out, tensors, seed)]
        correct = [exact, *torch.autograd.grad(exact, wide, seed.double())]
        name = f"heads {heads}/{groups} of {size}, window {window}: largest error of out, dq, dk, dv"
        findings.check(name, max(map(error, found, correct)), 0.0, 0.02 if cuda else 1e-5)


def _formula(tensors: list[Tensor], place: Any, times: int, window: int | None) -> Tensor:
    """Return softmax(q k / sqrt(d)) v of one sequence: [T, A, D]."""
    query, key, value = (tensor[0][:, place] for tensor in tensors)
    key, value = (tensor.repeat_interleave(times, 0) for tensor in (key, value))
    scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
    at = torch.arange(len(place), device=query.device)
    ago = at[:, None] - at
    hidden = (ago < 0) | (ago >= (window or len(place)))
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ value).transpose(0, 1)


def packed(findings: Findings, options: Any) -> None:
    """Scores and gradients of tba's scorer against one plain padded pass in float64, for each way of computing them."""
    cuda = options.device == "cuda"
    findings.note("kernel", use_kernel(options.device))
    longest, size = (40, 16) if options.tiny else (500, 64)
    shape: dict[str, Any] = {
        "vocab_size": 1024, "hidden_size": 4 * size, "intermediate_size": 8 * size, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": size, "initializer_range": 0.05,
    }  # fmt: skip
    plain, window = qwen("tiny", **shape), MistralConfig(**shape, sliding_window=longest // 4)
    # The gradients of a prompt are added up over all samples, on a GPU in bfloat16.
    many = 1, 4 if options.tiny else 32, longest
    cases = (("no window", plain, (4, 5, 30)), ("window", window, (4, 5, 30)), ("many samples", plain, many))
    for label, config, counts in cases:
        base = random_model(config, options.device)
        rows = random_steps(1024, 1, (*counts, longest // 4, longest))[0].rows
        findings.check(f"{label}: obstacle to packing", obstacle(base, half=cuda), "")
        findings.check(f"{label}: packed by default", packs("auto", base, options.device, half=cuda), True)
        _compare_scores(findings, label, base, rows, cuda=cuda)


def _compare_scores(findings: Findings, label: str, base: Any, rows: list[Row], *, cuda: bool) -> None:
    weight_R = torch.randn(sum(len(row.response_ids) for row in rows), dtype=torch.float64)

    def backward(model: Any, score: Any) -> tuple[Tensor, Tensor]:
        logprob_R = score(model)
        logprob_R.backward(weight_R.to(logprob_R))
        return flat([logprob_R]), flat(parameter.grad for parameter in model.parameters())

    exact = backward(copy.deepcopy(base).double(), lambda model: bare.logprobs(model, rows))
    with torch.autocast(base.device.type, torch.bfloat16, enabled=cuda):
        rounding = error(backward(copy.deepcopy(base), lambda model: bare.logprobs(model, rows))[1], exact[1])
    findings.note(f"{label}: error of the gradient of a plain pass in {'bfloat16' if cuda else 'float32'}", rounding)
    for half, packing, again in product({False, cuda}, (False, True), (False, True)):
        model = copy.deepcopy(base)
        if again:
            enable_gradient_checkpointing(model, autocast=half)
        found = backward(model, lambda one: Scorer(one, autocast=half, packed=packing).score(rows).logprob_R)  # noqa: B023
        way = f"{'bfloat16' if half else 'float32'} {'packed' if packing else 'padded'}{', recomputed' * again}"
        limit = 1.5 * rounding if half else 1e-4
        findings.check(f"{label}: {way}, error of the gradient", error(found[1], exact[1]), 0.0, limit)
        largest = float((found[0] - exact[0]).abs().max())
        findings.check(f"{label}: {way}, largest error of a log-probability", largest, 0.0, 0.2 if half else 1e-4)
