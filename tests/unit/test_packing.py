"""A micro-batch as one row of all its sequences gives the numbers of a padded one."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
)

from tba.common.config import LoraSection
from tba.common.errors import ConfigError
from tba.trainer.canary import make_canary, skeleton
from tba.trainer.model import Scorer, weights_of
from tba.trainer.packing import _has_kernel, _head_sizes, _kernel, attend, obstacle, pack, packs

from .rank_lab import make_learner
from .tb_lab import make_row, random_batch, tiny_model

CPU = torch.device("cpu")
SMALL = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def tiny_gpt2():
    """Positions are learned: a sequence in the middle of a row must begin at 0."""
    torch.manual_seed(0)
    shape = {"vocab_size": 16, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=1, eos_token_id=2)).eval().double()


def tiny_mistral(window: int):
    torch.manual_seed(0)
    shape = SMALL | {"num_key_value_heads": 1, "intermediate_size": 32, "sliding_window": window}
    return MistralForCausalLM(MistralConfig(**shape, max_position_embeddings=64, initializer_range=0.3)).eval().double()


def tiny_lfm2():
    """Every other layer is a convolution, which runs over the boundary."""
    shape = SMALL | {"num_key_value_heads": 1, "intermediate_size": 32, "layer_types": ["conv", "full_attention"]}
    return Lfm2ForCausalLM(Lfm2Config(**shape, initializer_range=0.3)).eval()


def tiny_deepseek():
    """Queries and keys have heads of 24, values of 16."""
    torch.manual_seed(0)
    shape = SMALL | {"intermediate_size": 32, "kv_lora_rank": 8, "q_lora_rank": 8, "first_k_dense_replace": 2}
    heads = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**shape, **heads, initializer_range=0.3)).eval().double()


def tiny_gpt_oss():
    """Each head has a sink."""
    shape = SMALL | {"num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 16, "num_local_experts": 2}
    return GptOssForCausalLM(GptOssConfig(**shape, num_experts_per_tok=1)).eval()


def tiny_gemma2(cap: float | None):
    shape = SMALL | {"num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 16}
    return Gemma2ForCausalLM(Gemma2Config(**shape, attn_logit_softcapping=cap)).eval()


def tiny_llama_with(**rope):
    shape = SMALL | {"intermediate_size": 32, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**shape, rope_parameters={"rope_theta": 1e4} | rope)).eval()


def logprobs_both_ways(model, rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded, then packed; the padded ones by the attention that the model came with."""
    with torch.no_grad():
        return tuple(Scorer(model, autocast=False, packed=packed).score(rows).logprob_R for packed in (False, True))


def test_rows_are_one_row_whose_positions_begin_anew():
    laid = pack([make_row(1, [1, 2], [3]), make_row(2, [4], []), make_row(3, [5, 6], [7, 0])], CPU)
    assert laid.tokens_NT.tolist() == [[1, 2, 3, 4, 5, 6, 7, 0]]
    assert laid.source_R.tolist() == [1, 5, 6]
    assert (laid.starts, laid.prompt_lengths, laid.lengths) == ([0, 3, 4], [2, 1, 2], [1, 0, 2])
    assert laid.told["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]
    assert laid.told["cu_seq_lens_q"].tolist() == [0, 3, 4, 8]
    assert laid.told["max_length_q"] == 4


@pytest.mark.parametrize(
    "make_model",
    [
        lambda: tiny_model(layers=2).double(),
        tiny_gpt2,
        lambda: tiny_mistral(window=4),
        lambda: tiny_mistral(window=100),
        tiny_deepseek,
    ],
    ids=[
        "llama, grouped heads",
        "gpt2, learned positions",
        "mistral, short window",
        "mistral, long window",
        "deepseek, heads of two sizes",
    ],
)
def test_log_probabilities_are_those_of_padded_rows(make_model):
    padded, packed = logprobs_both_ways(make_model(), random_batch(3, prompts=5).rows)
    assert torch.allclose(packed, padded, atol=1e-12, rtol=0)


def test_a_short_window_is_not_the_same_as_none():
    rows = random_batch(3, prompts=5).rows
    short, long = (logprobs_both_ways(tiny_mistral(window), rows)[1] for window in (4, 100))
    assert float((short - long).abs().max()) > 1e-3


def test_a_model_set_to_pack_still_takes_rows_side_by_side():
    model, rows = tiny_mistral(window=4), random_batch(3).rows
    expected, _ = logprobs_both_ways(model, rows)
    assert model.config._attn_implementation == "tba_packed"
    assert torch.allclose(Scorer(model, autocast=False).score(rows).logprob_R, expected, atol=1e-12, rtol=0)


def steps(count: int = 2, **keys):
    """Metrics and weights of a learner that takes some steps."""
    torch.manual_seed(0)
    learner = make_learner(**keys)
    metrics = [learner.step(random_batch(step, prompts=5, step=step)).metrics for step in range(count)]
    return metrics, dict(learner.policy.named_parameters())


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"micro_batch_tokens": 1},
        {"micro_batch_tokens": 60},
        {"gradient_checkpointing": True},
        {"lora": LoraSection(rank=2)},
        {"lora": LoraSection(rank=2), "gradient_checkpointing": True, "micro_batch_tokens": 60},
        {"name": "tb_learned_z"},
        {"name": "grpo"},
    ],
    ids=lambda keys: " ".join(keys) or "plain",
)
def test_steps_are_those_of_padded_rows(keys):
    # The head that predicts log Z is float32 in any model.
    tolerance = 1e-6 if keys.get("name") == "tb_learned_z" else 1e-10
    (padded, expected), (packed, found) = (steps(packing=packing, **keys) for packing in ("padded", "packed"))
    for mine, theirs in zip(packed, padded, strict=True):
        assert mine == pytest.approx(theirs, abs=tolerance, rel=tolerance)
        assert mine["grad_norm"] > 1e-3
    for name, weight in expected.items():
        assert torch.allclose(found[name], weight, atol=tolerance, rtol=0), name


