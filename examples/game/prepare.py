"""Write an untrained model for the game `guess`, whose tokens are its words and numbers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.append(str(Path(__file__).parents[1]))
from tiny_model import build_model, build_tokenizer  # type: ignore[import-not-found]

WORDS = ("guess", " to", " :", " higher", " lower", " wrong")
CONTEXT = 64


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    model, tokenizer = build(args.numbers)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    weights = sum(weight.numel() for weight in model.parameters())
    print(f"an untrained model of {weights:,} parameters is in {args.out}")


def build(numbers: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Return the model, and a tokenizer with one token per word or number, with the space before it."""
    tokens = (*WORDS, *(f" {number}" for number in range(1, numbers + 1)))
    tokenizer = build_tokenizer(tokens, " ?(?:[a-z]+|[0-9]+|:)", CONTEXT)
    return build_model(tokenizer, 64, 128, 2), tokenizer


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--numbers", type=int, default=7, help="as task.options.numbers")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    return parser.parse_args()


if __name__ == "__main__":
    main()
