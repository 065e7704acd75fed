"""What `buffer.keep` keeps of a first task, in a run whose task changes in the middle.

    python -m benchmarks.two_tasks [--seeds 5]

Bandits: a prompt is a point, and one of eight responses of one token is right, which a random network for each task
decides. Both tasks share the network of the policy, so that learning the second one overwrites the first. Each step
generates as much as it trains on, with the weights of that step, and draws its batch with the buffer's index and
sampler. The table has the expected reward of held-out prompts, which is exact, and how much of the index at the end and
of the batches of the second half is of the first task.
"""

import argparse
import time
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness import print_table
from benchmarks.off_policy.setting import objective_section
from tba.buffer.sampling.index import Block, SamplingIndex
from tba.buffer.sampling.sampler import Draw, Sampler
from tba.common.config.buffer import BufferSection
from tba.trainer.objectives.from_config import make_objective
from tba.trainer.objectives.responses import Responses, Totals

# In each task; the first half of the prompts are trained on.
PROMPTS, FEATURES, ACTIONS, HIDDEN = 512, 8, 8, 64
STEPS, GROUPS, SAMPLES, RATE, BETA, RECENCY = 600, 8, 8, 3e-3, 0.05, 0.5
Keep = Literal["newest", "reservoir", "both"]
KEEPS: tuple[Keep, ...] = ("newest", "reservoir", "both")
MEASURED = ("first task: change", "end", "second task: change", "end", "of the index", "of the batches")


class World:
    """Two tasks and a policy. `prompt_NF` are the points of both, the first task's first."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        point_NF = torch.randn(2 * PROMPTS, FEATURES, generator=generator)
        is_second_N1 = (torch.arange(2 * PROMPTS) >= PROMPTS)[:, None]
        self.prompt_NF = torch.cat([point_NF, is_second_N1, ~is_second_N1], dim=1)
        teachers = torch.randn(2, FEATURES, ACTIONS, generator=generator)
        self.right_N = torch.cat([half @ teacher for half, teacher in zip(point_NF.chunk(2), teachers, strict=True)])
        self.right_N = self.right_N.argmax(dim=1)
        torch.manual_seed(seed)
        self.policy = nn.Sequential(nn.Linear(FEATURES + 2, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, ACTIONS))
        self.reference_NA = self.logprobs().detach()

    def logprobs(self) -> Tensor:
        """Return the log-probability of each response to each prompt: [N, A]."""
        logprob_NA: Tensor = self.policy(self.prompt_NF).double().log_softmax(dim=1)
        return logprob_NA

    def rewards(self) -> list[float]:
        """Return the expected reward of the held-out prompts of each task."""
        chance_N = self.logprobs().detach().exp().gather(1, self.right_N[:, None])[:, 0]
        return [float(of_task_N[PROMPTS // 2 :].mean()) for of_task_N in chance_N.chunk(2)]


def run(keep: Keep, room: int, seed: int) -> list[float]:
    """Train once. Returns MEASURED."""
    world, rng, found = World(seed), np.random.default_rng(seed), list[list[float]]()
    objective = make_objective(objective_section("tb_stale"), longest_response=1)
    optimizer = torch.optim.Adam(world.policy.parameters(), lr=RATE)
    rules = BufferSection(recency_fraction=RECENCY, dedup=False, max_trajectories=room, keep=keep)
    index = SamplingIndex(rules, seed=seed)
    sampler, actions, logprobs, of_first = Sampler(index, rules), list[int](), list[float](), list[bool]()
    for step in range(STEPS):
        logprob_NA = world.logprobs()
        sampled_NA = logprob_NA.detach().numpy()
        first = PROMPTS * (step >= STEPS // 2)
        for prompt in (first + rng.choice(PROMPTS // 2, GROUPS, replace=False)).tolist():
            drawn = rng.choice(ACTIONS, SAMPLES, p=np.exp(sampled_NA[prompt]))
            rewards, ids = (drawn == int(world.right_N[prompt])).tolist(), range(len(actions), len(actions) + SAMPLES)
            index.extend(Block(prompt, ids, [step] * SAMPLES, rewards, ids, [False] * SAMPLES, [0] * SAMPLES))
            actions += drawn.tolist()
            logprobs += sampled_NA[prompt, drawn].tolist()
        batch = sampler.sample(step=step, groups=GROUPS, samples=SAMPLES, rng=np.random.default_rng([seed, step]))
        assert isinstance(batch, Draw)
        entries = [entry for group in batch.groups for entry in group]
        index.mark_trained(entry.id for entry in entries)
        prompt_R, action_R = (
            torch.tensor(one) for one in zip(*((e.prompt, actions[e.id]) for e in entries), strict=True)
        )
        responses = Responses(
            logprob_R=logprob_NA[prompt_R, action_R],
            tempered_R=logprob_NA[prompt_R, action_R],
            sampled_logprob_R=torch.tensor([logprobs[entry.id] for entry in entries], dtype=torch.float64),
            mask_R=torch.ones(len(entries), dtype=torch.bool),
            lengths=[1] * len(entries),
            reward_bK=torch.tensor([entry.reward for entry in entries], dtype=torch.float64).view(GROUPS, SAMPLES),
            reference_bK=world.reference_NA[prompt_R, action_R].view(GROUPS, SAMPLES),
            staleness_bK=torch.tensor([float(step - entry.step) for entry in entries]).view(GROUPS, SAMPLES).double(),
            totals=Totals(prompts=GROUPS, rows=len(entries), tokens=len(entries)),
        )
        optimizer.zero_grad()
        objective.loss(responses, BETA).backward()
        optimizer.step()
        if step >= STEPS // 2:
            of_first += (prompt_R < PROMPTS).tolist()
        if step + 1 in (STEPS // 2, STEPS):
            found.append(world.rewards())
    held = [entry.prompt < PROMPTS for prompt in index.prompts() for entry in index.entries(prompt)]
    return [*np.transpose(found).ravel().tolist(), float(np.mean(held)), float(np.mean(of_first))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--room", type=int, nargs="+", default=[1024, 4096])
    options = parser.parse_args()
    torch.set_num_threads(1)
    started, rows = time.process_time(), []
    for room in options.room:
        for keep in KEEPS:
            runs = [run(keep, room, seed) for seed in range(options.seeds)]
            spread = np.std(runs, 0, ddof=1) if len(runs) > 1 else np.zeros(len(MEASURED))
            rows.append([f"{room} {keep}", *map("{:.3f} ± {:.3f}".format, np.mean(runs, 0), spread)])
            print(*rows[-1], flush=True)
    print_table(
        f"{STEPS * GROUPS * SAMPLES} trajectories, m = {RECENCY}; {options.seeds} seeds",
        ["room, keep", *MEASURED],
        rows,
    )
    print(f"{(time.process_time() - started) / 60:.1f} CPU minutes")


if __name__ == "__main__":
    main()
