"""Packed rows, which share their prompts, give the same numbers as padded ones."""

import logging
import sys
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

from tba.common.config import Config, LoraSection
from tba.common.errors import ConfigError
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.ranks import make_learner
from tba.tests.helpers.trainer import make_row, random_batch, tiny_model
from tba.tests.runner import slow
from tba.trainer.distributed import ALONE
from tba.trainer.model.packed_attention import Sequences, _kernel, attend, has_kernel, torch_has_kernel
from tba.trainer.model.packing import obstacle, pack, packs
from tba.trainer.model.scorer import Scorer, weights_of
from tba.trainer.publishing.canary import make_canary, skeleton
from tba.trainer.step.build import build

CPU = torch.device("cpu")
NEEDS_KERNEL = pytest.mark.skipif(
    find_spec("torch.nn.attention.varlen") is None, reason="this torch has no varlen_attn: it came with 2.10"
)
SMALL = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


GROUPED = {"num_key_value_heads": 1, "intermediate_size": 32, "initializer_range": 0.3}
EIGHT = {"num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 16}


def tiny(kind: str, **settings: Any) -> Any:
    """Return a small random model of a class of transformers."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL | settings)
    return getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config).eval()


# Positions are learned: a sequence in the middle of a row must start at position 0.
tiny_gpt2 = partial(tiny, "GPT2", n_positions=64, bos_token_id=1, eos_token_id=2)
# Every other layer is a convolution, which crosses the boundary.
tiny_lfm2 = partial(tiny, "Lfm2", **GROUPED, layer_types=["conv", "full_attention"])
# Heads have size 24 for queries and keys, 16 for values.
tiny_deepseek = partial(
    tiny, "DeepseekV3", intermediate_size=32, initializer_range=0.3, kv_lora_rank=8, q_lora_rank=8,
    first_k_dense_replace=2, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
)  # fmt: skip
# Each attention head has a sink.
tiny_gpt_oss = partial(tiny, "GptOss", **EIGHT, num_local_experts=2, num_experts_per_tok=1)


def tiny_mistral(window: int) -> Any:
    return tiny("Mistral", **GROUPED, sliding_window=window, max_position_embeddings=64)


def tiny_gemma2(cap: float | None) -> Any:
    return tiny("Gemma2", **EIGHT, attn_logit_softcapping=cap)


def tiny_llama_with(**rope: Any) -> Any:
    rope = {"rope_theta": 1e4} | rope
    return tiny("Llama", intermediate_size=32, max_position_embeddings=64, rope_parameters=rope)


def logprobs_both_ways(model, rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded, then packed log-probabilities; the padded ones use the model's original attention."""
    with torch.no_grad():
        padded, packed = (Scorer(model, packed=way).score(rows).logprob_R for way in (False, True))
    return padded, packed


def test_rows_with_the_same_prompt_share_its_tokens():
    rows = [make_row(1, [1, 2], [3, 4]), make_row(2, [5, 6, 7], [8]), make_row(3, [1, 2], [9, 10, 11])]
    layout = pack(rows, CPU)
    # The last token of a response predicts nothing.
    assert layout.tokens_NT.tolist() == [[1, 2, 3, 9, 10, 5, 6, 7]]
    assert layout.source_R.tolist() == [1, 2, 7, 1, 3, 4]
    assert (layout.starts, layout.prompt_lengths, layout.lengths) == ([0, 5, 0], [2, 3, 2], [2, 1, 3])
    assert layout.model_kwargs["position_ids"].tolist() == [[0, 1, 2, 2, 3, 0, 1, 2]]
    places = [place.tolist() for place in layout.model_kwargs["sequences"].places]
    assert places == [[0, 1, 2], [5, 6, 7], [0, 1, 3, 4]]


def test_responses_of_one_token_or_none_add_nothing_to_their_prompt():
    rows = [make_row(1, [1, 2], [3]), make_row(2, [1, 2], []), make_row(3, [1, 2], [4])]
    layout = pack(rows, CPU)
    assert layout.tokens_NT.tolist() == [[1, 2]]
    assert layout.source_R.tolist() == [1, 1]
    padded, packed = logprobs_both_ways(tiny_model(layers=2).double(), rows)
    assert torch.allclose(packed, padded, atol=1e-12, rtol=0)


MODELS = {
    "llama, grouped heads": lambda: tiny_model(layers=2),
    "gpt2, learned positions": tiny_gpt2,
    "mistral, short window": lambda: tiny_mistral(window=4),
    "mistral, long window": lambda: tiny_mistral(window=100),
    "deepseek, heads of two sizes": tiny_deepseek,
}


@pytest.mark.parametrize("make_model", MODELS.values(), ids=MODELS)
def test_log_probabilities_equal_those_of_padded_rows(make_model):
    padded, packed = logprobs_both_ways(make_model().double(), random_batch(3, prompts=5).rows)
    assert torch.allclose(packed, padded, atol=1e-12, rtol=0)


def test_a_packing_model_still_accepts_padded_rows():
    model, rows = tiny_mistral(window=4).double(), random_batch(3).rows
    expected, _ = logprobs_both_ways(model, rows)
    assert model.config._attn_implementation == "tba_packed"
    assert torch.allclose(Scorer(model).score(rows).logprob_R, expected, atol=1e-12, rtol=0)


def steps(count: int = 2, **keys):
    """Return metrics and gradients of a learner's steps. Adam would make much of the rounding of small gradients."""
    torch.manual_seed(0)
    learner, gradients = make_learner(**keys), []
    learner.optimizer.register_step_pre_hook(
        lambda *_: gradients.append([not_none(parameter.grad).clone() for parameter in learner.trained])
    )
    metrics = [learner.step(random_batch(step, prompts=5, step=step)).metrics for step in range(count)]
    return metrics, gradients


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"lora": LoraSection(rank=2), "gradient_checkpointing": True, "micro_batch_tokens": 60},
        *slow(
            {"micro_batch_tokens": 1},
            {"micro_batch_tokens": 60},
            {"gradient_checkpointing": True},
            {"lora": LoraSection(rank=2)},
            {"name": "tb_learned_z"},
            {"name": "grpo"},
        ),
    ],
    ids=lambda keys: " ".join(keys) or "default",
)
def test_steps_equal_those_of_padded_rows(keys):
    # The head that predicts log Z is always float32.
    tolerance = 1e-6 if keys.get("name") == "tb_learned_z" else 1e-10
    (padded, expected), (packed, found) = (steps(packing=packing, **keys) for packing in ("padded", "packed"))
    for mine, theirs in zip(packed, padded, strict=True):
        assert mine == pytest.approx(theirs, abs=tolerance, rel=tolerance)
        assert mine["grad_norm"] > 1e-3
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.allclose(one, other, atol=tolerance, rtol=0) for one, other in zip(mine, theirs, strict=True))


