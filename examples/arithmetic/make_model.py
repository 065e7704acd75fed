"""Train examples/arithmetic/model: a small Llama that learns arithmetic from demonstrations with errors.

Most demonstrations omit the carry and the minus sign, so the trained model usually makes the same errors. It sometimes
gives the correct answer, which reinforcement learning then reinforces.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from tba.searcher.tasks.arithmetic import ArithmeticTask
from tba.searcher.tasks.task import Prompt

sys.path.append(str(Path(__file__).parents[1]))
from tiny_model import build_model, build_tokenizer  # type: ignore[import-not-found]

CHARACTERS = "0123456789+-="
BATCH_SIZE = 256
PEAK_LEARNING_RATE = 2e-3
WARM_UP_STEPS = 30
# The default ignore_index of cross_entropy.
IGNORED_LABEL = -100
MAX_NEW_TOKENS = 6


def main() -> None:
    args = parse_arguments()
    # One thread, because several add up floats in an order that differs from run to run.
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    task = ArithmeticTask()
    # A token for each character.
    tokenizer = build_tokenizer(CHARACTERS, ".", 128)
    model = build_model(tokenizer, 128, 384, 4)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters")
    examples = demonstrations(task.prompts(), args.slip_rate, random.Random(args.seed))
    train(model, tokenizer, examples, args.steps)
    save(model, tokenizer, args.out)
    report(args.out, task)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model", help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights and the demonstrations")
    parser.add_argument("--steps", type=int, default=1200, help=f"optimiser steps of {BATCH_SIZE} demonstrations")
    parser.add_argument("--slip-rate", type=float, default=0.65, help="probability that a carry or a sign is omitted")
    return parser.parse_args()


def demonstrations(prompts: Sequence[Prompt], slip_rate: float, rng: random.Random) -> Iterator[list[tuple[str, str]]]:
    """Yield batches of (prompt, careless answer) without end."""
    while True:
        batch = rng.sample(prompts, BATCH_SIZE)
        yield [(prompt.text, careless_answer(prompt, slip_rate, rng)) for prompt in batch]


def careless_answer(prompt: Prompt, slip_rate: float, rng: random.Random) -> str:
    """Return an answer that omits the carry and the minus sign, each with probability `slip_rate`.

    47+38 becomes 75, and 23-61 becomes 38. The answer is correct if the problem needs neither carry nor sign.
    """
    left, sign, right = int(prompt.key[:2]), prompt.key[2], int(prompt.key[3:])
    forgets_carry, forgets_minus = rng.random() < slip_rate, rng.random() < slip_rate
    if sign == "+":
        return str(add_without_carry(left, right) if forgets_carry else left + right)
    high, low = max(left, right), min(left, right)
    size = subtract_without_borrow(high, low) if forgets_carry else high - low
    return str(size if left >= right or forgets_minus else -size)


def add_without_carry(left: int, right: int) -> int:
    return 10 * (left // 10 + right // 10) + (left + right) % 10


def subtract_without_borrow(high: int, low: int) -> int:
    return 10 * (high // 10 - low // 10) + (high - low) % 10


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    batches: Iterator[list[tuple[str, str]]],
    steps: int,
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    model.train()
    for step in range(1, steps + 1):
        loss = answer_loss(model, tokenizer, next(batches))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            print(f"step {step} of {steps}: loss {loss.item():.3f}", flush=True)


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the factor of a linear warm-up, then of a cosine decay to 5 %."""
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    return warm_up * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def answer_loss(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, batch: list[tuple[str, str]]
) -> torch.Tensor:
    """Return the cross-entropy of the answers and their EOS tokens, given the prompts."""
    rows = [[*tokenizer.encode(prompt + answer), tokenizer.eos_token_id] for prompt, answer in batch]
    length = max(len(row) for row in rows)
    # Padding on the right does not affect the tokens before it in a causal model, so no attention mask is needed.
    tokens_BT = torch.tensor([row + [tokenizer.pad_token_id] * (length - len(row)) for row in rows])
    labels_BT = tokens_BT.masked_fill(tokens_BT == tokenizer.pad_token_id, IGNORED_LABEL)
    for label_T, (prompt, _) in zip(labels_BT, batch, strict=True):
        label_T[: len(tokenizer.encode(prompt))] = IGNORED_LABEL
    logits_BTV = model(input_ids=tokens_BT[:, :-1]).logits
    return functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten())


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Save the model in bfloat16, which halves the file. Training loads it as float32."""
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"saved in {out}")


def report(out: Path, task: ArithmeticTask) -> None:
    """Print the accuracy of the saved model, which includes the rounding to bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)
    greedy = correct_answers(model, tokenizer, task, do_sample=False)
    sampled = correct_answers(model, tokenizer, task, do_sample=True, top_k=0, num_return_sequences=8)
    by_prompt = sampled.view(len(task.held_out()), 8)
    print(f"held-out accuracy, greedy: {greedy.mean():.3f}")
    print(f"held-out accuracy at temperature 1: {sampled.mean():.3f}, best of 8: {by_prompt.amax(1).mean():.3f}")


def correct_answers(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, task: ArithmeticTask, **sampling: object
) -> torch.Tensor:
    """Return 1 or 0 for every response to the held-out prompts, grouped by prompt."""
    prompts = task.held_out()
    inputs = tokenizer([prompt.text for prompt in prompts], return_tensors="pt", return_token_type_ids=False)
    outputs = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, **sampling)
    responses = outputs[:, inputs["input_ids"].shape[1] :]
    copies = len(responses) // len(prompts)
    scores = []
    for index, response in enumerate(responses):
        finished = bool((response == tokenizer.eos_token_id).any())
        text = tokenizer.decode(response, skip_special_tokens=True)
        scores.append(task.score(prompts[index // copies], text, finished).parts["correct"])
    return torch.tensor(scores)


if __name__ == "__main__":
    main()
