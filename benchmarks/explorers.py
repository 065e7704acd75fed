"""Explorers next to the policy, on tables of logits whose optimum is known.

    python -m benchmarks.explorers [--seeds 5] [--steps 200]
    python -m benchmarks.explorers --strong MODEL [--seeds 3] [--steps 32] [--task game]

The task of `benchmarks.posterior`, made hard to explore: four of the least likely 40 of 125 responses are right. Both
prompts have a group of 32 responses per step, of weights 4 steps old. An explorer, which never changes, has the groups
of every other step. *Weak* is uniform over all responses; *strong* gives half of its probability to the right ones,
and is the initial policy otherwise. Reported are the expected reward as a share of that of pi*, after a quarter of the
steps and at the end, and the distance from pi* at the end.

`python -m benchmarks.off_policy explorers` is the same comparison with a small language model. `--strong MODEL` is that
with real processes: the demo, or with `--task game` that of the game, with two searchers of the policy, or one and an
explorer that serves this model, such as the last snapshot of another run, or (*weak*) the model that the policy starts
from. Responses are trained on once; none of arithmetic is more than eight steps old, none of the game more than two.
Each run is a line of JSON: held-out success, greedy and of four samples, after each quarter of the steps, and the share
of the batches that is the explorer's.
"""

import argparse
import contextlib
import itertools
import json
import subprocess
import tempfile
import time
import tomllib
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typer.testing import CliRunner

from benchmarks.harness import print_table, tba
from benchmarks.off_policy.setting import objective_section
from benchmarks.posterior import (
    LENGTH,
    PREFIX_YT,
    PROMPTS,
    RATE,
    RESPONSES,
    VOCABULARY,
    coverage,
    loss_of_batch,
    probabilities,
    token_logprobs,
)
from benchmarks.serving import free_address
from examples.game.prepare import build
from tba.cli import app
from tba.trainer.objectives.from_config import make_objective

# For 95 % intervals of a mean, by the number of seeds.
T_QUANTILE = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
# To guess, in two turns: a shorter game than the demo's.
NUMBERS = 3
# What differs from the demos.
OWN_SETTINGS = {
    "arithmetic": ["train.prompts_per_step=16", "buffer.max_staleness=8", "search.max_in_flight=64"],
    "game": [
        f"task.options.numbers={NUMBERS}",
        "search.max_turns=2",
        "search.max_tokens=6",
        "search.max_in_flight=96",
        "train.prompts_per_step=12",
    ],
}
STALENESS, BETA = 4, 0.2
UNLIKELY, RIGHT = 40, 4
KINDS = ("none", "weak", "strong")
OBJECTIVES = ("tb", "tb_stale", "tba_prime", "dr_grpo")


def token_logprobs_of(chance_PY: np.ndarray) -> Tensor:
    """Return the log-probability of each token of each response under a distribution of responses: [P, Y, T]."""
    chance = torch.from_numpy(chance_PY).view(PROMPTS, *[VOCABULARY] * LENGTH)
    # That of each prefix, from the empty one on.
    prefixes = [chance.sum(dim=tuple(range(1 + size, 1 + LENGTH)), keepdim=True) for size in range(LENGTH)] + [chance]
    flat = [one.expand_as(chance).reshape(PROMPTS, len(RESPONSES)).log() for one in prefixes]
    return torch.stack([after - before for before, after in itertools.pairwise(flat)], dim=2)


