"""VinePPO (Kazemnejad et al. 2024, arXiv 2410.01679): values of prefixes by rollouts from them instead of a critic.

    python -m benchmarks.vine_ppo [--methods ppo tb vine:9] [--seeds 5] [--steps 64]
    python -m benchmarks.vine_ppo --methods vine:9 --buffer tcp://127.0.0.1:5781 --endpoints http://127.0.0.1:8400 ...

"vine:K" has K rollouts; other methods are objectives of the trainer, such as `ppo` with its critic. All train on fresh
data as in `benchmarks.off_policy`. A prefix that several responses of a batch share is rolled out once; the paper does
so for each of them.

Rollouts come from an engine in this process, or with `--endpoints` from searchers of a run of the arithmetic example
that has a buffer at `--buffer` and no trainer: `tba buffer serve`, and `tba search --set search.serve=...` for each.
They get the weights of each step as those of a trainer, in the middle of their own work.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from statistics import mean
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

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
from tba.tests.helpers.announcer import Announcer
from tba.tests.helpers.engines import cpu_engine
from tba.trainer.model.scorer import load_model
from tba.trainer.objectives import policy_gradient as pg
from tba.trainer.objectives.from_config import Objective, make_objective
from tba.trainer.objectives.responses import Responses, Terms
from tba.trainer.step.build import prepare_models
from tba.trainer.step.learner import Learner

Context = tuple[int, ...]
PATIENCE_SECONDS = 120.0
Prefix = tuple[Problem, tuple[int, ...]]
# Responses at a time: an endpoint has at most 256 connections and 512 responses.
MOST_PENDING = 256


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


class OwnEngine:
    """The Transformers engine, in this process. The canary is `problem`. Files in `folder` stay while they serve."""

    def __init__(self, task: Task, problem: Problem, seed: int, folder: Path) -> None:
        self.engine = cpu_engine(task.model, max_in_flight=512, seed=seed)
        self._requests, self._folder, self._version = Requests(self.engine), folder, 0
        self._canary = [*problem.prompt, *problem.answer]

    def serve(self, policy: Any) -> None:
        """Generate with the weights of a policy from now on."""
        self._version += 1
        self.engine.load_weights(publish(self._folder, policy, self._version % 2, self._canary))

    def generate(self, limits: Mapping[Context, int], samples: int) -> dict[Context, list[list[int]]]:
        """Return the tokens of responses to each context, which have at most as many as its limit."""
        found: dict[Context, list[Generation]] = {context: [] for context in limits}
        for context, done in found.items():
            sampling = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=limits[context])
            for _ in range(samples):
                self._requests.ask(np.array(context, np.int32), sampling, done.append, first=False)
        while self.engine.in_flight:
            self._requests.step()
        return {context: [one.response_ids.tolist() for one in done] for context, done in found.items()}


class Searchers:
    """The searchers of a run, asked at their endpoints. The benchmark is the run's publisher."""

    def __init__(self, task: Task, folder: Path, buffer: str, endpoints: Sequence[str]) -> None:
        self._folder, self._endpoints = folder, [one.removesuffix("/v1") for one in endpoints]
        # The tokenizer of the run, next to which the weights are saved.
        shutil.copytree(task.model, folder / "policy")
        self._announcer = Announcer(buffer, folder / "policy", folder / "snapshots")
        newest = self._announcer.status().newest_version
        self.version = -1 if newest is None else newest

    def close(self) -> None:
        self._announcer.client.close()

    def serve(self, policy: Any) -> None:
        """Publish a policy, and wait until each searcher serves it."""
        policy.save_pretrained(self._folder / "policy")
        self.version += 1
        self._announcer.announce(self.version)
        while not all(map(self._has_it, self._endpoints)):
            time.sleep(0.05)

    def generate(self, limits: Mapping[Context, int], samples: int) -> dict[Context, list[list[int]]]:
        """Return the tokens of responses to each context. Raises RuntimeError for one of other weights."""
        with ThreadPoolExecutor(max(1, MOST_PENDING // samples)) as pool:
            urls = itertools.cycle(f"{url}/inference/v1/generate" for url in self._endpoints)
            found = pool.map(self._responses, urls, limits, limits.values(), itertools.repeat(samples))
            return dict(zip(limits, found, strict=True))

    def _has_it(self, url: str) -> bool:
        try:
            return bool(self._ask(f"{url}/v1/models")["data"][0]["id"] == f"policy@v{self.version}")
        except HTTPError as error:
            # It has no weights yet.
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            return False

    def _responses(self, url: str, context: Context, limit: int, samples: int) -> list[list[int]]:
        choices = self._ask(url, {"token_ids": context, "sampling_params": {"max_tokens": limit, "n": samples}})[
            "choices"
        ]
        if {version for one in choices for _, _, version in one["version_spans"]} != {self.version}:
            raise RuntimeError(f"{url} has sampled with other weights than v{self.version}: {choices}")
        return [one["token_ids"] for one in choices]

    def _ask(self, url: str, body: Any = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        with urlopen(Request(url, content, {"Content-Type": "application/json"}), timeout=PATIENCE_SECONDS) as answer:
            return json.load(answer)


class Rollouts:
    """Values of prefixes by `samples` responses of `source` to each.

    `tokens` counts what it has generated, `unshared` what it would have if each response had its own rollouts.
    """

    def __init__(self, task: Task, samples: int, source: OwnEngine | Searchers) -> None:
        self.source, self._task, self._samples = source, task, samples
        self.tokens = self.unshared = 0

    def values(self, wanted: Sequence[Prefix]) -> dict[Prefix, float]:
        """Return the mean reward of rollouts from each prefix. A prefix that is named twice is rolled out once."""
        contexts = {prefix: (*prefix[0].prompt, *prefix[1]) for prefix in wanted}
        limits = {context: self._task.longest - len(start) for (_, start), context in contexts.items()}
        found = self.source.generate(limits, self._samples)
        generated = {prefix: sum(map(len, found[context])) for prefix, context in contexts.items()}
        self.tokens += sum(generated.values())
        self.unshared += sum(generated[prefix] for prefix in wanted)
        reward = self._task.reward
        return {
            (problem, start): mean(reward(problem, (*start, *one)) for one in found[context])
            for (problem, start), context in contexts.items()
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


def run(method: str, seed: int, steps: int, buffer: str, endpoints: Sequence[str]) -> dict[str, Any]:
    """Train once, with rollouts of the endpoints if there are any.

    Returns expected reward and the tokens generated so far after each measured step.
    """
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
    with tempfile.TemporaryDirectory(prefix="tba-vine-") as folder, contextlib.ExitStack() as stack:
        source: OwnEngine | Searchers = OwnEngine(task, problems[0], seed, Path(folder))
        if samples and endpoints:
            source = stack.enter_context(contextlib.closing(Searchers(task, Path(folder), buffer, endpoints)))
        rollouts = Rollouts(task, samples, source)
        for step in range(steps):
            groups = searcher.groups(setting.prompts, setting.samples, step)
            batch, responses = as_batch(groups, step), [one for group in groups for one in group]
            tokens += sum(len(one.tokens) for one in responses)
            if samples:
                rollouts.source.serve(policy)
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
    parser.add_argument("--endpoints", metavar="URL", nargs="+", default=(), help="searchers that do the rollouts")
    parser.add_argument("--buffer", metavar="ADDRESS", default="", help="of their run")
    options = parser.parse_args()
    seeds = REPORT_SEEDS[: options.seeds]
    keys = [(method, seed) for seed in seeds for method in options.methods]
    # Searchers serve one policy at a time.
    with ProcessPoolExecutor(1 if options.endpoints else 2, multiprocessing.get_context("spawn")) as pool:
        train = partial(run, steps=options.steps, buffer=options.buffer, endpoints=options.endpoints)
        runs = dict(zip(keys, pool.map(train, *zip(*keys, strict=True)), strict=True))
    table(runs, options.methods, seeds, "steps")
    table(runs, options.methods, seeds, "tokens")


if __name__ == "__main__":
    main()
