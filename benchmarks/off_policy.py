"""Reward over optimiser steps with data of a fixed staleness, for several objectives.

    python -m benchmarks.off_policy [--workers 2] [--seeds 5]

The whole batch of step s is sampled with the weights of step max(0, s - D), for D = 0, 4, 16 and 64, by a queue of D
batches. The model is examples/arithmetic/model, the task its additions and subtractions; `Learner` makes the updates,
as in a run. The measure is the expected reward of the policy on the held-out problems at temperature 1: the probability
of the right answer and its end token, which has no sampling noise.

Each objective has two learning rates: the best of three on fresh data, used at every staleness, and the best of three
at the highest staleness, used there once more. The best rate is that with the highest final reward of one run, with a
seed that is not used again. All other settings are the same for all objectives.

Results are appended to docs/images/off_policy.jsonl, and runs that are there already are not repeated. Plot and tables
are made from that file.
"""

import argparse
import itertools
import json
import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.table import print_table
from tba.common.config import ObjectiveSection, TrainSection
from tba.searcher.tasks.arithmetic import ArithmeticTask
from tba.searcher.tasks.task import Prompt
from tba.trainer.batch.batch import Row, TrainBatch
from tba.trainer.model.scorer import Scorer, load_model, sequence_logprobs
from tba.trainer.objectives.from_config import make_objective
from tba.trainer.step.learner import Learner

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "examples" / "arithmetic" / "model"
RESULTS = ROOT / "docs" / "images" / "off_policy.jsonl"
PICTURE = RESULTS.with_suffix(".png")
OBJECTIVES = ("tb", "tba_prime", "dr_grpo", "ppo_clip", "online_dpo")
STALENESS = (0, 4, 16, 64)
FRESH, OLDEST = STALENESS[0], STALENESS[-1]
RATES = {FRESH: (3e-5, 1e-4, 3e-4), OLDEST: (1e-5, 3e-5, 1e-4)}
SWEEP_SEED = 1000
STEPS, PROMPTS, SAMPLES, LONGEST, BETA = 128, 8, 8, 5, 0.1
MEASURE_EVERY = 8


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings of one run."""

    objective: str
    staleness: int
    rate: float
    seed: int


class Rollouts:
    """Samples batches of random problems, at temperature 1 from the current weights."""

    def __init__(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self._policy = policy
        self._tokenizer = tokenizer
        self._problems = ArithmeticTask().prompts()
        self._choice = np.random.default_rng(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._ids = itertools.count()

    def batch(self, step: int, staleness: int) -> TrainBatch:
        """Return the batch of a step. Problems are drawn without replacement within a batch."""
        chosen = self._choice.choice(len(self._problems), PROMPTS, replace=False)
        problems = [self._problems[index] for index in chosen for _ in range(SAMPLES)]
        prompts = [self._tokenizer.encode(problem.text) for problem in problems]
        tokens_NT, logprobs_NT = sample(self._policy, torch.tensor(prompts), self._generator)
        rows, rewards = [], []
        for problem, prompt, tokens, logprobs in zip(
            problems, prompts, tokens_NT.tolist(), logprobs_NT.numpy(), strict=True
        ):
            response = until_end(tokens, self._tokenizer.eos_token_id)
            rewards.append(float(response == answer_ids(self._tokenizer, problem)))
            rows.append(make_row(next(self._ids), prompt, response, logprobs, on_policy=staleness == 0))
        shape = (PROMPTS, SAMPLES)
        return TrainBatch(
            step=step,
            rows=rows,
            reward_BK=torch.tensor(rewards, dtype=torch.float64).view(shape),
            reference_BK=torch.full(shape, torch.nan, dtype=torch.float64),
            staleness_BK=torch.full(shape, staleness, dtype=torch.float64),
        )


@torch.no_grad()
def sample(policy: PreTrainedModel, prompt_NT: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return LONGEST tokens after each prompt, and their log-probabilities. All prompts have the same length."""
    cache, fed_NT = None, prompt_NT
    tokens, logprobs = [], []
    for _ in range(LONGEST):
        output = policy(input_ids=fed_NT, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        logprob_NV = output.logits[:, -1].log_softmax(dim=1)
        fed_NT = torch.multinomial(logprob_NV.exp(), 1, generator=generator)
        tokens.append(fed_NT)
        logprobs.append(logprob_NV.gather(1, fed_NT))
    return torch.cat(tokens, dim=1), torch.cat(logprobs, dim=1)


def until_end(tokens: list[int], end: int) -> list[int]:
    """Cut a response after its end token, if it has one."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def answer_ids(tokenizer: PreTrainedTokenizerBase, problem: Prompt) -> list[int]:
    return [*tokenizer.encode(problem.answer), tokenizer.eos_token_id]


def make_row(
    id_: int, prompt: Sequence[int], response: Sequence[int], logprobs: np.ndarray, *, on_policy: bool = False
) -> Row:
    length = len(response)
    return Row(
        id=id_,
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        sampling_logprobs=logprobs[:length].astype(np.float32),
        loss_mask=np.ones(length, np.uint8),
        on_policy=on_policy,
    )


class Exam:
    """Measures the expected reward on the held-out problems."""

    def __init__(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._scorer = Scorer(policy, autocast=False)
        self._rows = [
            make_row(index, tokenizer.encode(problem.text), answer_ids(tokenizer, problem), np.zeros(LONGEST))
            for index, problem in enumerate(ArithmeticTask().held_out())
        ]

    @torch.no_grad()
    def reward(self) -> float:
        logprob_N = sequence_logprobs(self._scorer.score(self._rows).logprob_R, self._rows)
        return float(logprob_N.exp().mean())


def stale_batches(rollouts: Rollouts, staleness: int) -> Iterator[TrainBatch]:
    """Yield the batch of each step. The caller makes the update before it asks for the next one."""
    queue = deque(rollouts.batch(step, step) for step in range(min(staleness, STEPS)))
    for step in range(STEPS):
        if len(queue) + step < STEPS:
            queue.append(rollouts.batch(step + staleness, staleness))
        yield queue.popleft()


def run(setting: Setting) -> dict[str, object]:
    """Train once. The curve is the expected reward before the first step and after every MEASURE_EVERY steps."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    policy, reference = (load_model(MODEL, torch.device("cpu")) for _ in range(2))
    train = TrainSection(
        steps=STEPS, prompts_per_step=PROMPTS, samples_per_prompt=SAMPLES, learning_rate=setting.rate,
        schedule="constant", warmup_steps=5, beta=BETA, beta_final=BETA,
    )  # fmt: skip
    objective = make_objective(ObjectiveSection(name=setting.objective), longest_response=LONGEST)
    learner = Learner(policy, reference, train, objective, autocast=False)
    exam = Exam(policy, tokenizer)
    curve = [exam.reward()]
    for batch in stale_batches(Rollouts(policy, tokenizer, setting.seed), setting.staleness):
        learner.step(batch)
        if learner.steps_done % MEASURE_EVERY == 0:
            curve.append(exam.reward())
    return {**asdict(setting), "curve": [round(value, 4) for value in curve]}


# ---------------------------------------------------------------- runs


def load() -> dict[Setting, list[float]]:
    """Return the curves that are in the file."""
    if not RESULTS.exists():
        return {}
    rows = map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines())
    return {Setting(**row): curve for row in rows if (curve := row.pop("curve"))}


