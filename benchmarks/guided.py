"""Guided starts (docs/tasks.md) on a reward that plain search hardly ever finds: combination locks.

    python -m benchmarks.guided [--seeds 5] [--guided 0 0.5 1] [--steps 400] [--objectives tb tb_stale] [--until 0]

A prompt is a lock with a code of six of eight letters, and only the whole code has a reward: of the first responses one
in 262,144 is right. The policy is a table: for each lock, and each number of letters that are right so far or one that
is wrong, it has a logit of each letter. Objective, masks, the choice of guided groups and the pass rates are those of a
run, on fresh data. Success is computed from the table; that of the optimum is 0.999. With `--until` the reward of the
first steps is another one, as in `task.phases`: the share of the letters before the first wrong one.

Shape suffixes: N responses, L letters of a code.
"""

import argparse
import itertools
import math
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from tba.buffer.service.curriculum import Curriculum
from tba.common.config import CurriculumSection, ObjectiveSection, SearchSection
from tba.common.wire.messages import Visit
from tba.searcher.pipeline import Exploration
from tba.trainer.objectives.from_config import make_objective
from tba.trainer.objectives.responses import Responses, Totals

LETTERS, LENGTH, LOCKS = 8, 6, 32
PROMPTS, SAMPLES, BETA, RATE = 8, 16, 0.05, 0.1


def run(seed: int, guided: float, steps: int, name: Any, until: int = 0) -> tuple[float, float]:
    """Train a table. Returns the mean success of plain responses, and how many of those in training were right."""
    rng = torch.Generator().manual_seed(seed)
    code_PL = torch.randint(LETTERS, (LOCKS, LENGTH), generator=rng)
    # The last state has a wrong letter.
    table = torch.zeros(LOCKS, LENGTH + 1, LETTERS, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([table], lr=RATE)
    objective = make_objective(ObjectiveSection(name=name), longest_response=LENGTH)
    exploration = Exploration(SearchSection(guided=guided), run_seed=seed, searcher="")
    curriculum = Curriculum(CurriculumSection(), guided=guided > 0)
    plain_right = 0
    for step in range(steps):
        epoch, first = divmod(step * PROMPTS, LOCKS)
        locks = range(first, first + PROMPTS)
        parts = [exploration.guide(Visit(0, epoch, str(lock), curriculum.guide(lock))) for lock in locks]
        given = torch.tensor([round((part or 0.0) * (LENGTH - 1)) for part in parts])
        lock_N, given_N = torch.tensor(locks).repeat_interleave(SAMPLES), given.repeat_interleave(SAMPLES)
        state_NL, letter_NL = sample(table.detach(), lock_N, code_PL[lock_N], given_N, rng)
        reward_bK = (letter_NL == code_PL[lock_N]).all(1).double().view(PROMPTS, SAMPLES)
        for lock, part, rewards in zip(locks, parts, reward_bK.tolist(), strict=True):
            curriculum.note(lock, [0] * SAMPLES, rewards, guided=part is not None)
            plain_right += 0 if part is not None else int(sum(rewards))
        if step < until:
            reward_bK = (letter_NL == code_PL[lock_N]).double().cumprod(1).mean(1).view(PROMPTS, SAMPLES)
        logprob_R = table[lock_N[:, None], state_NL].log_softmax(2).gather(2, letter_NL[:, :, None]).flatten()
        mask_NL = torch.arange(LENGTH) >= given_N[:, None]
        responses = Responses(
            logprob_R=logprob_R,
            sampled_logprob_R=logprob_R.detach(),
            mask_R=mask_NL.flatten(),
            lengths=[LENGTH] * len(lock_N),
            reward_bK=reward_bK,
            reference_bK=-math.log(LETTERS) * mask_NL.double().sum(1).view_as(reward_bK),
            staleness_bK=torch.zeros_like(reward_bK),
            totals=Totals(PROMPTS, len(lock_N), int(mask_NL.sum())),
        )
        optimizer.zero_grad()
        torch.autograd.backward(objective.loss(responses, BETA))
        optimizer.step()
    letters = table.detach()[:, :LENGTH].softmax(2).gather(2, code_PL[:, :, None])
    return float(letters[:, :, 0].prod(1).mean()), plain_right


def sample(
    table: Tensor, lock_N: Tensor, code_NL: Tensor, given_N: Tensor, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return states and letters of responses, [N, L] each, of which the first `given_N` are those of the code."""
    states, letters, state_N = [], [], torch.zeros_like(lock_N)
    for place in range(LENGTH):
        drawn_N = torch.multinomial(table[lock_N, state_N].softmax(1), 1, generator=rng)[:, 0]
        letter_N = torch.where(place < given_N, code_NL[:, place], drawn_N)
        states.append(state_N)
        letters.append(letter_N)
        is_right = (state_N == place) & (letter_N == code_NL[:, place])
        state_N = torch.where(is_right, place + 1, LENGTH)
    return torch.stack(states, 1), torch.stack(letters, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--guided", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--objectives", nargs="+", default=["tb", "tb_stale"])
    parser.add_argument("--until", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, guided, until in itertools.product(options.objectives, options.guided, options.until):
        found = [run(seed, guided, options.steps, name, until) for seed in range(options.seeds)]
        success, right = zip(*found, strict=True)
        error = stdev(success) / len(success) ** 0.5 if len(success) > 1 else 0.0
        print(
            f"{name} guided {guided:g} until {until}: success {mean(success):.4f} +- {error:.4f}", end=", ", flush=True
        )
        print(f"right plain responses in training {mean(right):.1f} ({[*map(round, right)]})", flush=True)


if __name__ == "__main__":
    main()
