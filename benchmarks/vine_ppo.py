"""VinePPO (Kazemnejad et al. 2024, arXiv 2410.01679): values of prefixes by rollouts from them instead of a critic.

    python -m benchmarks.vine_ppo [--methods ppo tb vine:9] [--seeds 5] [--steps 64]

"vine:K" has K rollouts; other methods are objectives of the trainer, such as `ppo` with its critic. All train on fresh
data as in `benchmarks.off_policy`. A prefix that several responses of a batch share is rolled out once; the paper does
so for each of them.
"""

import argparse
import multiprocessing
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
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
from benchmarks.off_policy.tasks import Problem, Task, load_task
from tba.common.weights.snapshot import Canary, Manifest, Snapshot
from tba.searcher.engines.engine import Generation, Requests, SamplingSettings
from tba.tests.helpers.engines import cpu_engine
from tba.trainer.model.scorer import load_model
from tba.trainer.objectives import policy_gradient as pg
from tba.trainer.objectives.from_config import Objective, make_objective
from tba.trainer.objectives.responses import Responses, Terms
from tba.trainer.step.build import prepare_models
from tba.trainer.step.learner import Learner

Prefix = tuple[Problem, tuple[int, ...]]


def prefixes(one: Response) -> list[Prefix]:
    """Return what comes before each token of a response."""
    return [(one.problem, one.tokens[:length]) for length in range(len(one.tokens))]


def advantages(response: Response, value: Mapping[Prefix, float]) -> Tensor:
    """Return A_t = V(s_{t+1}) - V(s_t), where the last V is the reward: [T], float64."""
    values = [*(value[prefix] for prefix in prefixes(response)), response.reward]
    return torch.tensor(values, dtype=torch.float64).diff()


def vine_ppo(responses: Responses, _beta: float) -> Terms:
    """Return the loss of `ppo` with these advantages, which come as `reference_R` (`VineLearner`).

    `ppo` subtracts a value from the return, so the value is what leaves A. Its squared error is a constant.
    """
    assert responses.reference_R is not None
    value_R = responses.per_token(responses.reward_bK) - responses.reference_R
    return pg.ppo(replace(responses, value_R=value_R), responses.reward_bK, low=0.2, high=0.2)


class VineLearner(Learner):
    """A learner with `advantages` of the tokens of each row, by its id, where others have a reference's numbers."""

    advantages: Mapping[int, Tensor] | None = None

    def accumulate(self, batch: Any, reference_BK: Tensor, beta: float, of_tokens: Any = None) -> Any:
        """Add the gradient of the whole batch to the parameters."""
        return super().accumulate(batch, reference_BK, beta, self.advantages or of_tokens)


class Rollouts:
    """Values of prefixes by `samples` responses of the Transformers engine to each.

    `tokens` counts what it has generated, `unshared` what it would have if each response had its own rollouts.
    """

    def __init__(self, task: Task, samples: int, seed: int) -> None:
        self.engine = cpu_engine(task.model, max_in_flight=512, seed=seed)
        self._task, self._samples, self._requests = task, samples, Requests(self.engine)
        self.tokens = self.unshared = 0

    def values(self, wanted: Sequence[Prefix]) -> dict[Prefix, float]:
        """Return the mean reward of rollouts from each prefix. A prefix that is named twice is rolled out once."""
        found: dict[Prefix, list[Generation]] = {prefix: [] for prefix in wanted}
        for (problem, start), done in found.items():
            context = np.array([*problem.prompt, *start], np.int32)
            sampling = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=self._task.longest - len(start))
            for _ in range(self._samples):
                self._requests.ask(context, sampling, done.append, first=False)
        while self.engine.in_flight:
            self._requests.step()
        generated = {prefix: sum(len(one.response_ids) for one in done) for prefix, done in found.items()}
        self.tokens += sum(generated.values())
        self.unshared += sum(generated[prefix] for prefix in wanted)
        reward = self._task.reward
        return {
            (problem, start): mean(reward(problem, (*start, *one.response_ids.tolist())) for one in done)
            for (problem, start), done in found.items()
        }