def complete(settings: Iterable[Setting], workers: int) -> dict[Setting, list[float]]:
    """Run the settings that are not in the file yet. Returns all curves."""
    done = load()
    missing = [setting for setting in settings if setting not in done]
    if not missing:
        return done
    with multiprocessing.get_context("spawn").Pool(workers) as pool, RESULTS.open("a", encoding="utf-8") as file:
        for number, result in enumerate(pool.imap_unordered(run, missing), start=1):
            file.write(json.dumps(result) + "\n")
            file.flush()
            print(f"{number} of {len(missing)}: {result}", flush=True)
    return load()


def sweep() -> list[Setting]:
    return [
        Setting(name, staleness, rate, SWEEP_SEED)
        for name in OBJECTIVES
        for staleness, rates in RATES.items()
        for rate in rates
    ]


def columns(curves: dict[Setting, list[float]], objective: str) -> list[tuple[int, float]]:
    """Return staleness and learning rate of each run of an objective; the last one has its own rate."""
    best = {
        staleness: max(rates, key=lambda rate: curves[Setting(objective, staleness, rate, SWEEP_SEED)][-1])
        for staleness, rates in RATES.items()
    }
    return [*((staleness, best[FRESH]) for staleness in STALENESS), (OLDEST, best[OLDEST])]


