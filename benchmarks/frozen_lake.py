"""FrozenLake 4x4 with a table as policy: what the objectives reach on data of several turns, fresh and stale.

    python -m benchmarks.frozen_lake [--seeds 5] [--rate 0.1] [--steps 192]

Each step is a turn: the observation is the number of the field, the action one token. The losses are those of the
trainer, on episodes of the policy of D optimiser steps ago. Success is computed from the transition table, not sampled.
The share is that of the largest gain in E[r] - beta KL that a table of the fields can have over the uniform reference.

Shape suffixes: F fields, A actions, N episodes, R turns of all episodes.
"""

import argparse
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import mean, stdev

import numpy as np
import torch
from torch import Tensor

from tba.common.config import ObjectiveSection
from tba.trainer.batch.batch import Row
from tba.trainer.objectives.from_config import make_objective
from tba.trainer.objectives.responses import Responses, Totals
from tba.trainer.step.accumulate import turns_of

# Start, frozen, hole, goal.
LAKE = "SFFFFHFHFFFHHFFG"
ENDS = torch.tensor([field in "HG" for field in LAKE])
GOAL = len(LAKE) - 1
TURNS, BETA, PROMPTS, SAMPLES = 20, 0.002, 4, 16
# Of the learned values, which are up to 1.
HEAD_RATE = 0.02
OBJECTIVES = {
    "tb": ObjectiveSection(name="tb"),
    'tb, log_z = "turn"': ObjectiveSection(name="tb", log_z="turn"),
    "tba_prime": ObjectiveSection(name="tba_prime"),
    "tb_stale": ObjectiveSection(name="tb_stale"),
    "dr_grpo": ObjectiveSection(name="dr_grpo"),
}


@dataclass(frozen=True)
class Episodes:
    """Fields [N, TURNS], actions [N, TURNS], their log-probabilities, turns and rewards of each episode."""

    field: np.ndarray
    action: np.ndarray
    logprob: np.ndarray
    turns: np.ndarray
    reward: np.ndarray


