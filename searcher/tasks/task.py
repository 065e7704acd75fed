"""The task protocol: prompts with stable keys, and a scorer or an environment for their responses."""

import hashlib
import inspect
import json
import sys
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from tba.common.data_files import require_unicode
from tba.common.errors import TaskError, TbaError, named
from tba.common.rendering import Message, PromptRenderer, message_of

# The reward part that is averaged as accuracy: 1 for a right answer, 0 for a wrong one.
CORRECT = "correct"
# The turn part that makes an episode's stop reason `parse_error`, if it is above 0 in the last turn.
PARSE_ERROR = "parse_error"
# More than the special tokens that a tokenizer adds to a text.
_ADDED = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem. `key` is unique within the task and the same in every process and run.

    It is a text; or messages, pairs (role, content) or maps of these two and other fields such as `tool_calls`, that
    the model's chat template renders; or token ids, which are used as they are. With both text and messages, the text
    is used where there is no template. `template_kwargs` are variables of the template, such as `tools`, and replace
    those of `task.template_kwargs`. `accepted` are right answers besides `answer`. `demonstration` is a right response
    as text, with which guided responses begin (`search.guided`).

    Lists become tuples, and a map with other fields becomes (role, content, the map as JSON). Raises ValueError for a
    message of another form, and for a text with a lone surrogate.
    """

    key: str
    text: str = ""
    answer: str = ""
    messages: Sequence[Message] = ()
    ids: Sequence[int] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    accepted: Sequence[str] = ()
    demonstration: str = ""

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "messages", tuple(message_of(message) for message in self.messages))
            texts = [self.key, self.text, self.answer, self.messages, self.template_kwargs, self.accepted]
            require_unicode([*texts, self.demonstration])
        except ValueError as error:
            raise ValueError(f"prompt {self.key!r} has {error}") from error
        object.__setattr__(self, "ids", tuple(int(id_) for id_ in self.ids))
        object.__setattr__(self, "accepted", tuple(self.accepted))


@dataclass(frozen=True, slots=True)
class Reward:
    """A score. `total` is the reward of training; `parts` are named numbers for reports, usually one `correct`."""

    total: float
    parts: dict[str, float]


class Turn(NamedTuple):
    """What a reply leads to: messages to the model, the reward of this turn, and whether the episode is over.

    The reward of an episode is the sum of its turns' rewards. `parts` are named numbers for reports; an episode whose
    last turn has `parse_error` above 0 ends with that stop reason.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    parts: Mapping[str, float] = MappingProxyType({})


