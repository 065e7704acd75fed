"""FrozenLake with a table as policy: how near the objectives come to the exact optimum, on fresh and stale data.

    python -m benchmarks.frozen_lake [--seeds 5] [--rate 0.1] [--steps 192] [--map 8x8]

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
from collections.abc import Iterator, Sequence
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

# The most moves of an episode, by the number of fields. The goal is the last field.
MOVES, ACTIONS = {16: 20, 64: 60}, 4
BETA, PROMPTS, SAMPLES = 0.002, 4, 16
OBJECTIVES = {
    "tb": ObjectiveSection(name="tb"),
    'tb, log_z = "turn"': ObjectiveSection(name="tb", log_z="turn"),
    "tba_prime": ObjectiveSection(name="tba_prime"),
    "tb_stale": ObjectiveSection(name="tb_stale"),
    "dr_grpo": ObjectiveSection(name="dr_grpo"),
    "tb_prefix": ObjectiveSection(name="tb_prefix"),
    "ppo": ObjectiveSection(name="ppo", kl="reference"),
}


def make_lake(*, slippery: bool, name: str = "4x4") -> tuple[Any, Tensor, Tensor]:
    """Return Gymnasium's environment, the probabilities of the next field [F, A, F], and where an episode ends [F]."""
    fields = {"4x4": 16, "8x8": 64}[name]
    lake = gymnasium.make(
        "FrozenLake-v1", map_name=name, is_slippery=slippery, max_episode_steps=MOVES[fields], disable_env_checker=True
    )
    chance_FAF = torch.zeros(fields, ACTIONS, fields, dtype=torch.float64)
    ends_F = torch.zeros(fields, dtype=torch.bool)
    for field, action in itertools.product(range(fields), range(ACTIONS)):
        for chance, after, _, ended in lake.unwrapped.P[field][action]:  # type: ignore[attr-defined]
            chance_FAF[field, action, after] += chance
            ends_F[after] |= ended
    return lake, chance_FAF, ends_F


def optimum(chance_FAF: Tensor, ends_F: Tensor) -> Tensor:
    """Return log pi* of the actions, by dynamic programming from the last move: [M, F, A]."""
    value_F = torch.zeros(len(ends_F), dtype=torch.float64)
    value_F[-1] = 1.0
    logprobs = []
    for _ in range(MOVES[len(ends_F)]):
        gain_FA = chance_FAF @ value_F / BETA
        logprobs.append(gain_FA.log_softmax(1))
        value_F = torch.where(ends_F, value_F, BETA * (gain_FA.logsumexp(1) - np.log(ACTIONS)))
    return torch.stack(logprobs[::-1])


