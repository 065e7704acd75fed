"""FrozenLake 4x4 with a table as policy: how near the objectives come to the exact optimum, on fresh and stale data.

    python -m benchmarks.frozen_lake [--seeds 5] [--rate 0.1] [--steps 192]

Gymnasium plays, and the trainer's `Learner` trains, on episodes of the weights of D steps ago. The policy is a model
without layers: for each field, a token, it has a logit of each action. Success and E[r] - beta KL of a policy are
computed from the transition table, and so is the optimum, by dynamic programming; it knows how many moves are left.

Shape suffixes: M moves, F fields, A actions, N episodes.
"""

import argparse
import copy
import itertools
import time
from collections import deque
from collections.abc import Iterator
from statistics import mean, stdev
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tba.common.config import ObjectiveSection, ReferenceSection, TrainSection
from tba.trainer.batch.batch import Row, TrainBatch
from tba.trainer.model.reference import Reference
from tba.trainer.model.scorer import Scorer
from tba.trainer.objectives.from_config import make_objective
from tba.trainer.step.learner import Learner, Models

MOVES, FIELDS, ACTIONS, GOAL = 20, 16, 4, 15
TOKENS = ACTIONS + FIELDS
# With one-hot embeddings, the norm before the head makes this of a 1.
SCALE = TOKENS**0.5
BETA, PROMPTS, SAMPLES = 0.002, 4, 16
OBJECTIVES = {
    "tb": ObjectiveSection(name="tb"),
    'tb, log_z = "turn"': ObjectiveSection(name="tb", log_z="turn"),
    "tba_prime": ObjectiveSection(name="tba_prime"),
    "tb_stale": ObjectiveSection(name="tb_stale"),
    "dr_grpo": ObjectiveSection(name="dr_grpo"),
}


def make_lake(*, slippery: bool) -> tuple[Any, Tensor, Tensor]:
    """Return Gymnasium's environment, the probabilities of the next field [F, A, F], and where an episode ends [F]."""
    lake = gymnasium.make("FrozenLake-v1", is_slippery=slippery, max_episode_steps=MOVES, disable_env_checker=True)
    chance_FAF = torch.zeros(FIELDS, ACTIONS, FIELDS, dtype=torch.float64)
    ends_F = torch.zeros(FIELDS, dtype=torch.bool)
    for field, action in itertools.product(range(FIELDS), range(ACTIONS)):
        for chance, after, _, ended in lake.unwrapped.P[field][action]:  # type: ignore[attr-defined]
            chance_FAF[field, action, after] += chance
            ends_F[after] |= ended
    return lake, chance_FAF, ends_F


def optimum(chance_FAF: Tensor, ends_F: Tensor) -> Tensor:
    """Return log pi* of the actions, by dynamic programming from the last move: [M, F, A]."""
    value_F = torch.zeros(FIELDS, dtype=torch.float64)
    value_F[GOAL] = 1.0
    logprobs = []
    for _ in range(MOVES):
        gain_FA = chance_FAF @ value_F / BETA
        logprobs.append(gain_FA.log_softmax(1))
        value_F = torch.where(ends_F, value_F, BETA * (gain_FA.logsumexp(1) - np.log(ACTIONS)))
    return torch.stack(logprobs[::-1])


