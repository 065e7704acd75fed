"""Write what the warm start of the calculator needs: an untrained model, and replies to imitate.

One in seven replies asks the calculator. The others guess, so the fine-tuned model can ask, and seldom does.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from tba.searcher.tasks.games import CalculatorTask

sys.path.append(str(Path(__file__).parents[1]))
from tiny_model import build_model, build_tokenizer  # type: ignore[import-not-found]

# A word or another character.
TOKEN = "[A-Za-z]+|[^A-Za-z]"
TOKENS = ("What", "is", "You", "may", "ask", "calc", "first", *" *?().=\n0123456789")
ASKS = 0.15


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer(TOKENS, TOKEN, 96)
    model = build_model(tokenizer, 64, 256, 2)
    model.save_pretrained(args.out / "untrained")
    tokenizer.save_pretrained(args.out / "untrained")
    rows = list(replies(random.Random(args.seed)))
    (args.out / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    weights = sum(weight.numel() for weight in model.parameters())
    print(f"{len(rows):,} replies and an untrained model of {weights:,} parameters are in {args.out}")


def replies(rng: random.Random) -> Iterator[dict[str, str]]:
    """Yield, for each training prompt, a call or a guess, and what to reply to the calculator's answer."""
    prompts = CalculatorTask().prompts()
    for prompt in prompts:
        call = f"calc({prompt.text.split()[2].rstrip('?')})"
        guess = rng.choice(prompts).answer
        yield {"prompt": prompt.text, "response": call if rng.random() < ASKS else guess}
        yield {"prompt": f"{prompt.text}{call}<eos> = {prompt.answer}\n", "response": prompt.answer}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the guesses")
    return parser.parse_args()


if __name__ == "__main__":
    main()
