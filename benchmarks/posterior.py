"""Coverage of several right answers, on a task whose 125 responses can be enumerated.

    python -m benchmarks.posterior [--seeds 5] [--beta 0.2]

Eight responses to each of two prompts are right: four have reward 1, four 0.75. The optimum of KL-regularised RL is
known (Eq. 2 of the paper): pi* ~ pi_ref exp(r / beta). The policy is a table of logits, one row for each prefix of a
response, trained by tba's objectives on data that is 0 or 64 steps stale. For each objective the table has the distance
from pi*, the right answers found and the entropy, at the first step with nine tenths of the expected reward of pi*, and
after the last step. All are computed from exact probabilities.

An answer is found if it has at least half of its probability under pi*.

Shape suffixes: P prompts, Y responses, T tokens, K samples of a prompt.
"""

import argparse
import itertools
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import print_table
from benchmarks.off_policy.setting import objective_section
from tba.trainer.objectives.from_config import make_objective
from tba.trainer.objectives.responses import Responses, Totals

VOCABULARY, LENGTH, PROMPTS, SAMPLES = 5, 3, 2, 32
STEPS, RATE, MEASURE_EVERY = 1000, 2e-2, 5
RESPONSES = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
RIGHT = (1.0,) * 4 + (0.75,) * 4
# Of the expected reward of the optimum: where objectives are compared at equal reward.
TARGET = 0.9
OBJECTIVES = (
    "tb",
    "tb_stale",
    "tba_prime:mean_kl=sampler",
    "tba_prime:mean_kl=policy",
    "rloo",
    "rloo:kl=reference",
    "ppo_clip",
    "dr_grpo",
    "dr_grpo:kl=reference",
)
STALENESS = (0, 64)


@dataclass(frozen=True, slots=True)
class Coverage:
    """How a policy covers the responses; means over the prompts. `entropy` is in nats."""

    reward: float
    variation: float
    found: float
    entropy: float


def prefix_rows() -> Tensor:
    """Return the row of the table from which each token is drawn: [Y, T]. Shorter prefixes come first."""
    prefixes = [prefix for length in range(LENGTH) for prefix in itertools.product(range(VOCABULARY), repeat=length)]
    row_of = {prefix: row for row, prefix in enumerate(prefixes)}
    return torch.tensor([[row_of[response[:token]] for token in range(LENGTH)] for response in RESPONSES])


PREFIX_YT, TOKEN_YT = prefix_rows(), torch.tensor(RESPONSES)


def token_logprobs(logits: Tensor) -> Tensor:
    """Return the log-probability of each token of each response: [P, Y, T]. `logits` has P tables."""
    return logits.log_softmax(dim=2)[:, PREFIX_YT, TOKEN_YT]


def probabilities(logprob_PYT: Tensor) -> np.ndarray:
    """Return the probability of each response: [P, Y]."""
    found_PY: np.ndarray = logprob_PYT.detach().sum(dim=2).exp().numpy()
    return found_PY / found_PY.sum(axis=1, keepdims=True)


def make_rewards(rng: np.random.Generator) -> np.ndarray:
    """Return the rewards: [P, Y], with the right answers at random places."""
    reward_PY = np.zeros((PROMPTS, len(RESPONSES)))
    for row in reward_PY:
        row[rng.choice(len(RESPONSES), len(RIGHT), replace=False)] = RIGHT
    return reward_PY


def coverage(policy_PY: np.ndarray, optimum_PY: np.ndarray, reward_PY: np.ndarray) -> Coverage:
    found_PY = (reward_PY > 0) & (policy_PY >= optimum_PY / 2)
    return Coverage(
        reward=float((policy_PY * reward_PY).sum(axis=1).mean()),
        variation=float(0.5 * np.abs(policy_PY - optimum_PY).sum(axis=1).mean()),
        found=float(found_PY.sum(axis=1).mean()),
        entropy=float(-(policy_PY * np.log(np.maximum(policy_PY, 1e-300))).sum(axis=1).mean()),
    )