@pytest.mark.parametrize("micro_batch_tokens", [1, 10_000])
def test_a_micro_batch_is_one_pass(micro_batch_tokens):
    learner = make_learner(packing="packed", micro_batch_tokens=micro_batch_tokens)
    calls = passes_of_a_step(learner, random_batch(0, prompts=5))
    # A group that is too large is computed twice, and here row by row.
    assert len(calls) == (2 * 5 * 4 if micro_batch_tokens == 1 else 1)


def passes_of_a_step(learner, batch) -> list[tuple[bool, int]]:
    """Of each forward pass whether it made a graph, and its tokens."""
    calls = []
    learner.policy.base_model.register_forward_hook(
        lambda _, __, told, ___: calls.append((torch.is_grad_enabled(), told["input_ids"].numel())), with_kwargs=True
    )
    learner.accumulate(batch, batch.reference_BK.nan_to_num(-5.0), 0.1)
    return calls


def test_no_graph_has_more_tokens_than_a_micro_batch_may_have():
    batch = random_batch(0, prompts=3)
    groups = [sum(row.tokens for row in batch.rows[at : at + 4]) for at in range(0, 12, 4)]
    limit = max(*(row.tokens for row in batch.rows), min(groups) - 1)
    calls = passes_of_a_step(make_learner(packing="packed", micro_batch_tokens=limit), batch)
    with_graph = [tokens for graph, tokens in calls if graph]
    assert max(with_graph) <= limit < min(groups)
    assert sum(with_graph) == sum(groups)


def test_the_canary_of_a_packed_model_is_that_of_the_model():
    model, sequences = tiny_mistral(window=4), [[1, 2, 3, 4, 5, 6, 7]]
    expected = make_canary(skeleton(model), weights_of(model), sequences)
    Scorer(model, autocast=False, packed=True)
    found = make_canary(skeleton(model), weights_of(model), sequences)
    assert np.allclose(found.logprobs, expected.logprobs, atol=1e-6, rtol=0)


def test_what_passes_from_sequence_to_sequence_outside_of_attention_is_found():
    model = tiny_lfm2()
    assert "a sequence notices the ones that are packed before it" in obstacle(model)
    assert model.config._attn_implementation != "tba_packed"


