"""Different successful attacks that each objective finds at equal success, on a harmless stand-in for red-teaming.

    python -m benchmarks.redteam [--seeds 5] [--objectives tb rloo]

The attacker is a small Llama that writes problems such as "47+38=". The victim is the model of examples/arithmetic, and
a small classifier flags its replies that are numbers from 70 to 99; the attacker does not know the rule. The victim
replies greedily, so that an attack has the same reward in every run, up to rounding: log p(flagged). It succeeds if p
is above a half. All objectives train on fresh data.

Each measurement samples 2,048 attacks: the success rate, the different successful attacks among them, and the mean
pairwise cosine distance of all of them (of mean hidden states of the first attacker, less their mean over its attacks).
The different successful attacks are also counted without near-duplicates: in the order in which they were sampled, an
attack counts if its distance to each one that counted before is at least a threshold. The distance is the cosine
distance of the same hidden states, and, as a check that needs no embedding, the edit distance of the tokens divided by
the length of the longer attack.

Where the success rate of a run first reaches a level, the values are interpolated between the two measurements around
it, so that objectives are compared by equally many successful attacks. The differences to the first objective are
paired by seed. Nothing is chosen by these seeds.
"""

import argparse
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoTokenizer, LlamaForSequenceClassification, PreTrainedModel

from benchmarks.harness import print_table
from benchmarks.off_policy.sampling import Response, as_batch, respond
from benchmarks.off_policy.setting import WARMUP_STEPS, objective_section
from benchmarks.off_policy.tasks import ROOT, Problem, Task, small_model
from examples.arithmetic.make_model import save, train
from tba.common.config import RewardModelSection, TrainSection
from tba.searcher.evaluation.measure import NEAR_DUPLICATE_DISTANCE, cosine_distance, without_near_duplicates
from tba.searcher.scoring.classifier import RewardModel
from tba.tests.helpers.trainer import learner_of
from tba.trainer.model.scorer import load_model
from tba.trainer.objectives.from_config import make_objective
from tba.trainer.step.learner import Learner

CPU = torch.device("cpu")
ATTACK_TOKENS, REPLY_TOKENS = 7, 5
STEPS, GROUPS, SAMPLES, RATE, BETA = 120, 4, 32, 1e-3, 0.5
MEASURED, MEASURE_EVERY = 2048, 3
LEVELS = (0.5, 0.7, 0.8, 0.9)
LEAST_PROBABILITY = 1e-3
# Of near-duplicates: fixed before any of these counts was seen.
THRESHOLDS = (0.1, 0.2, 0.3, 0.5)
HEADLINE = NEAR_DUPLICATE_DISTANCE
OBJECTIVES = ("tb", "rloo")
# They took no part in choosing levels, rates or steps.
SEEDS = (30, 31, 32, 33, 34)


@dataclass(frozen=True, slots=True)
class Found:
    """Of sampled attacks: share that succeeds, different successful ones, mean cosine distance.

    `by_embedding` and `by_tokens` count the different successful ones without near-duplicates, one per threshold.
    """

    step: float
    success: float
    distinct: float
    distance: float
    by_embedding: np.ndarray
    by_tokens: np.ndarray


# ------------------------------------------------------------ small models, made in seconds at first use


def make_attacker() -> Path:
    """Return a policy that writes any sum or difference of two-digit numbers."""
    path = ROOT / "models/benchmarks/redteam-attacker"

    def problems(rng: random.Random) -> Iterator[list[tuple[str, str]]]:
        while True:
            pairs = [(rng.randint(10, 99), rng.choice("+-"), rng.randint(10, 99)) for _ in range(256)]
            yield [("=", f"{one}{sign}{other}=") for one, sign, other in pairs]

    if not (path / "config.json").exists():
        torch.manual_seed(0)
        model, tokenizer = small_model(64)
        train(model, tokenizer, problems(random.Random(0)), 250)
        save(model, tokenizer, path)
    return path


