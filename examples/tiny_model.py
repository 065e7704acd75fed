"""A tiny Llama and a tokenizer of whole words, for the examples that make a model of their own."""

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
# The smallest that vLLM's CPU attention supports.
HEAD_DIM = 32


def build_tokenizer(tokens: Sequence[str], pattern: str, context: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of these tokens, each of which the pattern matches, without a token that begins a text."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *tokens))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=context,
        padding_side="left",
    )


def build_model(tokenizer: PreTrainedTokenizerFast, hidden: int, intermediate: int, layers: int) -> LlamaForCausalLM:
    """Return an untrained model for a tokenizer."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_DIM,
        num_key_value_heads=hidden // HEAD_DIM,
        head_dim=HEAD_DIM,
        max_position_embeddings=tokenizer.model_max_length,
        # vLLM's CPU build keeps a stale copy of a tied output layer when weights are reloaded.
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)
