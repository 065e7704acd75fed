"""Write an untrained model for the game `guess`, whose tokens are its words and numbers."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
WORDS = ("guess", " to", " :", " higher", " lower", " wrong")
CONTEXT = 64


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer(args.numbers)
    model = build_model(tokenizer)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    weights = sum(weight.numel() for weight in model.parameters())
    print(f"an untrained model of {weights:,} parameters is in {args.out}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--numbers", type=int, default=7, help="as task.options.numbers")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    return parser.parse_args()


def build_tokenizer(numbers: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word or number, with the space before it."""
    tokens = (*SPECIAL_TOKENS, *WORDS, *(f" {number}" for number in range(1, numbers + 1)))
    tokenizer = Tokenizer(models.WordLevel({token: n for n, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" ?(?:[a-z]+|[0-9]+|:)"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
        padding_side="left",
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        # The smallest that vLLM's CPU attention supports.
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


if __name__ == "__main__":
    main()
