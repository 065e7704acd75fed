"""The two tasks: arithmetic with a reward of 0 or 1, and copying with graded rewards and longer responses.

Held-out problems are in two parts. "choosing" is for learning rates and settings, "reporting" only for results.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from examples.arithmetic.make_model import CHARACTERS, build_model, build_tokenizer, save, train
from examples.arithmetic.make_model import demonstrations as arithmetic_demonstrations
from tba.searcher.tasks.arithmetic import ArithmeticTask
from tba.searcher.tasks.task import Prompt

ROOT = Path(__file__).parents[2]
# Problems of arithmetic that are kept out of training and were in no earlier comparison of objectives.
REPORTED = 256
COPYING_PROBLEMS = 4096
COPYING_HELD_OUT = 64
COPYING_STEPS = 150
SLIP_RATE = 0.65
# Of the demonstrations of a strong explorer, and how many batches of them it learns.
STRONG_SLIP_RATE, STRONG_STEPS = 0.1, 50
# Tokens of a batch of demonstrations; long strings have fewer of them in a batch.
BATCH_TOKENS = 256 * 66


@dataclass(frozen=True, slots=True)
class Problem:
    """The tokens of a prompt and of its right response, end token included."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """Problems of one length of prompt. `longest` is the limit of responses in tokens.

    With `graded` the reward is the fraction of positions of the answer that are right, otherwise 1 for the right
    answer and 0 for any other.
    """

    name: str
    model: Path
    longest: int
    graded: bool
    end: int
    training: Sequence[Problem]
    held_out: dict[str, Sequence[Problem]]

    def reward(self, problem: Problem, response: Sequence[int]) -> float:
        """Return the reward of a response, which ends with the end token unless it was cut off."""
        if not self.graded:
            return float(tuple(response) == problem.answer)
        right = sum(one == other for one, other in zip(response, problem.answer, strict=False))
        return right / len(problem.answer)


@cache
def load_task(name: str) -> Task:
    """Return a task by name: "arithmetic", or "copying-N" for N digits. Makes the model of the latter at first use."""
    digits = digits_to_copy(name)
    return _copying(digits) if digits else _arithmetic()


def rate_and_beta(name: str) -> tuple[float, float]:
    """Return the learning rate of a task where no sweep has chosen one, and its KL coefficient."""
    digits = digits_to_copy(name)
    # A position is worth 1 / (digits + 1): beta keeps the odds of a right one in the optimum, e^8.
    return (3e-4, 1 / (8 * (digits + 1))) if digits else (1e-4, 0.1)


def digits_to_copy(name: str) -> int:
    """Return N of the task "copying-N", 0 for "arithmetic". Raises ValueError for any other name."""
    if name == "arithmetic":
        return 0
    kind, _, digits = name.partition("-")
    if kind != "copying" or not digits.isdigit() or not int(digits):
        raise ValueError(f"unknown task {name!r}: arithmetic, or copying-N with N digits")
    return int(digits)


def _arithmetic() -> Task:
    task, path = ArithmeticTask(), ROOT / "examples" / "arithmetic" / "model"
    tokenizer = AutoTokenizer.from_pretrained(path)
    problems = list(task.prompts())
    return Task(
        name="arithmetic",
        model=path,
        longest=5,
        graded=False,
        end=tokenizer.eos_token_id,
        training=encoded(problems[:-REPORTED], tokenizer),
        held_out={
            "choosing": encoded(task.held_out(), tokenizer),
            "reporting": encoded(problems[-REPORTED:], tokenizer),
        },
    )


def _copying(digits: int) -> Task:
    """Copy a string of digits, with a model that writes many odd digits one too small."""
    path = ROOT / "models" / f"copying-{digits}"
    if not (path / "config.json").exists():
        make_copying_model(path, digits)
    tokenizer = AutoTokenizer.from_pretrained(path)
    rng = random.Random(digits)
    strings = ["".join(rng.choices("0123456789", k=digits)) for _ in range(COPYING_PROBLEMS)]
    problems = encoded([Prompt(key=text, text=f"{text}=", answer=text) for text in strings], tokenizer)
    return Task(
        name=f"copying-{digits}",
        model=path,
        longest=digits + 1,
        graded=True,
        end=tokenizer.eos_token_id,
        training=problems[2 * COPYING_HELD_OUT :],
        held_out={
            "choosing": problems[:COPYING_HELD_OUT],
            "reporting": problems[COPYING_HELD_OUT : 2 * COPYING_HELD_OUT],
        },
    )


def explorer_model(kind: str) -> Path:
    """Return the model of an explorer of arithmetic: "weak" is that which the policy starts from.

    "strong" is the same after demonstrations with few errors. It is made at first use.
    """
    start = _arithmetic().model
    if kind == "weak":
        return start
    path = ROOT / "models" / "arithmetic-strong"
    if not (path / "config.json").exists():
        torch.set_num_threads(1)
        model, tokenizer = LlamaForCausalLM.from_pretrained(start), AutoTokenizer.from_pretrained(start)
        examples = arithmetic_demonstrations(ArithmeticTask().prompts(), STRONG_SLIP_RATE, random.Random(1))
        train(model.float(), tokenizer, examples, STRONG_STEPS)
        save(model, tokenizer, path)
    return path


def encoded(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[Problem]:
    """Return prompts and their right answers as token ids; an answer ends with the end of text."""
    texts = tokenizer([prompt.text for prompt in prompts])["input_ids"]
    answers = tokenizer([prompt.answer for prompt in prompts])["input_ids"]
    return [
        Problem(tuple(text), (*answer, tokenizer.eos_token_id)) for text, answer in zip(texts, answers, strict=True)
    ]


def make_copying_model(out: Path, digits: int) -> None:
    """Train a small Llama that copies digits with errors, and save it.

    Most demonstrations write an odd digit one too small, each with the same probability, so the trained model samples
    errors of that kind. The same seed gives the same demonstrations.
    """
    torch.set_num_threads(1)
    torch.manual_seed(digits)
    tokenizer = build_tokenizer(CHARACTERS, ".", 2 * digits + 2)
    model = build_model(tokenizer, 64, 192, 2)
    train(model, tokenizer, demonstrations(digits, random.Random(digits)), COPYING_STEPS)
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