def run(name: str, staleness: int, seed: int, beta: float) -> tuple[Coverage | None, Coverage, Coverage]:
    """Train once. Returns the coverage at equal reward (None if never reached), at the end, and of the optimum."""
    objective = make_objective(objective_section(name), longest_response=LENGTH)
    rng = np.random.default_rng(seed)
    reward_PY = make_rewards(rng)
    rows, prefixes = PROMPTS * SAMPLES, int(PREFIX_YT.max()) + 1
    logits = torch.from_numpy(rng.normal(0.0, 0.5, (PROMPTS, prefixes, VOCABULARY))).requires_grad_()
    reference_PYT = token_logprobs(logits).detach()
    optimum_PY = probabilities(reference_PYT) * np.exp(reward_PY / beta)
    optimum_PY /= optimum_PY.sum(axis=1, keepdims=True)
    best = coverage(optimum_PY, optimum_PY, reward_PY)
    log_z_P1 = torch.zeros(PROMPTS, 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits, log_z_P1], lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    past, equal = deque([logits.detach().clone()], maxlen=staleness + 1), None

    def measure() -> Coverage:
        return coverage(probabilities(token_logprobs(past[-1])), optimum_PY, reward_PY)

    for step in range(1, STEPS + 1):
        own_PYT, sampler_PYT = token_logprobs(logits), token_logprobs(past[0])
        drawn = [rng.choice(len(RESPONSES), SAMPLES, p=chances) for chances in probabilities(sampler_PYT)]
        pick = torch.arange(PROMPTS)[:, None], torch.from_numpy(np.stack(drawn))
        responses = Responses(
            logprob_R=own_PYT[pick].flatten(),
            sampled_logprob_R=sampler_PYT[pick].flatten(),
            mask_R=torch.ones(rows * LENGTH, dtype=torch.bool),
            lengths=[LENGTH] * rows,
            reward_bK=torch.from_numpy(reward_PY)[pick],
            reference_bK=reference_PYT[pick].sum(dim=2),
            staleness_bK=torch.full((PROMPTS, SAMPLES), float(staleness), dtype=torch.float64),
            totals=Totals(prompts=PROMPTS, rows=rows, tokens=rows * LENGTH),
            log_z_bK=log_z_P1,
        )
        optimizer.zero_grad()
        objective.loss(responses, beta).backward()
        optimizer.step()
        schedule.step()
        past.append(logits.detach().clone())
        if equal is None and step % MEASURE_EVERY == 0:
            now = measure()
            equal = now if now.reward >= TARGET * best.reward else None
    return equal, measure(), best


def cells(runs: list[Coverage]) -> list[str]:
    """Return mean reward, total variation, answers found and entropy of some runs."""
    if not runs:
        return ["not reached", "", "", ""]
    columns = np.array([[one.reward, one.variation, one.found, one.entropy] for one in runs])
    return [f"{value:.{digits}f}" for value, digits in zip(columns.mean(axis=0), (3, 3, 1, 2), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--objectives", nargs="+", default=OBJECTIVES, help="NAME or NAME:KEY=VALUE,...")
    parser.add_argument("--beta", type=float, default=0.2)
    parser.add_argument("--staleness", type=int, nargs="+", default=STALENESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    started, rows, optima = time.process_time(), [], []
    for staleness, objective in itertools.product(options.staleness, options.objectives):
        found = [run(objective, staleness, seed, options.beta) for seed in range(options.seeds)]
        optima += [best for _, _, best in found]
        reached = [equal for equal, _, _ in found if equal is not None]
        ends = cells([end for _, end, _ in found])
        rows.append([objective, staleness, f"{len(reached)} of {len(found)}", *cells(reached), *ends])
        print(*rows[-1], flush=True)
    rows.append(["pi*", "", "", "", "", "", "", *cells(optima)])
    measured = ["reward", "TV", f"found of {len(RIGHT)}", "entropy"]
    title = f"coverage at {TARGET:.0%} of the reward of pi*, then after {STEPS} steps; {options.seeds} seeds"
    print_table(title, ["objective", "D", "reached", *measured, *measured], rows)
    print(f"{(time.process_time() - started) / 60:.1f} CPU minutes")


if __name__ == "__main__":
    main()
