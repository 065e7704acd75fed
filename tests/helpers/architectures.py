"""Tiny configurations of the architectures that transformers and vLLM share, by name: model type and changed settings.

Heads have width 32, the smallest that vLLM's attention on a CPU supports.
"""

from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256, "initializer_range": 0.1,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ORIGINAL = {"rope_theta": 1e4, "original_max_position_embeddings": 64}


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4} | settings}


ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama without groups": ("llama", {"num_key_value_heads": 2}),
    "llama gelu": ("llama", {"hidden_act": "gelu"}),
    "llama linear": ("llama", _rope("linear", factor=2.0)),
    "llama dynamic": ("llama", _rope("dynamic", factor=2.0)),
    "llama yarn": ("llama", _rope("yarn", factor=4.0, **_ORIGINAL)),
    "llama llama3": ("llama", _rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, **_ORIGINAL)),
    "llama theta": ("llama", _rope("default", rope_theta=5e5)),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 16}),
    "ministral": ("ministral", {"sliding_window": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 biases": ("qwen3", {"attention_bias": True}),
    "qwen2_moe": ("qwen2_moe", _EXPERTS | {"shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe unnormalised": ("qwen3_moe", _EXPERTS | {"norm_topk_prob": False}),
    "qwen3_moe sparse": ("qwen3_moe", _EXPERTS | {"decoder_sparse_step": 2}),
    "mixtral": ("mixtral", _LOCAL_EXPERTS | {"sliding_window": None}),
    "olmoe": ("olmoe", _EXPERTS | {"num_key_value_heads": 2, "intermediate_size": 64}),
    "phimoe": ("phimoe", _LOCAL_EXPERTS),
    "gpt_oss": ("gpt_oss", _LOCAL_EXPERTS | {"intermediate_size": 64, "sliding_window": 16}),
    "granitemoe": ("granitemoe", _LOCAL_EXPERTS),
    "phi": ("phi", {"num_key_value_heads": 2}),
    "phi3": ("phi3", {}),
    "phi3 longrope": (
        "phi3",
        _rope("longrope", short_factor=[1.0] * 16, long_factor=[4.0] * 16, **_ORIGINAL)
        | {"original_max_position_embeddings": 64},
    ),
    "phi3 partial": ("phi3", _rope("default", partial_rotary_factor=0.5)),
    "gemma": ("gemma", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"tie_word_embeddings": True, "sliding_window": 16}),
    "gemma2 without caps": (
        "gemma2",
        {
            "tie_word_embeddings": True, "sliding_window": 16, "final_logit_softcapping": None,
            "attn_logit_softcapping": None, "query_pre_attn_scalar": 32,
        },
    ),
    "gemma2 attention cap": (
        "gemma2",
        {
            "tie_word_embeddings": True, "sliding_window": 16, "final_logit_softcapping": None,
            "attn_logit_softcapping": 0.05, "query_pre_attn_scalar": 32,
        },
    ),
    "vaultgemma": (
        "vaultgemma",
        {"tie_word_embeddings": True, "sliding_window": 16, "final_logit_softcapping": None,
         "attn_logit_softcapping": 0.05},
    ),
    "gemma3_text": ("gemma3_text", {"tie_word_embeddings": True, "sliding_window": 16, "query_pre_attn_scalar": 32}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 16}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "granite": ("granite", {"logits_scaling": 8.0}),
    "granite unscaled": (
        "granite",
        {"logits_scaling": 1.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.2, "attention_multiplier": 0.1},
    ),
    "cohere": ("cohere", {"tie_word_embeddings": True}),
    "cohere2": ("cohere2", {"tie_word_embeddings": True, "sliding_window": 16}),
    "starcoder2": ("starcoder2", {}),
    "stablelm": ("stablelm", {}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "nemotron": ("nemotron", {}),
    "exaone4": ("exaone4", {"sliding_window": 16, "sliding_window_pattern": 2}),
    "ernie4_5": ("ernie4_5", {}),
    "seed_oss": ("seed_oss", {}),
    "helium": ("helium", {}),
    "arcee": ("arcee", {}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.25, "num_key_value_heads": 2}),
    "opt": ("opt", {"ffn_dim": 128, "word_embed_proj_dim": 64, "do_layer_norm_before": True}),
    "gptj": ("gptj", {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256, "rotary_dim": 16}),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 2}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64,
            "qk_nope_head_dim": 32, "v_head_dim": 32, "first_k_dense_replace": 1, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1,
        },
    ),
}  # fmt: skip

# Logits that the trainer refuses.
CAPPED = {"gemma2", "granite", "cohere", "cohere2"}
# Models whose experts the files have one by one, which the Transformers engine cannot reload.
EXPERTS = {name for name, (kind, _) in ARCHITECTURES.items() if kind in (
    "qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "phimoe", "deepseek_v3",
)}  # fmt: skip
# By name, a part of the sentence with which vLLM 0.32.0 on a CPU, or its swap, refuses.
VLLM_REFUSES = {
    "llama gelu": "Only silu is supported",
    "qwen2 window": "Sliding window for some but all layers is not supported",
    "qwen3 biases": "2 tensors have no place in it, for example 'model.layers.0.self_attn.o_proj.bias'",
    "phimoe": "too many values to unpack (expected 3) in transformers/models/phimoe/modeling_phimoe.py",
    "gpt_oss": "vLLM cannot replace the weights of",
    "phi": "1 tensor is not restored, for example lm_head.bias",
    "bloom": "There is no module or parameter named 'lm_head' in BloomModel",
    "deepseek_v3": "this vLLM does not support the model: try another release",
}


def random_model(name: str, seed: int = 0) -> Any:
    """Return a random model of an architecture, whose biases, norms and other vectors are random too."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    kind, settings = ARCHITECTURES[name]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SHAPE | settings)))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    # Some configurations put their family's end tokens in the place of none, and the vocabulary here is smaller.
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model


def save(name: str, directory: Any) -> None:
    """Save a random model of an architecture."""
    random_model(name).save_pretrained(directory)
