"""Preference tuning along the front of reward against KL, with a reward model and a gold model that are made here.

    python -m benchmarks.preference [--seeds 5]

Responses are strings of 4 to 8 digits. The utility of one is twice its number of rises (a digit above the one before),
less its length; of two responses one is preferred with the probability of Bradley and Terry. The reward model is a
small Llama that was trained on 512 such pairs, the gold model one of 16,384 others. A policy that writes random digits
is trained by `tb` on the reward model's logits, with data that is up to 4 steps stale. For each beta the table has, for
responses to held-out prompts at temperature 1: the KL divergence from the first policy in nats per response, the
reward, and the win rate of the gold model against responses of the first policy to the same prompts, where ties count
half.
"""

import argparse
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks.off_policy.sampling import Response
from benchmarks.off_policy.setting import REPORT_SEEDS
from benchmarks.off_policy.training import as_batch
from benchmarks.small_models import (
    CPU,
    LabelledTexts,
    make_classifier,
    make_learner,
    make_policy,
    sample,
    scorer_of,
)
from benchmarks.table import print_table
from tba.trainer.model.scorer import load_model

LONGEST = 9
STEPS, SYNC_EVERY, PROMPTS, SAMPLES, RATE = 80, 5, 8, 8, 1e-3
BETAS = (1.0, 0.3, 0.1)
MEASURED_AT = (20, 40, 80)
HELD_OUT = 256
REWARD_PAIRS, GOLD_PAIRS = 512, 16_384


@dataclass(frozen=True, slots=True)
class Point:
    """Of responses to the held-out prompts: nats from the first policy, reward, gold win rate, length in tokens."""

    step: int
    kl: float
    reward: float
    wins: float
    tokens: float


def utility(response: str) -> float:
    """Return the hidden preference: twice the number of rises, less the length."""
    rises = sum(one < other for one, other in itertools.pairwise(response))
    return 2.0 * rises - len(response)


def any_digits(rng: random.Random) -> str:
    return "".join(rng.choices("0123456789", k=rng.randint(4, 8)))


def any_prompt(rng: random.Random) -> str:
    return f"{rng.randint(0, 999):03}="


def demonstrations(rng: random.Random) -> Iterator[list[tuple[str, str]]]:
    """Yield batches of what the policy writes before training."""
    while True:
        yield [(any_prompt(rng), any_digits(rng)) for _ in range(256)]


def comparisons(pairs: int, rng: random.Random) -> Iterator[LabelledTexts]:
    """Yield batches of 64 of `pairs` comparisons, the preferred responses first."""
    known = []
    for _ in range(pairs):
        prompt, one, other = any_prompt(rng), any_digits(rng), any_digits(rng)
        chance = 1 / (1 + np.exp(utility(other) - utility(one)))
        known.append((prompt + one, prompt + other) if rng.random() < chance else (prompt + other, prompt + one))
    while True:
        better, worse = zip(*rng.sample(known, 64), strict=True)
        yield [*better, *worse], _bradley_terry


def _bradley_terry(logits: Tensor) -> Tensor:
    better, worse = logits.chunk(2)
    return -logsigmoid(better - worse).mean()