def passes_of_a_step(learner, batch) -> list[tuple[bool, int]]:
    """Return, for each forward pass, whether it made a graph and its number of tokens."""
    calls = []
    learner.policy.base_model.register_forward_hook(
        lambda _, __, kwargs, ___: calls.append((torch.is_grad_enabled(), kwargs["input_ids"].numel())),
        with_kwargs=True,
    )
    learner.accumulate(batch, batch.reference_BK.nan_to_num(-5.0), 0.1)
    return calls


def test_no_graph_has_more_tokens_than_the_limit():
    batch = random_batch(0, prompts=3)
    groups = [sum(row.tokens for row in batch.rows[at : at + 4]) for at in range(0, 12, 4)]
    limit = max(*(row.tokens for row in batch.rows), min(groups) - 1)
    calls = passes_of_a_step(make_learner(packing="packed", micro_batch_tokens=limit), batch)
    with_graph = [tokens for graph, tokens in calls if graph]
    # No group fits, so each is cut into chunks, every one with the prompt.
    assert len(with_graph) > 3
    assert max(with_graph) <= limit < min(groups)


def test_a_prompt_is_computed_once_for_its_samples():
    batch = random_batch(0, prompts=3)
    prompts = sum(len(row.prompt_ids) for row in batch.rows[::4])
    tokens = prompts + sum(len(row.response_ids) - 1 for row in batch.rows)
    assert passes_of_a_step(make_learner(packing="packed"), batch) == [(True, tokens)]
    padded = sum(tokens for _, tokens in passes_of_a_step(make_learner(packing="padded"), batch))
    assert padded >= sum(row.tokens for row in batch.rows) > tokens


def test_packing_does_not_change_the_canary_of_a_model():
    model, sequences = tiny_mistral(window=4).double(), [[1, 2, 3, 4, 5, 6, 7]]
    expected = make_canary(skeleton(model), weights_of(model), sequences)
    Scorer(model, packed=True)
    found = make_canary(skeleton(model), weights_of(model), sequences)
    assert np.allclose(found.logprobs, expected.logprobs, atol=1e-6, rtol=0)


def tiny_mixture() -> Any:
    experts = {"moe_intermediate_size": 16, "num_experts": 2, "shared_expert_intermediate_size": 16}
    window = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}
    return tiny("Qwen2Moe", **EIGHT, **experts, **window, num_experts_per_tok=1)


