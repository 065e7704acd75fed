"""Where the batches of a run come from: data of an exact staleness, or the buffer of the paper.

A source is asked for the batch of each step in turn, after the updates of all earlier steps.
"""

import dataclasses
from collections import deque

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.off_policy.sampling import Response, respond
from benchmarks.off_policy.setting import Setting
from benchmarks.off_policy.tasks import Task

# The responses to one problem, made by the same weights.
Group = list[Response]


class Searcher:
    """Samples responses to random training problems from the current weights."""

    def __init__(self, policy: PreTrainedModel, task: Task, setting: Setting) -> None:
        self._policy, self._task, self._setting = policy, task, setting
        self._choice = np.random.default_rng(setting.seed)
        self._generator = torch.Generator().manual_seed(setting.seed)
        self._penalties = np.random.default_rng((setting.seed, 2))

    def groups(self, count: int, samples: int, step: int) -> list[Group]:
        """Return groups of `samples` responses to `count` different problems, by the weights of `step`."""
        chosen = self._choice.choice(len(self._task.training), count, replace=False)
        problems = [self._task.training[index] for index in chosen for _ in range(samples)]
        responses = [
            dataclasses.replace(response, reward=response.reward - penalty)
            for response, penalty in zip(
                respond(self._policy, self._task, problems, self._generator, step, top_p=self._setting.top_p),
                self._penalties.uniform(0, self._setting.penalty, len(problems)),
                strict=True,
            )
        ]
        return [responses[start : start + samples] for start in range(0, len(responses), samples)]


class ExactStaleness:
    """The batch of step s is sampled with the weights of step max(0, s - D), by a queue of D batches.

    An explorer samples the second half of it.
    """

    def __init__(self, searcher: Searcher, setting: Setting, explorer: Searcher | None = None) -> None:
        self._searcher, self._setting, self._explorer = searcher, setting, explorer
        self._queue: deque[list[Group]] = deque()
        self._sampled = 0

    def batch(self, step: int) -> list[Group]:
        """Return the groups of a step, `samples` responses each."""
        last = min(step + self._setting.staleness, self._setting.steps - 1)
        while self._sampled <= last:
            self._queue.append(self._groups(step))
            self._sampled += 1
        return self._queue.popleft()

    def _groups(self, step: int) -> list[Group]:
        prompts, samples = self._setting.prompts, self._setting.samples
        if self._explorer is None:
            return self._searcher.groups(prompts, samples, step)
        others = self._explorer.groups(prompts // 2, samples, step)
        explored = [[dataclasses.replace(response, explored=True) for response in group] for group in others]
        return self._searcher.groups(prompts - len(explored), samples, step) + explored


class PaperBuffer:
    """The buffer of the paper, section 4: searchers get weights, and their data arrives, every k steps.

    Each query is drawn by recency with probability m: uniformly among the groups of the last synchronisation, without
    replacement until none is left. Otherwise it is any group in the buffer, without replacement within the batch, and
    its K responses are drawn with probabilities softmax(priority x reward).
    """

    def __init__(self, searcher: Searcher, setting: Setting) -> None:
        self._searcher, self._setting = searcher, setting
        self._rng = np.random.default_rng((setting.seed, 1))
        self._stored = searcher.groups(setting.fill * setting.prompts, setting.generated, 0)
        self._recent, self._pool = list(self._stored), list[Group]()
        self._arriving: list[Group] = []

    def batch(self, step: int) -> list[Group]:
        if step % self._setting.sync_every == 0:
            self._synchronise(step)
        old = self._rng.choice(len(self._stored), self._setting.prompts, replace=False)
        return [
            self._recent_group() if self._rng.random() < self._setting.recency else self._draw(self._stored[index])
            for index in old
        ]

    def _synchronise(self, step: int) -> None:
        if self._arriving:
            self._stored += self._arriving
            self._recent, self._pool = self._arriving, []
        count = self._setting.sync_every * self._setting.prompts
        self._arriving = self._searcher.groups(count, self._setting.generated, step)

    def _recent_group(self) -> Group:
        if not self._pool:
            self._pool = [self._recent[index] for index in self._rng.permutation(len(self._recent))]
        group = self._pool.pop()
        picked = self._rng.choice(len(group), self._setting.samples, replace=False)
        return [group[index] for index in picked]

    def _draw(self, group: Group) -> Group:
        weights = np.exp(self._setting.priority * np.array([response.reward for response in group]))
        picked = self._rng.choice(len(group), self._setting.samples, replace=False, p=weights / weights.sum())
        return [group[index] for index in picked]
