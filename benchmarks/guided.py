"""Guided starts (docs/tasks.md) on a reward that plain search hardly ever finds: combination locks, or copying.

    python -m benchmarks.guided [--seeds 5] [--guided 0 0.5 1] [--steps 400] [--objectives tb tb_stale] [--until 0]
    python -m benchmarks.guided --digits 24 --guided 0 0.5 --steps 96 --objectives tb

A prompt is a lock with a code of six of eight letters, and only the whole code has a reward: of the first responses one
in 262,144 is right. The policy is a table: for each lock, and each number of letters that are right so far or one that
is wrong, it has a logit of each letter. Objective, masks, the choice of guided groups and the pass rates are those of a
run, on fresh data. Success is computed from the table; that of the optimum is 0.999. With `--until` the reward of the
first steps is another one, as in `task.phases`: the share of the letters before the first wrong one. `--errors` is the
share of the letters of the codes that the judge of these steps takes for others, the same ones in all of them.

With `--digits` the policy is the small Llama of `benchmarks.off_policy` that copies digits and writes two thirds of the
odd ones one too small; its training is that of a run, with the rate and beta of that benchmark. Only a copy without an
error has a reward. Success is computed from the probabilities of the right answers to 64 held-out problems.

Shape suffixes: N responses, L letters of a code.
"""

import argparse
import dataclasses
import itertools
import math
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from benchmarks.off_policy.sampling import as_batch, measure, respond
from benchmarks.off_policy.setting import REPORT_SEEDS, Setting
from benchmarks.off_policy.tasks import load_task, rate_and_beta
from tba.buffer.service.curriculum import Curriculum
from tba.common.config import CurriculumSection, ObjectiveSection, SearchSection
from tba.common.wire.messages import Visit
from tba.searcher.pipeline import Exploration
from tba.tests.helpers.trainer import learner_of
from tba.trainer.model.scorer import load_model
from tba.trainer.objectives.from_config import make_objective
from tba.trainer.objectives.responses import Responses, Totals

LETTERS, LENGTH, LOCKS = 8, 6, 32
PROMPTS, SAMPLES, BETA, RATE = 8, 16, 0.05, 0.1
# Of the language model.
PROBLEMS, RESPONSES = 64, 8


def run(seed: int, guided: float, steps: int, name: Any, until: int = 0, errors: float = 0.0) -> tuple[float, float]:
    """Train a table. Returns the mean success of plain responses, and how many of those in training were right."""
    rng = torch.Generator().manual_seed(seed)
    code_PL = torch.randint(LETTERS, (LOCKS, LENGTH), generator=rng)
    judge = torch.Generator().manual_seed(seed)
    other_PL = (code_PL + torch.randint(1, LETTERS, code_PL.shape, generator=judge)) % LETTERS
    judged_PL = torch.where(torch.rand(code_PL.shape, generator=judge) < errors, other_PL, code_PL)
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
            reward_bK = (letter_NL == judged_PL[lock_N]).double().cumprod(1).mean(1).view(PROMPTS, SAMPLES)
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


def run_model(digits: int, seed: int, guided: float, steps: int, name: Any) -> tuple[float, int]:
    """Train a language model. Returns the same."""
    task = dataclasses.replace(load_task(f"copying-{digits}"), graded=False)
    rate, beta = rate_and_beta(task.name)
    setting = Setting(task=task.name, objective=name, rate=rate, beta=beta, seed=seed, steps=steps)
    policy, reference = (load_model(task.model, torch.device("cpu")) for _ in range(2))
    objective = make_objective(ObjectiveSection(name=name), longest_response=task.longest)
    learner = learner_of(policy, reference, setting.train_section(), objective)
    exploration = Exploration(SearchSection(guided=guided), run_seed=seed, searcher="")
    curriculum = Curriculum(CurriculumSection(), guided=guided > 0)
    rng, plain_right = torch.Generator().manual_seed(seed), 0
    for step in range(steps):
        epoch, first = divmod(step * PROMPTS, PROBLEMS)
        numbers = range(first, first + PROMPTS)
        parts = [exploration.guide(Visit(0, epoch, str(number), curriculum.guide(number))) for number in numbers]
        given = [round((part or 0.0) * (task.longest - 1)) for part in parts for _ in range(RESPONSES)]
        problems = [task.training[number] for number in numbers for _ in range(RESPONSES)]
        responses = respond(policy, task, problems, rng, step, given)
        groups = [responses[start : start + RESPONSES] for start in range(0, len(responses), RESPONSES)]
        for number, part, group in zip(numbers, parts, groups, strict=True):
            rewards = [response.reward for response in group]
            curriculum.note(number, [0] * RESPONSES, rewards, guided=part is not None)
            plain_right += 0 if part is not None else int(sum(rewards))
        learner.step(as_batch(groups, step))
    return measure(policy, task, task.held_out[setting.part]).reward, plain_right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--guided", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--objectives", nargs="+", default=["tb", "tb_stale"])
    parser.add_argument("--until", type=int, nargs="+", default=[0])
    parser.add_argument("--errors", type=float, nargs="+", default=[0.0])
    parser.add_argument(
        "--digits", type=int, default=0, help="train a language model that copies this number of digits"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    ways = itertools.product(options.objectives, options.guided, options.until, options.errors)
    for name, guided, until, errors in ways:
        if options.digits:
            seeds = REPORT_SEEDS[: options.seeds]
            found = [run_model(options.digits, seed, guided, options.steps, name) for seed in seeds]
        else:
            found = [run(seed, guided, options.steps, name, until, errors) for seed in range(options.seeds)]
        success, right = zip(*found, strict=True)
        error = stdev(success) / len(success) ** 0.5 if len(success) > 1 else 0.0
        print(f"{name} guided {guided:g} until {until} errors {errors:g}:", end=" ")
        print(f"success {mean(success):.4f} +- {error:.4f}", end=", ", flush=True)
        print(f"right plain responses in training {mean(right):.1f} ({[*map(round, right)]})", flush=True)


if __name__ == "__main__":
    main()