# By name, a model and why its rows cannot be packed, if they cannot.
OBSTACLES: dict[str, tuple[Any, str]] = {
    "a layer across the boundary": (tiny_lfm2, "a sequence is affected by those that are packed before it"),
    "sinks": (tiny_gpt_oss, "its attention uses s_aux, which"),
    "capped scores": (lambda: tiny_gemma2(0.5), "its attention uses softcap, which"),
    "no cap": (lambda: tiny_gemma2(None), ""),
    "a window in the mask": (tiny_mixture, "has its sliding window of 64 in a mask"),
    "a window": (lambda: tiny_mistral(window=64), ""),
    "a rope of the longest sequence": (lambda: tiny_llama_with(rope_type="dynamic", factor=2.0), "(RoPE dynamic)"),
    "long rope": (lambda: tiny_llama_with(rope_type="longrope", factor=4.0, **LONGROPE), "(RoPE longrope)"),
    "a rope of the position": (lambda: tiny_llama_with(rope_type="linear", factor=2.0), ""),
}


@pytest.mark.parametrize(("make_model", "reason"), OBSTACLES.values(), ids=OBSTACLES)
def test_a_model_whose_rows_cannot_be_packed_is_refused_with_the_reason(make_model, reason):
    model = make_model()
    found = obstacle(model)
    assert reason in found
    assert bool(found) is bool(reason)
    assert reason == "" or model.config._attn_implementation != "tba_packed"


def test_required_packing_rejects_a_model_with_its_own_attention():
    shape = OpenAIGPTConfig(vocab_size=16, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    with pytest.raises(ConfigError, match="does not support other attention implementations"):
        packs("packed", OpenAIGPTLMHeadModel(shape), "cpu", half=False)


LONGROPE: dict[str, Any] = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 16}


def failing(error: Exception) -> Any:
    def kernel(*_, **__):
        raise error

    return kernel


@pytest.fixture
def kernel_everywhere(monkeypatch):
    """Use the kernel in half precision, as on a GPU. Returns a function that replaces the kernel."""
    for module in ("packing", "packed_attention"):
        monkeypatch.setattr(f"tba.trainer.model.{module}.has_kernel", lambda _device, _heads, *, half: half)
    return lambda kernel: monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)


