"""VinePPO: the value of a prefix is the mean reward of rollouts from it; reward at equal steps and at equal tokens.

    python -m benchmarks.vine_ppo [--methods tb tb_stale ppo vine:1 vine:9] [--seeds 5] [--steps 128] [--rate 1e-4]

"vine:K" is the method of Kazemnejad et al. 2024 (arXiv 2410.01679) with K rollouts; another method is an objective of
the trainer, such as `ppo`, which has a critic. All train on the fresh data of `benchmarks.off_policy`, with its model,
problems and seeds. Rollouts are responses of the Transformers engine, which serves the current weights, to prompt and
prefix. A prefix that several responses of a batch share is rolled out once; the paper does so for each of them.
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import print_table
from benchmarks.off_policy.sampling import Response, as_batch, measure
from benchmarks.off_policy.setting import REPORT_SEEDS, Setting, objective_section
from benchmarks.off_policy.sources import Searcher
from benchmarks.off_policy.tasks import Problem, Task, load_task, rate_and_beta
from tba.common.config import ObjectiveSection
from tba.common.weights.snapshot import Canary, Manifest, Snapshot
from tba.searcher.engines.engine import Generation, Requests, SamplingSettings
from tba.tests.helpers.engines import cpu_engine
from tba.trainer.model.scorer import load_model
from tba.trainer.objectives import policy_gradient as pg
from tba.trainer.objectives.from_config import Objective, make_objective
from tba.trainer.objectives.responses import Responses, Terms
from tba.trainer.step.accumulate import Accumulator
from tba.trainer.step.build import prepare_models
from tba.trainer.step.learner import Learner

MEASURE_EVERY = 4
CLIP = ObjectiveSection(name="ppo").clip_high
Prefix = tuple[Problem, tuple[int, ...]]


def vine_ppo(responses: Responses, _beta: float) -> Terms:
    """Return the loss of `ppo` with the advantages of VinePPO, which come as `reference_R` (`VineLearner`).

        loss = -1/T sum_ijt min( rho_ijt A_ijt, clip(rho_ijt, 1 - low, 1 + high) A_ijt )

    `ppo` makes A of value and return, so the value is what gives this A. Its squared error is a constant.
    """
    assert responses.reference_R is not None
    value_R = responses.per_token(responses.reward_bK) - responses.reference_R
    return pg.ppo(dataclasses.replace(responses, value_R=value_R), responses.reward_bK, low=0.2, high=CLIP)


class VineLearner(Learner):
    """A learner whose `advantages`, of the tokens of each row by its id, take the way of a reference's numbers."""

    advantages: Mapping[int, Tensor]

    def accumulate(self, batch: Any, reference_BK: Tensor, beta: float, *_: Any) -> Accumulator:
        """Add the gradient of the whole batch to the parameters."""
        return super().accumulate(batch, reference_BK, beta, self.advantages)


def prefixes(response: Response) -> list[Prefix]:
    """Return what comes before each token of a response."""
    return [(response.problem, response.tokens[:length]) for length in range(len(response.tokens))]


def advantages(response: Response, value: Mapping[Prefix, float]) -> Tensor:
    """Return A_t = V(s_{t+1}) - V(s_t), with the reward as the last V: [T], float64. They sum to reward - V(s_0)."""
    values = [*(value[prefix] for prefix in prefixes(response)), response.reward]
    return torch.tensor(values, dtype=torch.float64).diff()


class Rollouts:
    """Values of prefixes by `samples` responses of an engine to each.

    `tokens` counts what it has generated, `unshared` what it would have if each response had its own rollouts.
    """

    def __init__(self, task: Task, samples: int, folder: Path, seed: int) -> None:
        self._task, self._samples, self._folder = task, samples, folder
        self._engine = cpu_engine(task.model, max_in_flight=512, seed=seed)
        self._requests = Requests(self._engine)
        self.tokens = self.unshared = 0

    def serve(self, policy: Any, version: int, canary: Sequence[int]) -> None:
        """Publish the weights of the policy, and load them into the engine. It checks them on the canary's tokens."""
        # The files that serve stay until others do.
        path = self._folder / str(version % 2)
        policy.save_pretrained(path)
        with torch.no_grad():
            logprob_TV = policy(torch.tensor([canary])).logits[0, :-1].log_softmax(dim=1)
        logprobs = logprob_TV.gather(1, torch.tensor(canary[1:])[:, None])[:, 0].tolist()
        manifest = Manifest("vine", version, version, 0.0, {}, Canary([list(canary)], [logprobs]))
        self._engine.load_weights(Snapshot(path, manifest, [path / "model.safetensors"]))

    def values(self, wanted: Sequence[Prefix]) -> dict[Prefix, float]:
        """Return the mean reward of rollouts from each prefix. A prefix that is named twice is rolled out once."""
        found: dict[Prefix, list[float]] = {prefix: [] for prefix in wanted}
        for prefix, times in Counter(wanted).items():
            self._ask(prefix, times, found[prefix])
        while self._engine.in_flight:
            self._requests.step()
        return {prefix: mean(rewards) for prefix, rewards in found.items()}

    def _ask(self, prefix: Prefix, times: int, rewards: list[float]) -> None:
        problem, start = prefix
        context = np.array([*problem.prompt, *start], np.int32)
        sampling = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=self._task.longest - len(start))

        def score(generation: Generation) -> None:
            self.tokens += len(generation.response_ids)
            self.unshared += times * len(generation.response_ids)
            rewards.append(self._task.reward(problem, (*start, *generation.response_ids.tolist())))

        for _ in range(self._samples):
            self._requests.ask(context, sampling, score, first=False)