def test_a_model_with_an_attention_of_its_own_is_refused_where_packing_is_asked_for():
    shape = OpenAIGPTConfig(vocab_size=16, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    with pytest.raises(ConfigError, match="does not leave its attention to others"):
        packs("packed", OpenAIGPTLMHeadModel(shape), "cpu", half=False)


@pytest.mark.parametrize(
    ("model", "argument"), [(tiny_gpt_oss, "s_aux"), (lambda: tiny_gemma2(0.5), "softcap")], ids=["gpt_oss", "gemma2"]
)
def test_a_model_whose_attention_does_more_is_refused_by_what_it_asks_for(model, argument):
    assert f"its attention takes {argument}, which" in obstacle(model())


def test_gemma_2_without_a_cap_is_packed():
    assert obstacle(tiny_gemma2(None)) == ""


LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "rope", [{"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "longrope", "factor": 4.0} | LONGROPE]
)
def test_a_rope_that_goes_by_the_longest_sequence_of_a_pass_is_refused(rope):
    assert f"(RoPE {rope['rope_type']})" in obstacle(tiny_llama_with(**rope))


def test_a_rope_that_goes_by_the_position_alone_is_packed():
    assert obstacle(tiny_llama_with(rope_type="linear", factor=2.0)) == ""


def refuse(*_, **__):
    raise RuntimeError("Expected is_sm80_or_later\nException raised from mha_varlen_fwd")


def run_out(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture
def kernel_everywhere(monkeypatch):
    """As on a GPU: in half precision there is one kernel. Returns what puts another in its place."""
    monkeypatch.setattr("tba.trainer.packing._has_kernel", lambda _device, _heads, *, half: half)
    return lambda kernel: monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)


def test_a_kernel_that_refuses_is_found_before_training(kernel_everywhere):
    kernel_everywhere(refuse)
    model = tiny_model()
    assert obstacle(model) == ""
    assert obstacle(model, half=True) == "LlamaForCausalLM does not run on packed rows: Expected is_sm80_or_later"
    assert model.config._attn_implementation != "tba_packed"
    with pytest.raises(ConfigError, match="does not run on packed rows: Expected is_sm80_or_later: set it to"):
        packs("packed", model, "cpu", half=True)


def test_a_lack_of_memory_says_nothing_about_the_model(kernel_everywhere):
    kernel_everywhere(run_out)
    with pytest.raises(torch.OutOfMemoryError):
        obstacle(tiny_model(), half=True)


def assert_nothing(*_, **__):
    raise AssertionError


def test_an_error_without_words_is_told_by_its_class(kernel_everywhere):
    kernel_everywhere(assert_nothing)
    assert obstacle(tiny_model(), half=True).endswith("does not run on packed rows: AssertionError")


@pytest.mark.parametrize(
    ("heads", "taken"), [([64] * 3, True), ([192, 192, 128], False), ([36] * 3, False), ([264] * 3, False)]
)
def test_the_kernel_takes_heads_of_one_size_that_is_a_multiple_of_8(monkeypatch, heads, taken):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert _has_kernel("cuda", heads, half=True) == taken
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not _has_kernel("cuda", heads, half=True)


def test_the_sizes_of_heads_are_all_that_a_configuration_names():
    assert _head_sizes(tiny_deepseek()) == {8, 16, 24}
    assert _head_sizes(tiny_gpt2()) == {8}


def test_on_a_cpu_rows_are_packed_only_if_asked_for():
    assert [packs(packing, tiny_model(), "cpu", half=False) for packing in ("auto", "padded", "packed")] == [
        False,
        False,
        True,
    ]


def test_the_gpu_kernel_takes_what_it_is_given():
    """Without a GPU it computes shapes alone, of both passes."""
    with FakeTensorMode():
        query, key, value = (torch.empty(12, heads, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
        boundaries = torch.tensor([0, 5, 12], dtype=torch.int32)
        attended = _kernel(query, key, value, boundaries, 7, 0.3, 4)
        torch.autograd.backward(attended.sum())
    assert (attended.shape, attended.dtype) == (query.shape, torch.bfloat16)
    assert [tensor.grad.shape for tensor in (query, key, value)] == [(12, 4, 8), (12, 2, 8), (12, 2, 8)]


def documented_kernel(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """What torch's documentation says of varlen_attn, by one large mask."""
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


@pytest.mark.parametrize("window", [None, 3])
def test_the_gpu_kernel_is_asked_for_what_each_sequence_by_itself_gives(monkeypatch, window):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 12, 8) for heads in (4, 2, 2))
    told = {"scaling": 0.3, "sliding_window": window, "cu_seq_lens_q": torch.tensor([0, 5, 12], dtype=torch.int32)}
    expected, _ = attend(None, query, key, value, None, **told)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", documented_kernel)
    monkeypatch.setattr("tba.trainer.packing._has_kernel", lambda *_, **__: True)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = attend(None, query, key, value, None, max_length_q=7, **told)
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), expected, atol=0.02)