@NEEDS_KERNEL
def test_a_kernel_that_fails_is_detected_before_training_unless_memory_runs_out(kernel_everywhere):
    kernel_everywhere(failing(RuntimeError("Expected is_sm80_or_later\nException raised from mha_varlen_fwd")))
    model = tiny_model()
    assert obstacle(model) == ""
    assert obstacle(model, half=True) == "LlamaForCausalLM does not run on packed rows: Expected is_sm80_or_later"
    assert model.config._attn_implementation != "tba_packed"
    with pytest.raises(ConfigError, match="does not run on packed rows: Expected is_sm80_or_later: set it to"):
        packs("packed", model, "cpu", half=True)
    kernel_everywhere(failing(AssertionError()))
    assert obstacle(model, half=True).endswith("does not run on packed rows: AssertionError")
    kernel_everywhere(failing(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        obstacle(model, half=True)


@NEEDS_KERNEL
@pytest.mark.parametrize(
    ("heads", "supported"), [([64] * 3, True), ([192, 192, 128], False), ([36] * 3, False), ([264] * 3, False)]
)
def test_the_kernel_needs_heads_of_one_size_that_is_a_multiple_of_8(monkeypatch, heads, supported):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert has_kernel("cuda", heads, half=True) == supported
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not has_kernel("cuda", heads, half=True)


@NEEDS_KERNEL
@pytest.mark.parametrize(("arguments", "supported"), [
    ("scale=None, window_size=(-1, -1)", False), ("scale=None, window_size=(-1, -1), enable_gqa=False", True),
], ids=["2.11", "2.12"])  # fmt: skip
def test_the_kernel_is_used_if_it_accepts_what_it_is_given_whatever_the_version(monkeypatch, arguments, supported):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.12.0"))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", eval(f"lambda query, *, {arguments}: query"))
    torch_has_kernel.cache_clear()
    assert has_kernel("cuda", [64], half=True) == supported
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    torch_has_kernel.cache_clear()
    assert not has_kernel("cuda", [64], half=True)
    torch_has_kernel.cache_clear()


def test_rows_that_are_packed_on_a_gpu_without_the_kernel_are_warned_of(caplog):
    with caplog.at_level(logging.INFO, logger="tba"):
        assert packs("packed", tiny_model(), "cuda", half=False)
        assert not packs("auto", tiny_model(), "cuda", half=False)
    (warned, padded) = caplog.records
    assert (warned.levelname, padded.levelname) == ("WARNING", "INFO")
    assert warned.fields["reason"] == padded.fields["reason"]
    assert "torch 2.12" in warned.fields["reason"]


def test_on_a_cpu_rows_are_packed_if_the_model_allows_it():
    found = [packs(packing, tiny_model(), "cpu", half=False) for packing in ("auto", "padded", "packed")]
    assert found == [True, False, True]
    assert not packs("auto", tiny_lfm2(), "cpu", half=False)


@pytest.mark.parametrize(
    "keys", [{"lora": {"rank": 2}}, {"train": {"packing": "packed", "offload": "optimizer"}}], ids=["lora", "offload"]
)
def test_rows_are_packed_where_weights_are_rounded_to_bfloat16(tmp_path, monkeypatch, keys):
    """As on a GPU. The trial comes before the rounding: it compares results within a thousandth."""
    monkeypatch.setattr("tba.trainer.step.build.in_half", lambda *_: True)
    tiny_model(layers=2).save_pretrained(tmp_path)
    config = Config.model_validate({"train": {"packing": "packed"}} | keys)
    learner, _ = build(config, tmp_path, CPU, ALONE)
    assert torch.bfloat16 in {parameter.dtype for parameter in learner.policy.parameters()}
    assert learner.step(random_batch(3)).metrics["skipped"] == 0
    assert learner.scorer.pass_overhead is None, "rows are packed"


# A prompt of 3 tokens with responses of 2 and 4 tokens, then a sequence of 3.
PLACES = [np.array(places) for places in ([0, 1, 2, 3, 4], [0, 1, 2, 5, 6, 7, 8], [9, 10, 11])]
SEQUENCES = Sequences(PLACES, CPU)


@NEEDS_KERNEL
def test_the_gpu_kernel_accepts_our_shapes():
    """Fake tensors compute the shapes of both passes without a GPU."""
    sequences = Sequences(PLACES, CPU)
    first_P, place_S = sequences.first_P, sequences.place_S
    with FakeTensorMode() as mode:
        for name, value in {"first_P": first_P, "place_S": place_S, "bounds": sequences.bounds}.items():
            sequences.__dict__[name] = mode.from_tensor(value)
        query, key, value = (torch.empty(12, heads, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
        attended = _kernel(query, key, value, sequences, 0.3, 4)
        torch.autograd.backward(attended.sum())
    assert (attended.shape, attended.dtype) == (query.shape, torch.bfloat16)
    assert [not_none(tensor.grad).shape for tensor in (query, key, value)] == [(12, 4, 8), (12, 2, 8), (12, 2, 8)]


def documented_kernel(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """Implement varlen_attn as torch documents it, with one large mask."""
    assert torch.equal(cu_q, cu_k)
    assert max_q == max_k == int(cu_q.diff().max())
    assert query.dtype == key.dtype == value.dtype == torch.bfloat16
    assert enable_gqa
    query, key, value = (tensor.double() for tensor in (query, key, value))
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    position = torch.arange(len(query))
    sequence = torch.bucketize(position, cu_q[1:], right=True)
    behind = position[:, None] - position
    left, right = (width if width >= 0 else len(query) for width in window_size)
    seen = (sequence[:, None] == sequence) & (behind <= left) & (-behind <= right)
    scores = torch.einsum("qad,kad->aqk", query, key) * scale
    return torch.einsum("aqk,kad->qad", scores.masked_fill(~seen, -torch.inf).softmax(-1), value).bfloat16()


@NEEDS_KERNEL
@pytest.mark.parametrize("window", [None, 3])
def test_the_gpu_kernel_computes_what_sdpa_computes(monkeypatch, window):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 12, 8) for heads in (4, 2, 2))
    kwargs = {"scaling": 0.3, "sliding_window": window, "sequences": SEQUENCES}
    expected, _ = attend(torch.nn.Identity(), query, key, value, None, **kwargs)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", documented_kernel)
    monkeypatch.setattr("tba.trainer.model.packed_attention.has_kernel", lambda *_, **__: True)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = attend(torch.nn.Identity(), query, key, value, None, **kwargs)
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), expected, atol=0.02)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_a_response_attends_to_its_prompt_and_to_itself(window):
    """Against attention over each whole sequence, one at a time, with its gradients."""
    torch.manual_seed(0)
    tensors = [torch.randn(1, heads, 12, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    call = partial(attend, torch.nn.Identity(), attention_mask=None, scaling=0.3, sliding_window=window)
    found, _ = call(*tensors, sequences=SEQUENCES)
    one, other, alone = (call(*(tensor[:, :, places] for tensor in tensors))[0] for places in PLACES)
    expected = torch.cat([one, other[:, 3:], alone], dim=1)
    assert torch.allclose(found, expected, atol=1e-12, rtol=0)
    weight = torch.randn_like(found)
    gradients = [torch.autograd.grad((attended * weight).sum(), tensors) for attended in (found, expected)]
    for mine, theirs in zip(*gradients, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-12, rtol=0)