class Environment(Protocol):
    """What answers the replies of one episode. Each method may be a coroutine function, and has task.reward_seconds.

    Its answers are a function of the prompt's key and the replies, unless the task has `random = True`: an episode
    whose worker is lost continues in another one, which repeats its replies. So seed it with the key, and keep no state
    that several episodes share.
    """

    def reset(self, prompt: Prompt) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Begin the episode. Return the messages that follow those of the prompt, often none. Called once."""
        return ()

    def step(self, reply: str, finished: bool) -> Turn | Awaitable[Turn]:
        """Answer a reply, decoded without special tokens. `finished` is False if it was cut off by its length."""

    def close(self) -> Awaitable[None] | None:
        """Release what the environment holds. Called once, after the last turn, and after an error if possible."""
        return None


class Task(Protocol):
    """Prompts to train on, prompts to evaluate on, and a scorer for both.

    A task with `environment(prompt: Prompt) -> Environment` is an episode task: each response begins an episode, a
    conversation with an environment of its own. It needs no `score`.

    A task may also have

    - `example_replies: Sequence[str]`, replies of one episode that `tba task check` plays;
    - `random: bool`, True if the environments are not a function of the prompt's key and the replies: then an episode
      ends with an error if its worker is lost, and some objectives need fresh data (docs/objectives.md);
    - `least_reward: float`, the lowest reward that it gives (0 without it): what a failed answer has in `tba eval`;
    - `notes: list[str]`, sentences on its data for `tba task check`, such as how many rows occur twice;
    - `check() -> None`, which raises TaskError for prompts that cannot be scored. It is called once before a searcher
      or an evaluation starts, not in reward workers.

    `tba eval` averages the reward and each of its parts; accuracy is the mean of the part `correct`.
    """

    name: str

    def prompts(self) -> Sequence[Prompt]:
        """Return the training prompts, always in the same order."""

    def held_out(self) -> Sequence[Prompt]:
        """Return the prompts of evaluation, which are never trained on."""

    def score(self, prompt: Prompt, response: str, finished: bool) -> Reward | Awaitable[Reward]:
        """Score a decoded response without special tokens. `finished` is False if it was cut off by its length.

        With `async def`, a worker scores several responses at a time.
        """


class ListedTask:
    """A task whose prompts are two lists, which a subclass makes."""

    _prompts: Sequence[Prompt]
    _held_out: Sequence[Prompt]

    def prompts(self) -> Sequence[Prompt]:
        return self._prompts

    def held_out(self) -> Sequence[Prompt]:
        return self._held_out


class LimitedTask:
    """The first `limit` training and `held_out_limit` held-out prompts of another task; 0 means all of them.

    Raises TaskError for any error of the other task's code, with the line that raised it.
    """

    def __init__(self, task: Task, limit: int, held_out_limit: int) -> None:
        self.name = task.name
        # An episode task may have none.
        if hasattr(task, "score"):
            self.score = task.score
        self._task = task
        # A task may make new ones in each call, and they are asked for often.
        self.prompts = cache(partial(self._first, "prompts", limit or None))
        self.held_out = cache(partial(self._first, "held_out", held_out_limit or None))

    def __getattr__(self, name: str) -> Any:
        # An object that is copied or unpickled has no attributes yet.
        if name == "_task":
            raise AttributeError(name)
        return getattr(self._task, name)

    def _first(self, what: str, limit: int | None) -> Sequence[Prompt]:
        try:
            prompts: Sequence[Prompt] = getattr(self._task, what)()
            prompts = prompts if limit is None else prompts[:limit]
            return [self._opening(prompt) for prompt in prompts] if has_environment(self._task) else prompts
        except (MemoryError, TbaError):
            raise
        # User code may raise anything.
        except Exception as error:
            own = getattr(sys.modules.get(type(self._task).__module__), "__file__", None)
            frames = traceback.extract_tb(error.__traceback__)[1:]
            last = next((frame for frame in reversed(frames) if frame.filename == own), None)
            place = f" at {last.filename}:{last.lineno}" if last else ""
            raise TaskError(f"task {self.name}: {what}() failed{place}: {named(error)}") from error

    def _opening(self, prompt: Prompt) -> Prompt:
        """Return a prompt as an episode begins with it, with its text as a message. Raises TaskError for token ids."""
        if not has_environment(self._task, prompt):
            return prompt
        if prompt.ids:
            raise TaskError(f"task {self.name}: the prompt {prompt.key!r} has token ids and an environment: use a text")
        return replace(prompt, messages=[("user", prompt.text)]) if prompt.text and not prompt.messages else prompt


def least_reward(task: Task, prompt: Prompt | None = None) -> float:
    """Return the lowest reward that a task gives, or a mixture for a prompt. Raises TaskError if it is no number."""
    task = task if prompt is None else _tasks_of(task, prompt)[0]
    least = getattr(task, "least_reward", 0.0)
    try:
        return float(least)
    except (TypeError, ValueError):
        raise TaskError(f"task {task.name}: least_reward is {least!r}: state a number") from None


def name_of(task: Task, prompt: Prompt) -> str:
    """Return the name of the task that a prompt belongs to: of a mixture, the label of one of its tasks."""
    mixture: Any = task
    return str(mixture.label_of(prompt)) if hasattr(task, "label_of") else task.name


def has_environment(task: Task, prompt: Prompt | None = None) -> bool:
    """Return whether a task has episodes; of a mixture, whether the prompt's task has, or without one any of them."""
    return any(callable(getattr(part, "environment", None)) for part in _tasks_of(task, prompt))


