"""A mixture: several tasks in one run, each with its own prompts, scorer and reward parts.

The key of a prompt is `LABEL:KEY`, and `LABEL~2:KEY` for its second copy: the label says which task scores it.
"""

import re
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from inspect import isawaitable
from typing import Any

from tba.common.errors import TaskError
from tba.common.rendering import Message
from tba.searcher.tasks.task import (
    CORRECT,
    PARSE_ERROR,
    Environment,
    Prompt,
    Reward,
    Task,
    Turn,
    check_answers,
    is_random,
    least_reward,
)

# The part with the whole reward of one task, next to its other parts: `LABEL.reward`.
_REWARD = "reward"
# Without the characters that separate it from the key of a prompt and from the name of a part.
_LABEL = re.compile(r"[A-Za-z_][\w-]*")
# All copies are in memory in each searcher, and in the database.
_MAX_PROMPTS = 10_000_000


class MixtureTask:
    """Tasks by label. With weights, an epoch contains their prompts in these proportions.

    No prompt is left out for that: prompts of a task that is too small for its weight occur several times in an epoch,
    as copies with keys of their own. Each reward has the parts of its task as `LABEL.PART`, its whole reward as
    `LABEL.reward`, and the part `correct`, if the task has it, under that name too, as an average over all tasks. So
    have the turns of episodes, which keep `parse_error` too. It is `random` if one of its tasks is.

    `parts` are (label or None for the task's name, task, weight or None). Raises TaskError for labels that cannot be
    used.
    """

    name = "mixture"

    def __init__(self, parts: Sequence[tuple[str | None, Task, float | None]]) -> None:
        labels = [label or task.name for label, task, _ in parts]
        if odd := [label for label in labels if not _LABEL.fullmatch(label)]:
            raise TaskError(f"task.mixture: {odd[0]!r} is not a label: set `label` to letters, digits, _ and -")
        if repeated := [label for label, count in Counter(labels).items() if count > 1]:
            raise TaskError(f"task.mixture has two tasks with the label {repeated[0]}: give one another `label`")
        self.tasks = tasks = dict(zip(labels, (task for _, task, _ in parts), strict=True))
        self.least_reward = min(map(least_reward, tasks.values()))
        self.random = any(map(is_random, tasks.values()))
        self.notes = [f"{label}: {note}" for label, task in tasks.items() for note in getattr(task, "notes", [])]
        # Every task has one, or none has.
        self._weights = {label: weight for label, (*_, weight) in zip(labels, parts, strict=True) if weight is not None}

    def prompts(self) -> Sequence[Prompt]:
        prompts = {label: task.prompts() for label, task in self.tasks.items()}
        return _interleaved([_labelled(label, prompts[label], count) for label, count in self._counts(prompts).items()])

    def held_out(self) -> Sequence[Prompt]:
        found = {label: task.held_out() for label, task in self.tasks.items()}
        return _interleaved([_labelled(label, prompts, len(prompts)) for label, prompts in found.items()])

    def score(self, prompt: Prompt, response: str, finished: bool) -> Any:
        """Score with the task that the prompt's key names; with a coroutine, if that does."""
        label = self.label_of(prompt)
        return _with_label(label, self.tasks[label].score(_own(prompt), response, finished))

    def environment(self, prompt: Prompt) -> Environment:
        """Return an environment of the task that the prompt's key names, which has one."""
        label, own = self.label_of(prompt), _own(prompt)
        task: Any = self.tasks[label]
        return _Labelled(label, own, task.environment(own))

    def label_of(self, prompt: Prompt) -> str:
        return prompt.key.partition(":")[0].partition("~")[0]

    def check(self) -> None:
        for task in self.tasks.values():
            check_answers(task)

    def _counts(self, prompts: dict[str, Sequence[Prompt]]) -> dict[str, int]:
        """Return how many prompts of each task an epoch has: at least all of them, in proportion to the weights."""
        if not (weights := self._weights):
            return {label: len(found) for label, found in prompts.items()}
        if empty := [label for label, found in prompts.items() if not found]:
            raise TaskError(f"task.mixture: task {empty[0]} has no prompts, so it cannot have a weight: remove it")
        scale = max(len(found) / weights[label] for label, found in prompts.items())
        counts = {label: max(len(found), round(scale * weights[label])) for label, found in prompts.items()}
        if (total := sum(counts.values())) > _MAX_PROMPTS:
            label = max(counts, key=lambda label: len(prompts[label]) / weights[label])
            raise TaskError(
                f"task.mixture: with these weights an epoch has {total:,} prompts, and at most {_MAX_PROMPTS:,} are "
                f"possible: raise the weight of {label}, or set its limit"
            )
        return counts


def _labelled(label: str, prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return `count` prompts with the label before their keys; those after the last one are copies."""
    copies = -(-count // len(prompts)) if prompts else 0
    found = [
        replace(prompt, key=f"{label}{f'~{copy}' if copy > 1 else ''}:{prompt.key}")
        for copy in range(1, copies + 1)
        for prompt in prompts
    ]
    return found[:count]


def _interleaved(lists: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """Merge lists evenly, so that the first N of the result have the proportions of all."""
    placed = [
        ((position + 0.5) / len(prompts), n, prompt)
        for n, prompts in enumerate(lists)
        for position, prompt in enumerate(prompts)
    ]
    return [prompt for *_, prompt in sorted(placed, key=lambda one: one[:2])]


def _own(prompt: Prompt) -> Prompt:
    return replace(prompt, key=prompt.key.partition(":")[2])


class _Labelled:
    """An environment of one of the tasks, whose parts get the label."""

    def __init__(self, label: str, prompt: Prompt, environment: Environment) -> None:
        self._label = label
        self._prompt = prompt
        self._environment = environment
        self.close = environment.close

    def reset(self, prompt: Prompt) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        return self._environment.reset(self._prompt)

    def step(self, reply: str, finished: bool) -> Any:
        return _with_label(self._label, self._environment.step(reply, finished))


def _with_label(label: str, result: Any) -> Any:
    """Return a Reward or a Turn with the label in the names of its parts, or what awaits one. Raises TypeError."""
    if isawaitable(result):
        return _later(label, result)
    if not isinstance(result, Reward | Turn):
        raise TypeError(f"{type(result).__name__} returned, not a Reward or a Turn")
    parts = {f"{label}.{name}": value for name, value in result.parts.items()}
    common = {name: result.parts[name] for name in (CORRECT, PARSE_ERROR) if name in result.parts}
    if isinstance(result, Turn):
        return result._replace(parts={**common, f"{label}.{_REWARD}": result.reward, **parts})
    return Reward(result.total, {**common, f"{label}.{_REWARD}": result.total, **parts})


async def _later(label: str, result: Awaitable[Any]) -> Any:
    return _with_label(label, await result)