def success_and_soft(chance_FAF: Tensor, ends_F: Tensor, logprob_MFA: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probability of reaching the goal, and E[r] - beta KL of the episode, against uniform actions.

    `logprob_MFA` may be [1, F, A]: then it is that of each move.
    """
    at_F, kl = torch.eye(len(ends_F), dtype=torch.float64)[0], torch.zeros((), dtype=torch.float64)
    for logprob_FA in logprob_MFA.double().expand(MOVES[len(ends_F)], -1, -1):
        kl = kl + at_F[~ends_F] @ (logprob_FA.exp() * (logprob_FA + np.log(ACTIONS))).sum(1)[~ends_F]
        at_F = torch.einsum("f,fa,fag->g", at_F, logprob_FA.exp(), chance_FAF)
    return at_F[-1], at_F[-1] - BETA * kl


def best_table(chance_FAF: Tensor, ends_F: Tensor) -> Tensor:
    """Return log pi of the actions in the table with the largest E[r] - beta KL: [1, F, A]."""
    logits_1FA = torch.zeros(1, len(ends_F), ACTIONS, dtype=torch.float64, requires_grad=True)
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
        for luck in rng.random(lake.spec.max_episode_steps).tolist():
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


def make_learner(config: ObjectiveSection, rate: float, steps: int, fields: int = 16) -> Learner:
    """Return the trainer of a table whose actions are alike. Values of tokens learn at the rate of the logits."""
    tokens = ACTIONS + fields
    # With one-hot embeddings, the norm before the head makes this of a 1.
    scale = tokens**0.5
    shape = {"hidden_size": tokens, "intermediate_size": 1, "num_hidden_layers": 0, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=tokens, tie_word_embeddings=False, **shape)).requires_grad_(False)
    model.get_input_embeddings().weight.copy_(torch.eye(tokens))
    # Fields are never sampled.
    head = model.get_output_embeddings().weight
    head.copy_(torch.where(torch.arange(tokens) < ACTIONS, 0.0, -50 / scale)[:, None].expand(-1, tokens))
    reference = Reference(Scorer(copy.deepcopy(model), packed=True), ReferenceSection())
    head.requires_grad_()
    section = TrainSection(
        steps=steps, learning_rate=rate / scale, schedule="constant", warmup_steps=0, weight_decay=0.0, beta=BETA,
        beta_final=BETA, prompts_per_step=PROMPTS, samples_per_prompt=SAMPLES,
    )  # fmt: skip
    objective = make_objective(config, longest_response=MOVES[fields])
    learner = Learner(Models(Scorer(model, packed=True), reference), section, objective)
    if learner.log_z is not None and objective.value_of == "token":
        # The hidden states of a model of usual width have many entries, and the trainer's rate of the head is for them.
        learner.optimizer.param_groups[-1]["lr"] = rate / scale
    return learner


def table_of(learner: Learner) -> Tensor:
    """Return the log-probabilities of the actions: [F, A]."""
    head: Tensor = learner.policy.get_output_embeddings().weight.detach()
    return (len(head) ** 0.5 * head[:ACTIONS, ACTIONS:].T).log_softmax(1)


def train(config: ObjectiveSection, lake: Any, *, age: int, seed: int, rate: float, steps: int) -> Tensor:
    """Train a table, and return its log-probabilities after each quarter of the steps: [4, F, A]."""
    rng, learner = np.random.default_rng(seed), make_learner(config, rate, steps, int(lake.observation_space.n))
    quarters = []
    lake.reset(seed=seed)
    past: deque[Tensor] = deque(maxlen=age + 1)
    for step in range(steps):
        past.append(table_of(learner))
        rows, rewards = play(lake, past[0], rng, step * PROMPTS * SAMPLES)
        reward_BK = torch.tensor(rewards, dtype=torch.float64).view(PROMPTS, SAMPLES)
        stale_BK = torch.full_like(reward_BK, min(age, step))
        result = learner.step(TrainBatch(step, rows, reward_BK, torch.full_like(reward_BK, torch.nan), stale_BK))
        assert not result.skipped, result.skipped
        if (step + 1) % (steps // 4) == 0:
            quarters.append(table_of(learner))
    return torch.stack(quarters)


def standard_error(values: Sequence[float]) -> float:
    return stdev(values) / len(values) ** 0.5


def table(ice: str, options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the table for "slippery" or "not slippery" ice."""
    lake, *world = make_lake(slippery=ice == "slippery", name=options.map)
    uniform = torch.full((1, len(world[0]), ACTIONS), -np.log(ACTIONS), dtype=torch.float64)
    start, top = (float(success_and_soft(*world, one)[1]) for one in (uniform, optimum(*world)))

    def line(name: str, age: object, tables: list[Tensor], earlier: str = "") -> str:
        reached, soft = zip(*(map(float, success_and_soft(*world, one)) for one in tables), strict=True)
        error = f"{standard_error(reached):.3f}" if len(tables) > 1 else ""
        # What E[r] - beta KL lacks is beta times the KL from the policy to the optimum.
        share, nats = (mean(soft) - start) / (top - start), (top - mean(soft)) / BETA
        return (
            f"| {ice} | {name} | {age} | {earlier} | {mean(reached):.3f} | {error} | {100 * share:.0f} % | {nats:.1f} |"
        )

    yield line("the optimum", "", [optimum(*world)])
    yield line("the best table", "", [best_table(*world)])
    for name, age in itertools.product(options.objectives, options.ages):
        config, keys = OBJECTIVES[name], {"age": age, "rate": options.rate, "steps": options.steps}
        runs = [train(config, lake, seed=seed, **keys) for seed in range(options.seeds)]
        earlier = [[float(success_and_soft(*world, one[n : n + 1])[0]) for one in runs] for n in range(3)]
        cells = [f"{mean(one):.3f}±{standard_error(one):.3f}" if len(one) > 1 else f"{one[0]:.3f}" for one in earlier]
        yield line(f"`{name}`", age, [one[3:] for one in runs], ", ".join(cells))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate of the logits")
    parser.add_argument("--steps", type=int, default=192)
    parser.add_argument("--map", choices=["4x4", "8x8"], default="4x4")
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--ages", type=int, nargs="+", default=[0, 16, 64], help="D")
    parser.add_argument("--ice", nargs="+", choices=["not slippery", "slippery"], default=["not slippery", "slippery"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = ["ice", "objective", "D", "success after each quarter", "at the end", "standard error"]
    columns += ["share of the optimum", "KL to it, nats"]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for ice in options.ice:
        for line in table(ice, options):
            print(line, flush=True)
    print(f"{time.process_time() / 60:.1f} CPU minutes")


if __name__ == "__main__":
    main()
