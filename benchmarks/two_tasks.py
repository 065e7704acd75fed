"""What `buffer.keep` keeps of a first task, in a run whose task changes in the middle.

    python -m benchmarks.two_tasks [--seeds 5] [--steps 160]

The model of the arithmetic example trains on additions, then on subtractions. Each step generates as much as it trains
on, with the weights of that step, and draws its batch with the buffer's index and sampler. The table has the expected
reward of held-out problems, which is exact, and how much of the index and of the batches are additions.
"""

import argparse
import dataclasses
import time

import numpy as np
import torch
from transformers import AutoTokenizer

from benchmarks.harness import print_table
from benchmarks.off_policy.sampling import Response, as_batch, measure
from benchmarks.off_policy.setting import REPORT_SEEDS, Setting, objective_section
from benchmarks.off_policy.sources import Searcher
from benchmarks.off_policy.tasks import load_task, rate_and_beta
from tba.buffer.sampling.entry_columns import Block
from tba.buffer.sampling.index import SamplingIndex
from tba.buffer.sampling.rules import Keep, Limits, SamplingRules
from tba.buffer.sampling.sampler import Draw, Sampler
from tba.tests.helpers.trainer import learner_of
from tba.trainer.model.scorer import load_model
from tba.trainer.objectives.from_config import make_objective

ROOM, RECENCY = 1024, 0.75
# A name, and `buffer.keep`; None is unbounded.
WAYS: dict[str, Keep | None] = {"newest": "newest", "reservoir": "reservoir", "both": "both", "unbounded": None}
MEASURED = ("additions: start", "change", "end", "subtractions: start", "change", "end", "index", "batches")


def run(keep: Keep | None, setting: Setting) -> list[float]:
    """Train once. Returns MEASURED: rewards, then the shares of additions at the end and in the second half."""
    task, half = load_task("arithmetic"), setting.steps // 2
    (plus,) = AutoTokenizer.from_pretrained(task.model)("+")["input_ids"]
    problems, held_out = (
        [[one for one in some if (plus in one.prompt) == added] for added in (True, False)]
        for some in (task.training, task.held_out[setting.part])
    )
    position = {problem: number for number, problem in enumerate(task.training)}
    policy, reference = (load_model(task.model, torch.device("cpu")) for _ in range(2))
    objective = make_objective(objective_section(setting.objective), longest_response=task.longest)
    learner = learner_of(policy, reference, setting.train_section(), objective)
    searchers = [Searcher(policy, dataclasses.replace(task, training=some), setting) for some in problems]
    limits = Limits(prompt_cap=100, dedup=False, seed=setting.seed)
    if keep is not None:
        limits = dataclasses.replace(limits, max_trajectories=ROOM, keep=keep)
    index = SamplingIndex(limits)
    rules = SamplingRules(RECENCY, recency_window=None, inverse_temperature=0.0, max_staleness=None, min_fill=0)
    sampler, stored, drawn, found = Sampler(index, rules), list[Response](), list[bool](), list[list[float]]()
    for step in range(setting.steps + 1):
        if step in (0, half, setting.steps):
            found.append([measure(policy, task, some).reward for some in held_out])
        if step == setting.steps:
            break
        for group in searchers[step >= half].groups(setting.prompts, setting.samples, step):
            ids = range(len(stored), len(stored) + len(group))
            rewards, size = [response.reward for response in group], len(group)
            prompt = position[group[0].problem]
            index.extend(Block(prompt, ids, [step] * size, rewards, ids, [False] * size, [0] * size))
            stored += group
        batch = sampler.sample(
            step=step, groups=setting.prompts, samples=setting.samples, rng=np.random.default_rng([setting.seed, step])
        )
        assert isinstance(batch, Draw)
        index.mark_trained(entry.id for group in batch.groups for entry in group)
        groups = [[stored[entry.id] for entry in group] for group in batch.groups]
        drawn += [plus in group[0].problem.prompt for group in groups if step >= half]
        learner.step(as_batch(groups, step))
    held = [plus in stored[entry.id].problem.prompt for prompt in index.prompts() for entry in index.entries(prompt)]
    return [*np.transpose(found).ravel().tolist(), float(np.mean(held)), float(np.mean(drawn))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--keep", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rate, beta = rate_and_beta("arithmetic")
    setting = Setting(objective="tb_stale", rate=rate, beta=beta, seed=0, steps=options.steps)
    started, found = time.process_time(), {name: list[list[float]]() for name in options.keep}
    for seed in REPORT_SEEDS[: options.seeds]:
        for name, runs in found.items():
            runs.append(run(WAYS[name], setting.replace(seed=seed)))
            print(seed, name, *(f"{value:.3f}" for value in runs[-1]), flush=True)
    rows = [
        [
            name,
            *(f"{mean:.3f} ± {std:.3f}" for mean, std in zip(np.mean(runs, 0), np.std(runs, 0, ddof=1), strict=True)),
        ]
        for name, runs in found.items()
        if len(runs) > 1
    ]
    print_table(f"room for {ROOM}, m = {RECENCY}; {options.seeds} seeds", ["keep", *MEASURED], rows)
    print(f"{(time.process_time() - started) / 60:.1f} CPU minutes")


if __name__ == "__main__":
    main()