def is_random(task: Task, prompt: Prompt | None = None) -> bool:
    """Return whether environments are not a function of prompt key and replies; of a mixture as `has_environment`."""
    return any(getattr(part, "random", False) is True for part in _tasks_of(task, prompt))


def scores_concurrently(task: Task) -> bool:
    """Return whether `score` is a coroutine function; of a mixture, whether that of one of its tasks is."""
    return any(inspect.iscoroutinefunction(getattr(part, "score", None)) for part in _tasks_of(task, None))


def _tasks_of(task: Task, prompt: Prompt | None) -> Sequence[Task]:
    """Return the task; of a mixture, the prompt's task, or without a prompt all of them."""
    mixture: Any = task
    if not hasattr(task, "label_of"):
        return [task]
    return [mixture.tasks[mixture.label_of(prompt)]] if prompt is not None else [*mixture.tasks.values()]


def fingerprint(prompts: Sequence[Prompt], settings: str = "") -> str:
    """Return the hex sha256 of all prompts, in order, and of the settings that render them (`PromptRenderer`)."""
    digest = hashlib.sha256(settings.encode())
    for prompt in prompts:
        digest.update(f"{prompt.key}\0{prompt.text}\0{prompt.answer}\0".encode())
        if prompt.messages or prompt.ids:
            digest.update(json.dumps([prompt.messages, prompt.ids]).encode())
        if prompt.template_kwargs or prompt.accepted:
            digest.update(json.dumps([prompt.template_kwargs, prompt.accepted], default=str).encode())
        if prompt.demonstration:
            digest.update(f"demonstration\0{prompt.demonstration}\0".encode())
    return digest.hexdigest()


def check_prompts(task: Task) -> None:
    """Raise TaskError if there are no training prompts, two of them have the same key, or one cannot be scored."""
    first: dict[str, int] = {}
    for number, prompt in enumerate(task.prompts(), 1):
        if (earlier := first.setdefault(prompt.key, number)) != number:
            raise TaskError(
                f"task {task.name}: the prompts {earlier} and {number} have the same key {prompt.key!r}: give every "
                "prompt a key of its own"
            )
    if not first:
        raise TaskError(f"task {task.name} has no prompts")
    check_answers(task)


def check_answers(task: Task) -> None:
    """Raise TaskError if the task says that some of its prompts cannot be scored."""
    if (check := getattr(task, "check", None)) is not None:
        check()


def check_rendering(task: Task, prompts: Sequence[Prompt], renderer: PromptRenderer, context: int | None) -> None:
    """Raise TaskError for a prompt that cannot be rendered or leaves no room for a response.

    `context` is the most tokens of prompt and response, None if not known. Logs a warning if prompts have the date.
    """
    for prompt in prompts:
        try:
            # A token is at least one byte of the text, so only long texts are tokenised here.
            most = len(prompt.ids) or len(renderer.text(prompt).encode("utf-8", "replace")) + _ADDED
            tokens = len(renderer.ids(prompt)) if context is not None and most >= context else 0
            renderer.require_complete(prompt)
        except ValueError as error:
            raise TaskError(f"task {task.name}: the prompt {prompt.key!r} cannot be rendered: {error}") from error
        if context is not None and tokens >= context:
            raise TaskError(
                f"task {task.name}: the prompt {prompt.key!r} has {tokens} tokens, and the context of the model has "
                f"room for {context}, with at least one of a response: drop the prompt, or raise search.max_model_len"
            )
    if prompts:
        renderer.warn_of_date(prompts[0])