def transitions(*, slippery: bool) -> Tensor:
    """Return the probabilities of the next field: [F, A, F]. Actions are left, down, right, up.

    On slippery ice the player goes where it wants in a third of the cases, else at a right angle to that.
    """
    moves = ((0, -1), (1, 0), (0, 1), (-1, 0))
    chance_FAF = torch.zeros(len(LAKE), 4, len(LAKE), dtype=torch.float64)
    for field, action in itertools.product(range(len(LAKE)), range(4)):
        ways = [action - 1, action, action + 1] if slippery else [action]
        for down, right in (moves[way % 4] for way in ways):
            row, column = min(max(field // 4 + down, 0), 3), min(max(field % 4 + right, 0), 3)
            after = field if ENDS[field] else 4 * row + column
            chance_FAF[field, action, after] += 1 / len(ways)
    return chance_FAF


def success_and_soft(chance_FAF: Tensor, logprob_FA: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probability of reaching the goal, and E[r] - beta KL of the episode."""
    at_F = torch.zeros(len(LAKE), dtype=torch.float64)
    at_F[0] = 1.0
    kl_F = (logprob_FA.exp() * (logprob_FA + np.log(4))).sum(1)
    soft = torch.zeros((), dtype=torch.float64)
    for _ in range(TURNS):
        soft = soft - BETA * (torch.where(ENDS, 0.0, at_F) * kl_F).sum()
        at_F = torch.einsum("f,fa,fag->g", at_F, logprob_FA.exp(), chance_FAF)
    return at_F[GOAL], soft + at_F[GOAL]


def best(chance_FAF: Tensor) -> tuple[float, float, float]:
    """Return success and E[r] - beta KL of the best table, and the latter of the reference."""
    logits_FA = torch.zeros(len(LAKE), 4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits_FA], max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        negative = -success_and_soft(chance_FAF, logits_FA.log_softmax(1))[1]
        torch.autograd.backward(negative)
        return negative

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        success, soft = success_and_soft(chance_FAF, logits_FA.log_softmax(1))
        return float(success), float(soft), float(success_and_soft(chance_FAF, torch.full((16, 4), -np.log(4)))[1])


def play(chance_FAF: np.ndarray, probability_FA: np.ndarray, rng: np.random.Generator) -> Episodes:
    """Play a batch of episodes."""
    count = PROMPTS * SAMPLES
    field = np.zeros((count, TURNS + 1), np.int32)
    action = np.zeros((count, TURNS), np.int32)
    actions_FA, fields_FAF = probability_FA.cumsum(1), chance_FAF.cumsum(2)
    for turn in range(TURNS):
        here = field[:, turn]
        action[:, turn] = (rng.random((count, 1)) > actions_FA[here]).sum(1).clip(max=3)
        field[:, turn + 1] = (rng.random((count, 1)) > fields_FAF[here, action[:, turn]]).sum(1).clip(max=GOAL)
    turns = (~ENDS.numpy()[field[:, :TURNS]]).sum(1)
    logprob = np.log(probability_FA[field[:, :TURNS], action])
    return Episodes(field[:, :TURNS], action, logprob, turns, (field[:, TURNS] == GOAL).astype(float))


def rows_of(episodes: Episodes) -> list[Row]:
    """Return episodes as rows of tokens: actions, and between them the fields, which do not count."""
    rows = []
    for number, turns in enumerate(episodes.turns):
        tokens = np.stack([episodes.field[number, :turns] + 4, episodes.action[number, :turns]], 1).flatten()
        mask = np.tile([0, 1], turns).astype(np.uint8)[1:]
        rows.append(Row(number, tokens[:1], tokens[1:], np.zeros(len(mask), np.float32), mask, on_policy=False))
    return rows


def responses_of(episodes: Episodes, logprob_FA: Tensor, age: int, value_F: Tensor, *, by_turn: bool) -> Responses:
    """Return episodes as the arguments of an objective. Without the tokens of fields, which would not count."""
    taken = np.arange(TURNS) < episodes.turns[:, None]
    field_R, action_R = torch.from_numpy(episodes.field[taken]).long(), torch.from_numpy(episodes.action[taken]).long()
    reward_bK = torch.from_numpy(episodes.reward).view(PROMPTS, SAMPLES)
    lengths: list[int] = episodes.turns.tolist()
    turns = None
    if by_turn:
        rows = rows_of(episodes)
        tokens = sum(len(row.response_ids) for row in rows)
        turns = turns_of(rows, reward_bK.flatten(), [[]] * len(rows), torch.full((tokens,), -np.log(4)), SAMPLES)
        turns = replace(turns, value_S=value_F[field_R])
    return Responses(
        logprob_R=logprob_FA[field_R, action_R],
        sampled_logprob_R=torch.from_numpy(episodes.logprob[taken]),
        mask_R=torch.ones(len(field_R), dtype=torch.bool),
        lengths=lengths,
        reward_bK=reward_bK,
        reference_bK=-np.log(4) * torch.tensor(lengths, dtype=torch.float64).view(PROMPTS, SAMPLES),
        staleness_bK=torch.full_like(reward_bK, age),
        totals=Totals(PROMPTS, len(lengths), len(field_R)),
        turns=turns,
    )


def train(config: ObjectiveSection, chance_FAF: Tensor, *, age: int, seed: int, rate: float, steps: int) -> Tensor:
    """Train a table, and return its log-probabilities: [F, A]."""
    rng, objective = np.random.default_rng(seed), make_objective(config, longest_response=TURNS)
    logits_FA = torch.zeros(len(LAKE), 4, dtype=torch.float64, requires_grad=True)
    value_F = torch.zeros(len(LAKE), dtype=torch.float64, requires_grad=True)
    groups = [{"params": [logits_FA]}, {"params": [value_F], "lr": HEAD_RATE}]
    optimizer = torch.optim.Adam(groups, lr=rate, betas=(0.9, 0.99))
    past: deque[np.ndarray] = deque(maxlen=age + 1)
    for step in range(steps):
        past.append(logits_FA.detach().softmax(1).numpy())
        episodes = play(chance_FAF.numpy(), past[0], rng)
        responses = responses_of(
            episodes, logits_FA.log_softmax(1), min(age, step), value_F, by_turn=config.log_z == "turn"
        )
        optimizer.zero_grad()
        torch.autograd.backward(objective.loss(responses, BETA))
        optimizer.step()
    return logits_FA.detach().log_softmax(1)


def table(seeds: int, rate: float, steps: int) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| ice | objective | D | success | standard error | share of the optimum |"
    yield "|---|---|---|---|---|---|"
    for ice in ("not slippery", "slippery"):
        chance_FAF = transitions(slippery=ice == "slippery")
        success, top, start = best(chance_FAF)
        yield f"| {ice} | the best table | | {success:.3f} | | 100 % |"
        for (name, config), age in itertools.product(OBJECTIVES.items(), (0, 16, 64)):
            tables = [train(config, chance_FAF, age=age, seed=seed, rate=rate, steps=steps) for seed in range(seeds)]
            reached, soft = zip(*(map(float, success_and_soft(chance_FAF, one)) for one in tables), strict=True)
            share = (mean(soft) - start) / (top - start)
            error = stdev(reached) / seeds**0.5
            yield f"| {ice} | `{name}` | {age} | {mean(reached):.3f} | {error:.3f} | {100 * share:.0f} % |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate of Adam")
    parser.add_argument("--steps", type=int, default=192)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for line in table(options.seeds, options.rate, options.steps):
        print(line, flush=True)


if __name__ == "__main__":
    main()
