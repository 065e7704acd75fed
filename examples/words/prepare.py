"""Write what the warm start of the word problems needs: an untrained model, and pairs of problems and solutions.

Many solutions misread an event, so the fine-tuned model usually makes the same mistakes. It sometimes gives the correct
answer, which reinforcement learning then reinforces.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from pathlib import Path

import torch
from words import Event, Problem, WordProblems  # type: ignore[import-not-found]

sys.path.append(str(Path(__file__).parents[1]))
from tiny_model import build_model, build_tokenizer  # type: ignore[import-not-found]

# A word, a digit or another character is a token, with the space before it.
TOKEN = r" ?(?:[A-Za-z]+|[0-9]|[^ A-Za-z0-9])"
# The words that are misread, and how often.
MISREAD = ("sells", "gives")
SLIP_RATE = 0.6


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    task = WordProblems(args.pairs)
    rows = [{"prompt": problem.text, "response": careless_solution(problem, rng)} for problem in task.problems]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = build_tokenizer(words_of(rows), TOKEN, 160)
    model = build_model(tokenizer, 192, 512, 4)
    model.save_pretrained(args.out / "untrained")
    tokenizer.save_pretrained(args.out / "untrained")
    weights = sum(weight.numel() for weight in model.parameters())
    print(f"{len(rows):,} pairs and an untrained model of {weights:,} parameters are in {args.out}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--pairs", type=int, default=20_000, help="problems with a solution")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the mistakes")
    return parser.parse_args()


def careless_solution(problem: Problem, rng: random.Random) -> str:
    """Return a solution in which some words are misread: what is given away, for instance, is added."""

    def read(event: Event) -> int:
        misread = event.text.startswith(MISREAD) and rng.random() < SLIP_RATE
        change: int = event.change
        return -change if misread else change

    solution: str = problem.solution(read)
    return solution


def words_of(rows: list[dict[str, str]]) -> list[str]:
    """Return all words, digits and signs of the pairs."""
    return sorted({token for row in rows for text in row.values() for token in re.findall(TOKEN, text)})


if __name__ == "__main__":
    main()