def publish(folder: Path, model: Any, version: int, canary: list[int]) -> Snapshot:
    """Write a snapshot like the trainer's, without the hashes. The canary are token ids."""
    path = folder / f"v{version:08d}"
    model.save_pretrained(path)
    with torch.no_grad():
        logprobs = model(torch.tensor([canary])).logits[0, :-1].float().log_softmax(-1)
    right = logprobs.gather(1, torch.tensor(canary[1:])[:, None])[:, 0].tolist()
    manifest = Manifest("bench", version, version, 0.0, {}, Canary([canary], [right]))
    return Snapshot(path, manifest, [path / "model.safetensors"])


def run(method: str, seed: int, steps: int) -> dict[str, Any]:
    """Train once. Returns expected reward and the tokens generated so far after each measured step."""
    torch.set_num_threads(1)
    task, samples = load_task("arithmetic"), int(method.partition("vine:")[2] or 0)
    setting = Setting(objective="ppo" if samples else method, rate=1e-4, seed=seed, steps=steps, beta=0.1)
    policy, reference = (load_model(task.model, torch.device("cpu")) for _ in range(2))
    models = prepare_models(policy, lambda: (reference, False), setting.train_section())
    objective = make_objective(objective_section(setting.objective), longest_response=task.longest)
    if samples:
        objective = Objective("vine_ppo", vine_ppo, needs_reference=False, reference_of_tokens=True)
    learner = VineLearner(models, setting.train_section(), objective)
    searcher, problems, tokens = Searcher(policy, task, setting), task.held_out[setting.part], 0
    found = [(0, 0, measure(policy, task, problems).reward)]
    with tempfile.TemporaryDirectory(prefix="tba-vine-") as folder:
        rollouts, canary = Rollouts(task, samples, seed), [*problems[0].prompt, *problems[0].answer]
        for step in range(steps):
            groups = searcher.groups(setting.prompts, setting.samples, step)
            batch, responses = as_batch(groups, step), [one for group in groups for one in group]
            tokens += sum(len(one.tokens) for one in responses)
            if samples:
                # The files that serve stay until others do.
                rollouts.engine.load_weights(publish(Path(folder), policy, step % 2, canary))
                value = rollouts.values([prefix for one in responses for prefix in prefixes(one)])
                learner.advantages = {
                    row.id: advantages(one, value) for row, one in zip(batch.rows, responses, strict=True)
                }
            learner.step(batch)
            if step % 4 == 3:
                found.append((step + 1, tokens + rollouts.tokens, measure(policy, task, problems).reward))
    done, generated, reward = zip(*found, strict=True)
    return {"steps": done, "tokens": generated, "reward": reward, "unshared": tokens + rollouts.unshared}


def table(runs: Mapping[tuple[str, int], Any], methods: Sequence[str], seeds: Sequence[int], equal: str) -> None:
    """Print rewards at each quarter of the "steps" or "tokens" of the first method, and the difference of pairs.

    Cells are means over seeds, with standard deviations.
    """
    rows: list[list[Any]] = []
    rewards: dict[str, Any] = {}
    for method in methods:
        pairs = [(runs[method, seed], np.linspace(0, runs[methods[0], seed][equal][-1], 5)[1:]) for seed in seeds]
        rewards[method] = np.transpose([np.interp(marks, one[equal], one["reward"]) for one, marks in pairs])
        parts = [*rewards[method], rewards[method][-1] - rewards[methods[0]][-1]]
        counts = [mean(one["tokens"][-1] for one, _ in pairs), mean(one["unshared"] for one, _ in pairs)]
        rows.append([method, *(f"{one.mean():.3f}±{one.std(ddof=1):.3f}" for one in parts), *map(round, counts)])
    headings = ["method", "1/4", "1/2", "3/4", "end", f"minus {methods[0]}", "tokens", "without sharing"]
    print_table(f"reward at equal {equal}, {len(seeds)} seeds", headings, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["ppo", "tb", "tb_stale", "vine:1", "vine:9"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=64)
    options = parser.parse_args()
    seeds = REPORT_SEEDS[: options.seeds]
    keys = [(method, seed) for seed in seeds for method in options.methods]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        runs = dict(zip(keys, pool.map(run, *zip(*keys, strict=True), [options.steps] * len(keys)), strict=True))
    table(runs, options.methods, seeds, "steps")
    table(runs, options.methods, seeds, "tokens")


if __name__ == "__main__":
    main()