def run(method: str, seed: int, steps: int, rate: float) -> dict[str, Any]:
    """Train once. Returns expected reward, greedy accuracy and tokens generated so far, every few steps."""
    torch.set_num_threads(1)
    started = time.process_time()
    kind, _, samples = method.partition(":")
    is_vine = kind == "vine"
    setting = Setting(
        objective="ppo" if is_vine else method, rate=rate, seed=seed, steps=steps, beta=rate_and_beta("arithmetic")[1]
    )
    task = load_task(setting.task)
    policy, reference = (load_model(task.model, torch.device("cpu")) for _ in range(2))
    bounds = 1 - 0.2, 1 + CLIP
    objective = (
        Objective(method, vine_ppo, needs_reference=False, reference_of_tokens=True, ratio_bounds=bounds)
        if is_vine
        else make_objective(objective_section(method), longest_response=task.longest)
    )
    models = prepare_models(policy, lambda: (reference, False), setting.train_section())
    learner = (VineLearner if is_vine else Learner)(models, setting.train_section(), objective)
    searcher, problems = Searcher(policy, task, setting), task.held_out[setting.part]
    found, tokens = [(0, 0, measure(policy, task, problems))], 0
    with tempfile.TemporaryDirectory(prefix="tba-vine-") as folder:
        rollouts = Rollouts(task, int(samples), Path(folder), seed) if is_vine else None
        for step in range(steps):
            groups = searcher.groups(setting.prompts, setting.samples, step)
            batch, responses = as_batch(groups, step), [response for group in groups for response in group]
            tokens += sum(len(response.tokens) for response in responses)
            if isinstance(learner, VineLearner) and rollouts is not None:
                rollouts.serve(policy, step, problems[0].prompt + problems[0].answer)
                value = rollouts.values([prefix for response in responses for prefix in prefixes(response)])
                learner.advantages = {
                    row.id: advantages(response, value) for row, response in zip(batch.rows, responses, strict=True)
                }
            learner.step(batch)
            if (step + 1) % MEASURE_EVERY == 0:
                generated = tokens + (rollouts.tokens if rollouts else 0)
                found.append((step + 1, generated, measure(policy, task, problems)))
    return {
        "method": method,
        "seed": seed,
        "rate": rate,
        "steps": [step for step, _, _ in found],
        "tokens": [generated for _, generated, _ in found],
        "reward": [round(one.reward, 4) for _, _, one in found],
        "greedy": [round(one.greedy, 4) for _, _, one in found],
        "generated": found[-1][1],
        "unshared": tokens + (rollouts.unshared if rollouts else 0),
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def table(runs: Mapping[tuple[str, int], dict[str, Any]], methods: Sequence[str], seeds: Sequence[int]) -> None:
    """Print the reward after equal steps, and where a method has generated what the first one has after these steps."""
    last = runs[methods[0], seeds[0]]["steps"][-1]
    marks = [last // 8, last // 4, last // 2, last]
    for equal in ("steps", "tokens"):
        rewards: dict[str, list[list[float]]] = {method: [] for method in methods}
        for method, seed in itertools.product(methods, seeds):
            one, first = runs[method, seed], runs[methods[0], seed]
            places = np.interp(marks, first["steps"], first[equal])
            rewards[method].append(np.interp(places, one[equal], one["reward"]).tolist())
        rows = []
        for method in methods:
            found_SM, base_SM = np.array(rewards[method]), np.array(rewards[methods[0]])
            cells = [f"{one.mean():.3f}±{one.std():.3f}" for one in found_SM.T]
            apart_S = (found_SM - base_SM)[:, -1]
            error = apart_S.std(ddof=1) / len(seeds) ** 0.5 if len(seeds) > 1 else np.nan
            counts = [mean(runs[method, seed][key] for seed in seeds) / last for key in ("generated", "unshared")]
            rows.append([method, *cells, f"{apart_S.mean():.3f}±{error:.3f}", *(f"{count:.0f}" for count in counts)])
        headings = ["method", *map(str, marks), f"- {methods[0]}, at the end", "tokens a step", "without sharing"]
        print_table(f"reward at equal {equal}, {len(seeds)} seeds", headings, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["ppo", "tb", "tb_stale", "vine:1", "vine:9"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    options = parser.parse_args()
    seeds = REPORT_SEEDS[: options.seeds]
    wanted = [(method, seed) for seed in seeds for method in options.methods]
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
        found = {key: pool.submit(run, *key, options.steps, options.rate) for key in wanted}
        for one in found.values():
            print(json.dumps(one.result()), flush=True)
    table({key: one.result() for key, one in found.items()}, options.methods, seeds)


if __name__ == "__main__":
    main()