class Bench:
    """What runs share: the first policy and its scores to compete with, and the two classifiers."""

    def __init__(self) -> None:
        rng = random.Random(0)
        self.policy = make_policy("preference-policy", demonstrations(rng), 200)
        self.reward = scorer_of(make_classifier("preference-reward", comparisons(REWARD_PAIRS, rng), 100))
        self.gold = scorer_of(make_classifier("preference-gold", comparisons(GOLD_PAIRS, rng), 500))
        self._tokenizer = AutoTokenizer.from_pretrained(self.policy)
        self._first = load_model(self.policy, CPU)
        texts = [f"{number:03}=" for number in range(1000)]
        random.Random(1).shuffle(texts)
        self._held_out, self._training = texts[:HELD_OUT], texts[HELD_OUT:]
        self._gold_of_references = self._scores(self.gold, self._respond(self._first, self._held_out, 1))

    def agreement(self, score: Callable[[Sequence[tuple[str, str]]], list[float]]) -> float:
        """Return the share of 1,000 fresh pairs that a classifier orders as the hidden preference does."""
        rng = random.Random(2)
        pairs = [(any_prompt(rng), any_digits(rng), any_digits(rng)) for _ in range(1000)]
        pairs = [pair for pair in pairs if utility(pair[1]) != utility(pair[2])]
        one, other = (np.array(score([(pair[0], pair[side]) for pair in pairs])) for side in (1, 2))
        truth = np.array([utility(pair[1]) > utility(pair[2]) for pair in pairs])
        return float(np.mean((one > other) == truth))

    def run(self, beta: float, seed: int) -> list[Point]:
        """Train once. Returns the measurements."""
        learner = make_learner(self.policy, "tb", rate=RATE, beta=beta, steps=STEPS, longest=LONGEST)
        choice, found = np.random.default_rng(seed), []
        for step in range(STEPS):
            if step % SYNC_EVERY == 0:
                chosen = choice.choice(self._training, SYNC_EVERY * PROMPTS, replace=False)
                waiting = self._groups(learner.policy, chosen, seed * STEPS + step, step)
            learner.step(as_batch([waiting.pop() for _ in range(PROMPTS)], step))
            if step + 1 in MEASURED_AT:
                found.append(self.measure(learner.policy, step + 1))
        return found

    def measure(self, policy: PreTrainedModel, step: int) -> Point:
        """Measure a policy by one response to each held-out prompt, with the same seed each time."""
        responses = self._respond(policy, self._held_out, 0)
        gold, references = np.array(self._scores(self.gold, responses)), np.array(self._gold_of_references)
        ratios = [one.logprobs.sum() - found for one, found in zip(responses, self._logprobs(responses), strict=True)]
        return Point(
            step=step,
            kl=float(np.mean(ratios)),
            reward=float(np.mean(self._scores(self.reward, responses))),
            wins=float(np.mean((gold > references) + 0.5 * (gold == references))),
            tokens=float(np.mean([len(one.tokens) for one in responses])),
        )

    def _groups(self, policy: PreTrainedModel, texts: Iterable[str], seed: int, step: int) -> list[list[Response]]:
        responses = self._respond(policy, [text for text in texts for _ in range(SAMPLES)], seed, step)
        rewards = self._scores(self.reward, responses)
        rewarded = [replace(one, reward=reward) for one, reward in zip(responses, rewards, strict=True)]
        return [rewarded[start : start + SAMPLES] for start in range(0, len(rewarded), SAMPLES)]

    def _respond(self, policy: PreTrainedModel, texts: Sequence[str], seed: int, step: int = 0) -> list[Response]:
        prompts = [self._tokenizer.encode(text) for text in texts]
        generator = torch.Generator().manual_seed(seed)
        return sample(policy, prompts, LONGEST, self._tokenizer.eos_token_id, generator, step)

    def _scores(
        self, score: Callable[[Sequence[tuple[str, str]]], list[float]], responses: Sequence[Response]
    ) -> list[float]:
        decode = self._tokenizer.decode
        return score([(decode(one.problem.prompt), decode(one.tokens, skip_special_tokens=True)) for one in responses])

    @torch.no_grad()
    def _logprobs(self, responses: Sequence[Response]) -> list[float]:
        """Return the log-probability of each response under the first policy. Their prompts have the same length."""
        start = len(responses[0].problem.prompt)
        rows = [torch.tensor([*one.problem.prompt, *one.tokens]) for one in responses]
        ids_NT = torch.stack([pad(row, (0, start + LONGEST - len(row))) for row in rows])
        logprobs_NT = self._first(input_ids=ids_NT[:, :-1]).logits.log_softmax(dim=2).gather(2, ids_NT[:, 1:, None])
        return [
            float(row[start - 1 : start - 1 + len(one.tokens)].sum())
            for row, one in zip(logprobs_NT[..., 0], responses, strict=True)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=len(REPORT_SEEDS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    started, bench = time.process_time(), Bench()
    agreed = [f"{bench.agreement(score):.0%}" for score in (bench.reward, bench.gold)]
    first = bench.measure(load_model(bench.policy, CPU), 0)
    print(f"reward model and gold model agree with the preference on {agreed[0]} and {agreed[1]} of pairs")
    rows = [["", 0, f"{first.kl:.2f}", f"{first.reward:.2f}", f"{first.wins:.3f}", f"{first.tokens:.1f}"]]
    for beta in BETAS:
        runs = [bench.run(beta, seed) for seed in REPORT_SEEDS[: options.seeds]]
        for points in zip(*runs, strict=True):
            columns = [[getattr(point, name) for point in points] for name in ("kl", "reward", "wins", "tokens")]
            digits = (2, 2, 3, 1)
            cells = [
                f"{np.mean(column):.{n}f} ± {np.std(column, ddof=1) if len(column) > 1 else 0:.{n}f}"
                for column, n in zip(columns, digits, strict=True)
            ]
            rows.append([f"{beta:g}", points[0].step, *cells])
            print(*rows[-1], flush=True)
    headings = ["beta", "step", "KL, nats", "reward", "gold win rate", "tokens"]
    print_table(f"reward and win rate against KL; {options.seeds} seeds", headings, rows)
    print(f"{(time.process_time() - started) / 60:.1f} CPU minutes")


if __name__ == "__main__":
    main()