def success_and_soft(chance_FAF: Tensor, ends_F: Tensor, logprob_MFA: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probability of reaching the goal, and E[r] - beta KL of the episode, against uniform actions.

    `logprob_MFA` may be [1, F, A]: then it is that of each move.
    """
    at_F, kl = torch.eye(FIELDS, dtype=torch.float64)[0], torch.zeros((), dtype=torch.float64)
    for logprob_FA in logprob_MFA.double().expand(MOVES, -1, -1):
        kl = kl + at_F[~ends_F] @ (logprob_FA.exp() * (logprob_FA + np.log(ACTIONS))).sum(1)[~ends_F]
        at_F = torch.einsum("f,fa,fag->g", at_F, logprob_FA.exp(), chance_FAF)
    return at_F[GOAL], at_F[GOAL] - BETA * kl


def best_table(chance_FAF: Tensor, ends_F: Tensor) -> Tensor:
    """Return log pi of the actions in the table with the largest E[r] - beta KL: [1, F, A]."""
    logits_1FA = torch.zeros(1, FIELDS, ACTIONS, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits_1FA], max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        negative = -success_and_soft(chance_FAF, ends_F, logits_1FA.log_softmax(2))[1]
        torch.autograd.backward(negative)
        return negative

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return logits_1FA.detach().log_softmax(2)


def play(lake: Any, logprob_FA: Tensor, rng: np.random.Generator, first: int) -> tuple[list[Row], list[float]]:
    """Play a batch of episodes. Returns rows of tokens, with ids from `first` on, and rewards.

    A row has a field, an action, a field, an action, and so on; the fields do not count.
    """
    logprobs, chances = logprob_FA.tolist(), logprob_FA.exp().cumsum(1).tolist()
    rows, rewards = [], []
    for number in range(PROMPTS * SAMPLES):
        field, reward, tokens, chosen = lake.reset()[0], 0.0, [], []
        for luck in rng.random(MOVES).tolist():
            action = min(sum(luck > chance for chance in chances[field]), ACTIONS - 1)
            tokens += [ACTIONS + field, action]
            chosen += [0.0, logprobs[field][action]]
            field, reward, ended, *_ = lake.step(action)
            if ended:
                break
        ids, sampled = np.array(tokens, np.int32), np.array(chosen, np.float32)
        mask = np.arange(1, len(ids), dtype=np.uint8) % 2
        rows.append(Row(first + number, ids[:1], ids[1:], sampled[1:], mask, on_policy=False))
        rewards.append(reward)
    return rows, rewards


def make_learner(config: ObjectiveSection, rate: float, steps: int) -> Learner:
    """Return the trainer of a table whose actions are alike."""
    shape = {"hidden_size": TOKENS, "intermediate_size": 1, "num_hidden_layers": 0, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=TOKENS, tie_word_embeddings=False, **shape)).requires_grad_(False)
    model.get_input_embeddings().weight.copy_(torch.eye(TOKENS))
    # Fields are never sampled.
    head = model.get_output_embeddings().weight
    head.copy_(torch.where(torch.arange(TOKENS) < ACTIONS, 0.0, -50 / SCALE)[:, None].expand(-1, TOKENS))
    reference = Reference(Scorer(copy.deepcopy(model), packed=True), ReferenceSection())
    head.requires_grad_()
    section = TrainSection(
        steps=steps, learning_rate=rate / SCALE, schedule="constant", warmup_steps=0, weight_decay=0.0, beta=BETA,
        beta_final=BETA, prompts_per_step=PROMPTS, samples_per_prompt=SAMPLES,
    )  # fmt: skip
    return Learner(
        Models(Scorer(model, packed=True), reference), section, make_objective(config, longest_response=MOVES)
    )


def table_of(learner: Learner) -> Tensor:
    """Return the log-probabilities of the actions: [F, A]."""
    head: Tensor = learner.policy.get_output_embeddings().weight.detach()
    return (SCALE * head[:ACTIONS, ACTIONS:].T).log_softmax(1)


def train(config: ObjectiveSection, lake: Any, *, age: int, seed: int, rate: float, steps: int) -> Tensor:
    """Train a table, and return its log-probabilities: [F, A]."""
    rng, learner = np.random.default_rng(seed), make_learner(config, rate, steps)
    lake.reset(seed=seed)
    past: deque[Tensor] = deque(maxlen=age + 1)
    for step in range(steps):
        past.append(table_of(learner))
        rows, rewards = play(lake, past[0], rng, step * PROMPTS * SAMPLES)
        reward_BK = torch.tensor(rewards, dtype=torch.float64).view(PROMPTS, SAMPLES)
        stale_BK = torch.full_like(reward_BK, min(age, step))
        result = learner.step(TrainBatch(step, rows, reward_BK, torch.full_like(reward_BK, torch.nan), stale_BK))
        assert not result.skipped, result.skipped
    return table_of(learner)


def table(ice: str, seeds: int, rate: float, steps: int) -> Iterator[str]:
    """Yield the lines of the table for "slippery" or "not slippery" ice."""
    lake, *world = make_lake(slippery=ice == "slippery")
    uniform = torch.full((1, FIELDS, ACTIONS), -np.log(ACTIONS), dtype=torch.float64)
    start, top = (float(success_and_soft(*world, one)[1]) for one in (uniform, optimum(*world)))

    def line(name: str, age: object, tables: list[Tensor]) -> str:
        reached, soft = zip(*(map(float, success_and_soft(*world, one)) for one in tables), strict=True)
        error = f"{stdev(reached) / len(tables) ** 0.5:.3f}" if len(tables) > 1 else ""
        # What E[r] - beta KL lacks is beta times the KL from the policy to the optimum.
        share, nats = (mean(soft) - start) / (top - start), (top - mean(soft)) / BETA
        return f"| {ice} | {name} | {age} | {mean(reached):.3f} | {error} | {100 * share:.0f} % | {nats:.1f} |"

    yield line("the optimum", "", [optimum(*world)])
    yield line("the best table", "", [best_table(*world)])
    for (name, config), age in itertools.product(OBJECTIVES.items(), (0, 16, 64)):
        tables = [train(config, lake, age=age, seed=seed, rate=rate, steps=steps)[None] for seed in range(seeds)]
        yield line(f"`{name}`", age, tables)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate of the logits")
    parser.add_argument("--steps", type=int, default=192)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| ice | objective | D | success | standard error | share of the optimum | KL to it, nats |")
    print("|---|---|---|---|---|---|---|")
    for ice in ("not slippery", "slippery"):
        for line in table(ice, options.seeds, options.rate, options.steps):
            print(line, flush=True)
    print(f"{time.process_time() / 60:.1f} CPU minutes")


if __name__ == "__main__":
    main()