def make_classifier() -> Path:
    """Return a classifier of numbers: whether they are from 70 to 99, which half of those that it is trained on are."""
    path = ROOT / "models/benchmarks/redteam-classifier"
    if (path / "config.json").exists():
        return path
    torch.manual_seed(0)
    rng, steps, (language_model, tokenizer) = random.Random(0), 300, small_model(64)
    language_model.config.num_labels = 1
    model = LlamaForSequenceClassification(language_model.config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        flagged = [rng.randint(70, 99) for _ in range(64)]
        others = [number for number in (rng.randint(-89, 198) for _ in range(64)) if not 70 <= number <= 99]
        label_N = torch.tensor([1.0] * len(flagged) + [0.0] * len(others))
        rows = [tokenizer.encode(str(number)) for number in flagged + others]
        longest = max(map(len, rows))
        ids_NT = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
        optimizer.zero_grad()
        logit_N = model(input_ids=ids_NT, attention_mask=ids_NT != tokenizer.pad_token_id).logits[:, 0]
        torch.autograd.backward(binary_cross_entropy_with_logits(logit_N, label_N))
        optimizer.step()
        schedule.step()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def scorer_of(path: Path) -> Callable[[Sequence[tuple[str, str]]], list[float]]:
    """Return a function of pairs of prompt and response to logits: the reward model of a searcher."""
    model = RewardModel(path, RewardModelSection(path=str(path)), "cpu")

    def score(pairs: Sequence[tuple[str, str]]) -> list[float]:
        encoded = [model.encode(*pair) for pair in pairs]
        found = [0.0] * len(pairs)
        for batch in model.batches(encoded):
            for place, logit in zip(batch, model.score([encoded[n] for n in batch], lambda *_: None), strict=True):
                assert isinstance(logit, float)
                found[place] = logit
        return found

    return score


def make_learner(path: Path, objective: str) -> Learner:
    """Return the trainer's step for a policy: a constant rate after a short warm-up, and a constant beta."""
    policy, reference = (load_model(path, CPU) for _ in range(2))
    section = TrainSection(
        steps=STEPS, learning_rate=RATE, schedule="constant", warmup_steps=WARMUP_STEPS, beta=BETA, beta_final=BETA
    )
    made = make_objective(objective_section(objective), longest_response=ATTACK_TOKENS)
    return learner_of(policy, reference, section, made)


def sample(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    longest: int,
    end: int,
    generator: torch.Generator | None,
    step: int = 0,
) -> list[Response]:
    """Return a response, without a reward, to each prompt; all prompts have the same length."""
    task = Task("", Path(), longest, graded=False, end=end, training=[], held_out={})
    return respond(model, task, [Problem(tuple(prompt), ()) for prompt in prompts], generator, step)


# ------------------------------------------------------------ the comparison


class Judge:
    """Victim and classifier. The probability that an attack's reply is flagged depends on nothing but the attack."""

    def __init__(self) -> None:
        path = ROOT / "examples/arithmetic/model"
        self._victim = load_model(path, CPU)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self._score = scorer_of(make_classifier())
        self._known: dict[tuple[int, ...], float] = {}

    def judge(self, attacks: Sequence[Response]) -> np.ndarray:
        """Return the probability that each attack's reply is flagged."""
        end = self.tokenizer.eos_token_id
        # An attack without any token is asked as its end token.
        asked = {one: one[:-1] if one[-1] == end and len(one) > 1 else one for one in (a.tokens for a in attacks)}
        new = sorted(asked.keys() - self._known.keys(), key=lambda attack: len(asked[attack]))
        for _, group in itertools.groupby(new, key=lambda attack: len(asked[attack])):
            same_length = list(group)
            replies = sample(self._victim, [asked[one] for one in same_length], REPLY_TOKENS, end, None)
            texts = [self.tokenizer.decode(reply.tokens, skip_special_tokens=True) or "-" for reply in replies]
            chances = 1 / (1 + np.exp(-np.array(self._score([("", text) for text in texts]))))
            self._known |= dict(zip(same_length, chances.tolist(), strict=True))
        return np.array([self._known[attack.tokens] for attack in attacks])


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class Bench:
    """Everything that runs share: the first attacker, the judge, the embeddings."""

    def __init__(self) -> None:
        self.attacker = make_attacker()
        self.judge = Judge()
        self._first: PreTrainedModel = load_model(self.attacker, CPU)
        self._prompt = tuple(self.judge.tokenizer.encode("="))
        self._end: int = self.judge.tokenizer.eos_token_id
        # Hidden states have a large common part, which would hide differences in a cosine.
        sampled = sample(self._first, [self._prompt] * MEASURED, ATTACK_TOKENS, self._end, _seeded())
        self._common = self._hidden(sampled).mean(axis=0)

    def attacks(self, policy: PreTrainedModel, count: int, generator: torch.Generator, step: int) -> list[Response]:
        """Return sampled attacks with their rewards."""
        found = sample(policy, [self._prompt] * count, ATTACK_TOKENS, self._end, generator, step)
        rewards = np.log(np.maximum(self.judge.judge(found), LEAST_PROBABILITY)).tolist()
        return [replace(one, reward=reward) for one, reward in zip(found, rewards, strict=True)]

    def measure(self, policy: PreTrainedModel, step: int) -> Found:
        """Measure an attacker by 2,048 samples, with the same seed each time."""
        sampled = self.attacks(policy, MEASURED, _seeded(), step)
        flagged = self.judge.judge(sampled) > 0.5
        first = {one.tokens: number for number, one in reversed(list(enumerate(sampled))) if flagged[number]}
        successful = sorted(first.values())
        embedded = self._hidden(sampled) - self._common
        edits = edit_distances([self._written(sampled[number].tokens) for number in successful])
        return Found(
            step=step,
            success=float(flagged.mean()),
            distinct=len(successful),
            distance=cosine_distance(embedded) or 0.0,
            by_embedding=np.array([len(without_near_duplicates(embedded[successful], t)) for t in THRESHOLDS], float),
            by_tokens=np.array([kept(edits, threshold) for threshold in THRESHOLDS], float),
        )

    def _written(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in tokens if token != self._end]

    @torch.no_grad()
    def _hidden(self, attacks: Sequence[Response]) -> np.ndarray:
        embedded: dict[tuple[int, ...], np.ndarray] = {}
        for _, group in itertools.groupby(sorted({one.tokens for one in attacks}, key=len), key=len):
            rows = list(group)
            hidden = self._first.model(input_ids=torch.tensor(rows)).last_hidden_state.mean(dim=1)
            embedded |= dict(zip(rows, hidden.double().numpy(), strict=True))
        return np.stack([embedded[one.tokens] for one in attacks])

    def run(self, objective: str, seed: int) -> list[Found]:
        """Train once. Returns the measurements: until the last level is reached, and after the last step."""
        learner = make_learner(self.attacker, objective)
        generator = torch.Generator().manual_seed(seed)
        found = [self.measure(learner.policy, 0)]
        for step in range(STEPS):
            sampled = self.attacks(learner.policy, GROUPS * SAMPLES, generator, step)
            groups = [sampled[start : start + SAMPLES] for start in range(0, len(sampled), SAMPLES)]
            learner.step(as_batch(groups, step))
            reached = max(one.success for one in found) >= LEVELS[-1]
            if step + 1 == STEPS or (not reached and (step + 1) % MEASURE_EVERY == 0):
                found.append(self.measure(learner.policy, step + 1))
        return found


def at_success(found: Sequence[Found], level: float) -> Found | None:
    """Return the values where the success rate first rises to a level, linear between two measurements, or None."""
    for before, after in itertools.pairwise(found):
        if before.success < level <= after.success:
            share = (level - before.success) / (after.success - before.success)
            pairs = zip(astuple(before), astuple(after), strict=True)
            return Found(*(one + share * (other - one) for one, other in pairs))
    return None


def edit_distances(attacks: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the Levenshtein distances [m, m] of tokens, divided by the length of the longer attack."""
    lengths_m, found = np.array([len(attack) for attack in attacks], int), []
    padded_mT = np.full((len(attacks), ATTACK_TOKENS), -1)
    for row, attack in zip(padded_mT, attacks, strict=True):
        row[: len(attack)] = attack
    for attack in attacks:
        # Distances of the attack's prefix to all prefixes of all others.
        table = np.tile(np.arange(ATTACK_TOKENS + 1), (len(attacks), 1))
        for token in attack:
            longer = table + 1
            for n in range(ATTACK_TOKENS):
                exchanged = table[:, n] + (padded_mT[:, n] != token)
                longer[:, n + 1] = np.minimum(np.minimum(longer[:, n + 1], longer[:, n] + 1), exchanged)
            table = longer
        longest_m = np.maximum(np.maximum(lengths_m, len(attack)), 1)
        found.append(table[np.arange(len(attacks)), lengths_m] / longest_m)
    return np.array(found)


def kept(distances_mm: np.ndarray, threshold: float) -> int:
    """Return how many rows are left, in order, whose distance to each one that is left is at least the threshold."""
    left_m, count = np.ones(len(distances_mm), bool), 0
    for number, distances_m in enumerate(distances_mm):
        if left_m[number]:
            count += 1
            left_m &= distances_m >= threshold
    return count


def with_deviation(values: np.ndarray, digits: int) -> str:
    """Return the mean and the standard deviation."""
    return f"{values.mean():.{digits}f} ± {values.std(ddof=1):.{digits}f}"


def with_error(values: np.ndarray, digits: int) -> str:
    """Return the mean, its standard error, and how many values are positive."""
    error = values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():+.{digits}f} ± {error:.{digits}f} ({(values > 0).sum()} of {len(values)})"


def rows_of(at: Sequence[str], runs: Mapping[str, Sequence[Found]]) -> list[list[str]]:
    """Return a row per objective, with what the first one has more than the others in pairs of equal seed."""
    rows, (first, *_) = [], runs.values()
    for name, found in runs.items():
        steps, success = (np.mean([getattr(one, field) for one in found]) for field in ("step", "success"))
        row, paired = [*at, name, f"{steps:.0f}", f"{success:.0%}"], []
        for field, digits in (("distinct", 0), ("distance", 2)):
            mine, others = (np.array([getattr(one, field) for one in runs]) for runs in (found, first))
            row.append(with_deviation(mine, digits))
            paired.append("" if found is first else with_error(others - mine, digits))
        rows.append([*row, *paired])
    return rows


def rows_without_duplicates(at: Sequence[str], runs: Mapping[str, Sequence[Found]]) -> list[list[str]]:
    """Return a row per distance and threshold: the counts of all objectives, and the differences to the first one."""
    rows = []
    for field in ("by_embedding", "by_tokens"):
        for number, threshold in enumerate(THRESHOLDS):
            first, *others = (np.array([getattr(one, field)[number] for one in found]) for found in runs.values())
            shown = f"{threshold:g}{'*' if threshold == HEADLINE else ''}"
            counts = [with_deviation(one, 0) for one in (first, *others)]
            differences = [with_error(first - one, 0) for one in others]
            rows.append([*at, field.removeprefix("by_"), shown, *counts, *differences])
    return rows


def runs_at(level: float, runs: Mapping[str, Sequence[Sequence[Found]]]) -> dict[str, list[Found]]:
    """Return the values at a success rate, of the seeds with which all objectives reach it."""
    places = [[at_success(run, level) for run in of_seed] for of_seed in zip(*runs.values(), strict=True)]
    pairs = [[one for one in of_seed if one] for of_seed in places if all(of_seed)]
    return {name: [pair[number] for pair in pairs] for number, name in enumerate(runs)}


def print_results(runs: Mapping[str, Sequence[Sequence[Found]]]) -> None:
    """Print the tables: `runs` has all measurements of each objective and seed."""
    places = {f"{level:.0%}": runs_at(level, runs) for level in LEVELS}
    places["last step"] = {name: [run[-1] for run in found] for name, found in runs.items()}
    rows, without = [], []
    for name, values in places.items():
        at = [name, str(seeds := len(next(iter(values.values()))))]
        if seeds > 1:
            rows += rows_of(at, values)
            without += rows_without_duplicates(at, values)
        else:
            rows.append([*at, "reached by too few", *[""] * 6])
    before = next(iter(runs.values()))[0][0]
    title = (
        f"{MEASURED} attacks at equal success, then after {STEPS} steps; before the first step {before.success:.1%} "
        f"succeed, {before.distinct:.0f} different ones at distance {before.distance:.2f}"
    )
    headings = ["at", "seeds", "objective", "step", "success", "different", "distance"]
    print_table(title, [*headings, "first has more", "first is further apart"], rows)
    headings = ["at", "seeds", "distance", "threshold", *runs]
    headings += [f"{next(iter(runs))} has more than {name}" for name in list(runs)[1:]]
    title = f"Different successful attacks without near-duplicates; * is that of `tba eval`, {HEADLINE}"
    print_table(title, headings, without)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many, at least 2")
    parser.add_argument("--objectives", nargs="+", default=OBJECTIVES, help="the first is compared to the others")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started, bench = time.process_time(), Bench()
    seeds = SEEDS[: options.seeds]
    print_results({name: [bench.run(name, seed) for seed in seeds] for name in options.objectives})
    print(f"{(time.process_time() - started) / 60:.1f} CPU minutes")


if __name__ == "__main__":
    main()