def experiment(curves: dict[Setting, list[float]], seeds: int) -> list[Setting]:
    """Return all settings, seed by seed, so that an interrupted file has complete seeds."""
    settings = [
        Setting(name, *column, seed) for seed in range(seeds) for name in OBJECTIVES for column in columns(curves, name)
    ]
    return list(dict.fromkeys(settings))


# ---------------------------------------------------------------- results


def of_seeds(curves: dict[Setting, list[float]], seeds: int, objective: str, staleness: int, rate: float) -> np.ndarray:
    """Return the curves of all seeds: [seeds, measurements]."""
    return np.array([curves[Setting(objective, staleness, rate, seed)] for seed in range(seeds)])


def report(curves: dict[Setting, list[float]], seeds: int) -> None:
    """Print the final reward, mean and standard deviation over seeds, and in brackets the mean over the whole curve."""
    start = next(iter(curves.values()))[0]
    rows = []
    for name in OBJECTIVES:
        settings = columns(curves, name)
        cells = [cell(of_seeds(curves, seeds, name, staleness, rate)) for staleness, rate in settings]
        rows.append((name, f"{settings[0][1]:.0e}", *cells, f"{settings[-1][1]:.0e}"))
    title = f"expected reward after {STEPS} steps (mean over the steps); {start:.3f} before the first; {seeds} seeds"
    at = [f"D = {staleness}" for staleness in STALENESS]
    print_table(title, ["objective", "rate", *at, f"D = {OLDEST}, own rate", "own rate"], rows)


def cell(curve_SM: np.ndarray) -> str:
    """Format the curves of S seeds and M measurements."""
    final = curve_SM[:, -1]
    spread = final.std(ddof=1) if len(final) > 1 else np.nan
    return f"{final.mean():.3f} ± {spread:.3f} ({curve_SM.mean():.3f})"


def draw(curves: dict[Setting, list[float]], seeds: int) -> None:
    """Plot one panel per column of the table, one line per objective, a band of one standard deviation over seeds."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    titles = [*(f"staleness {staleness}" for staleness in STALENESS), f"staleness {OLDEST}, own rate"]
    figure, axes = plt.subplots(1, len(titles), figsize=(15, 3.6), sharex=True, sharey=True)
    steps = np.arange(0, STEPS + 1, MEASURE_EVERY)
    for column, (axis, title) in enumerate(zip(axes, titles, strict=True)):
        for name in OBJECTIVES:
            values = of_seeds(curves, seeds, name, *columns(curves, name)[column])
            mean, spread = values.mean(axis=0), values.std(axis=0)
            axis.plot(steps, mean, label=name)
            axis.fill_between(steps, mean - spread, mean + spread, alpha=0.15)
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8, loc="lower right")
    axes[0].set_ylabel("expected reward, held-out")
    figure.supxlabel("optimiser step", fontsize=10)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    curves = complete(sweep(), options.workers)
    curves = complete(experiment(curves, options.seeds), options.workers)
    report(curves, options.seeds)
    draw(curves, options.seeds)


if __name__ == "__main__":
    main()
