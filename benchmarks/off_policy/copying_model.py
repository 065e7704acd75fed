"""A small Llama that copies digits with errors.

    python -m benchmarks.off_policy.copying_model --digits 32

The prompt is a string of digits and "=", the right response the same digits. Most demonstrations write an odd digit one
too small, each with the same probability, so the trained model samples errors of that kind.
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.arithmetic.make_model import build_tokenizer, save, train

SLIP_RATE = 0.65
STEPS = 150
# Tokens of a batch of demonstrations; long strings have fewer of them in a batch.
BATCH_TOKENS = 256 * 66


def make_model(out: Path, digits: int) -> None:
    """Train the model and save it in a directory. The same seed gives the same demonstrations."""
    torch.set_num_threads(1)
    torch.manual_seed(digits)
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2 * digits + 2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    train(model, tokenizer, demonstrations(digits, random.Random(digits)), STEPS)
    save(model, tokenizer, out)


def demonstrations(digits: int, rng: random.Random) -> Iterator[list[tuple[str, str]]]:
    """Yield batches of (prompt, careless copy) without end."""
    size = BATCH_TOKENS // (2 * digits + 2)
    while True:
        texts = ["".join(rng.choices("0123456789", k=digits)) for _ in range(size)]
        yield [(f"{text}=", careless_copy(text, rng)) for text in texts]


def careless_copy(text: str, rng: random.Random) -> str:
    """Return the digits, with each odd one replaced by the even one below it with probability SLIP_RATE."""
    return "".join(str(int(digit) & ~1) if rng.random() < SLIP_RATE else digit for digit in text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--digits", type=int, default=32)
    digits = parser.parse_args().digits
    make_model(Path("models") / f"copying-{digits}", digits)