def run(name: str, kind: str, seed: int, steps: int) -> tuple[float, float, float]:
    """Train once. Returns the shares of the reward of pi*, after a quarter and at the end, and the distance from it."""
    objective = make_objective(objective_section(name), longest_response=LENGTH)
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0.0, 1.0, (PROMPTS, int(PREFIX_YT.max()) + 1, VOCABULARY))).requires_grad_()
    reference_PYT = token_logprobs(logits).detach()
    reference_PY = probabilities(reference_PYT)
    reward_PY = np.zeros_like(reference_PY)
    for reward_Y, order_Y in zip(reward_PY, reference_PY.argsort(axis=1), strict=True):
        reward_Y[rng.choice(order_Y[:UNLIKELY], RIGHT, replace=False)] = 1.0
    optimum_PY = reference_PY * np.exp(reward_PY / BETA)
    optimum_PY /= optimum_PY.sum(axis=1, keepdims=True)
    everything = np.ones_like(reward_PY, dtype=bool)
    explorer_PYT = {
        "none": None,
        "weak": token_logprobs_of(np.full_like(reference_PY, 1 / len(RESPONSES))),
        "strong": token_logprobs_of(0.5 * reward_PY / RIGHT + 0.5 * reference_PY),
    }[kind]
    optimizer = torch.optim.Adam([logits], lr=RATE)
    past, shares = deque([logits.detach().clone()], maxlen=STALENESS + 1), []
    for step in range(1, steps + 1):
        is_explored = explorer_PYT is not None and step % 2 == 0
        sampler_PYT = explorer_PYT if explorer_PYT is not None and is_explored else token_logprobs(past[0])
        own_PYT = token_logprobs(logits)
        optimizer.zero_grad()
        age, log_z_P1 = 0 if is_explored else STALENESS, torch.zeros(PROMPTS, 1, dtype=torch.float64)
        sampled = own_PYT, own_PYT, sampler_PYT, reference_PYT, reward_PY
        loss_of_batch(objective, *sampled, age, rng, BETA, log_z_P1).backward()
        optimizer.step()
        past.append(logits.detach().clone())
        if step in (steps // 4, steps):
            found = coverage(probabilities(token_logprobs(past[-1])), optimum_PY, reward_PY, everything)
            shares.append(found.reward / float((optimum_PY * reward_PY).sum(axis=1).mean()))
    return shares[0], shares[1], found.variation


def run_processes(task: str, kind: str, strong: str, seed: int, steps: int) -> dict[str, Any]:
    """Train a demo once, as processes. Returns rewards after each quarter of the steps, and the share."""
    demo = f"examples/{task}/demo.toml"
    with tempfile.TemporaryDirectory(prefix="tba-explorers-") as folder, contextlib.ExitStack() as stack:
        weak = tomllib.loads(Path(demo).read_text())["model"]["path"]
        if task == "game":
            weak = f"{folder}/start"
            torch.manual_seed(seed)
            for one in build(NUMBERS):
                one.save_pretrained(weak)
        settings = [
            f"run.dir={folder}/run",
            f"run.seed={seed}",
            f"model.path={weak}",
            f"buffer.address={free_address()}",
            f"train.steps={steps}",
            f"train.keep_snapshot_every={steps // 4}",
            "buffer.samples_per_insert=1",
            "search.cpu_searchers=1",
            "task.reward_workers=0",
            "metrics.tensorboard=false",
            "eval.samples=4",
            *OWN_SETTINGS[task],
        ]
        policy = {"none": [], "weak": [f"search.policy={weak}"], "strong": [f"search.policy={strong}"]}[kind]

        def start(role: str, *arguments: str, more: Sequence[str] = ()) -> subprocess.Popen[bytes]:
            command = tba(role, *arguments, "--config", demo, settings=[*settings, *more])
            log = stack.enter_context(Path(folder, f"{len(logs)}.log").open("w+b"))
            logs.append(Path(log.name))
            process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return process

        logs: list[Path] = []
        start("buffer", "serve")
        searchers = start("search"), start("search", more=policy)
        # Else the first one to join would generate the first batches.
        while not all("joined" in log.read_text() for log in logs[1:]):
            if any(searcher.poll() is not None for searcher in searchers):
                raise RuntimeError("\n".join(log.read_text() for log in logs[1:]))
            time.sleep(0.2)
        if start("train").wait():
            raise RuntimeError(logs[-1].read_text())
        # In this process, which has torch already.
        command = tba("eval", "--config", demo, "--all", "--json", settings=settings)[3:]
        found = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)
        metrics = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
        return {
            "kind": kind,
            "seed": seed,
            "greedy": {one["step"]: one["accuracy"] for one in found},
            "sampled": {one["step"]: one["sampled_reward"] for one in found},
            "share": float(np.mean([line.get("explored_share", 0.0) for line in metrics])),
        }


def print_differences(runs: Sequence[Mapping[str, Any]]) -> None:
    """Print means, and differences from the runs without an explorer by seed, with 95 % intervals."""
    rows = list[list[str]]()
    for kind, what in itertools.product(KINDS, ("greedy", "sampled")):
        found = {run["seed"]: np.array(list(run[what].values())) for run in runs if run["kind"] == kind}
        alone = {run["seed"]: np.array(list(run[what].values())) for run in runs if run["kind"] == "none"}
        differences = np.array([found[seed] - alone[seed] for seed in found])
        half = T_QUANTILE[len(found)] * differences.std(axis=0, ddof=1) / len(found) ** 0.5
        share = np.mean([run["share"] for run in runs if run["kind"] == kind])
        cells = [
            f"{mean:.3f} ({difference:+.3f}±{width:.3f})"
            for mean, difference, width in zip(np.mean(list(found.values()), 0), differences.mean(0), half, strict=True)
        ]
        rows.append([f"{kind}, {what}", *cells, f"{share:.2f}"])
    print_table("success (minus no explorer)", ["explorer", "start", "1/4", "1/2", "3/4", "end", "share"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, choices=sorted(T_QUANTILE), default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--objectives", nargs="+", default=OBJECTIVES, help="NAME or NAME:KEY=VALUE,...")
    parser.add_argument("--strong", metavar="MODEL", help="run processes, with this model as the strong explorer")
    parser.add_argument("--task", choices=tuple(OWN_SETTINGS), default="arithmetic", help="with --strong")
    options = parser.parse_args()
    if options.steps % 4:
        parser.error("--steps must be a multiple of 4")
    if options.strong:
        runs = list[dict[str, Any]]()
        for seed, kind in itertools.product(range(options.seeds), KINDS):
            runs.append(run_processes(options.task, kind, options.strong, seed, options.steps))
            print(json.dumps(runs[-1]), flush=True)
        print_differences(runs)
        return
    torch.set_num_threads(1)
    started, rows = time.process_time(), []
    for objective, kind in itertools.product(options.objectives, KINDS):
        found_S3 = np.array([run(objective, kind, seed, options.steps) for seed in range(options.seeds)])
        cells = [f"{mean:.2f} ± {sd:.2f}" for mean, sd in zip(found_S3.mean(axis=0), found_S3.std(axis=0), strict=True)]
        rows.append([objective, kind, *cells])
        print(*rows[-1], flush=True)
    title = f"explorers, {options.seeds} seeds, mean and standard deviation"
    headings = ["objective", "explorer", f"reward at {options.steps // 4}", f"reward at {options.steps}", "TV to pi*"]
    print_table(title, headings, rows)
    print(f"{time.process_time() - started:.0f} CPU seconds")


if __name__ == "__main__":
    main()
