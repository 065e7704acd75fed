"""Environments of other libraries as tasks: Gymnasium by id, and classes of the shapes of SkyRL-gym's and TRL's.

A class is recognised by its methods, and its package is not imported. docs/episodes.md has a recipe for each.
"""

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tba.common.errors import MissingExtra, TaskError
from tba.common.rendering import Message, as_map
from tba.searcher.tasks.rows import RowsTask, key_of, question_in
from tba.searcher.tasks.task import CORRECT, PARSE_ERROR, Environment, ListedTask, Prompt, Turn

_QUESTION = "{prompt}"
_PROMPT_COLUMNS = ("prompt", "question", "problem", "messages")
_SEED_BITS = 31


def is_environment_class(kind: object) -> bool:
    """Return whether an object is a class with `init` and `step`, as SkyRL-gym's, or with `reset`, as TRL's."""
    return isinstance(kind, type) and (hasattr(kind, "reset") or (hasattr(kind, "init") and hasattr(kind, "step")))


class ClassTask(RowsTask):
    """Episodes of a class of the shape of SkyRL-gym's BaseTextEnv or TRL's environments, one for each row of data.

    The column of the prompts is the first of prompt, question, problem and messages. `options` are arguments of the
    class; SkyRL's gets them as `env_config`, and the row without its prompt as `extras`. Raises TaskError if the class
    only has tools, or the data is missing or malformed.
    """

    place_of_parts = "the metadata that step() returns"

    def __init__(self, kind: type, train: str, test: str = "", **options: Any) -> None:
        self.name = kind.__name__
        if not hasattr(kind, "step"):
            tools = [name for name, _ in inspect.getmembers(kind, callable) if name[0] != "_" and name != "reset"]
            raise TaskError(
                f"{self.name} has no step(reply), only tools to call ({', '.join(tools) or 'none'}): give it a step "
                "that parses the reply and calls them"
            )
        if not train:
            raise TaskError(f"task.train is not set, and {self.name} needs a row for each prompt: name a data file")
        self._kind = kind
        self._options = options
        self._rows: dict[str, tuple[dict[str, Any], str]] = {}
        self._load(train, test, [_PROMPT_COLUMNS])

    def environment(self, prompt: Prompt) -> Environment:
        """Return a new environment for the row of a prompt."""
        row, column = self._rows[prompt.key]
        arguments = self._options
        if hasattr(self._kind, "init"):
            extras = {name: value for name, value in row.items() if name != column}
            given = {"env_config": _Settings(self._options), "extras": extras}
            arguments = {name: given[name] for name in given.keys() & inspect.signature(self._kind).parameters.keys()}
        return _Adapter(self._kind(**arguments), row)

    def _prompt(self, row: Any, *columns: str) -> Prompt:
        # Rows may differ in what the environment alone sees.
        key = key_of(json.dumps(row, sort_keys=True, default=str))
        self._rows[key] = row, columns[0]
        return Prompt(**question_in(row, columns[0], _QUESTION, _QUESTION) | {"key": key})


class _Settings(dict[str, Any]):
    """Settings also by attribute, as SkyRL's environments read them."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.__dict__ = self


class _Adapter:
    """An environment with SkyRL's `init`, or TRL's `reset`, and with a `step` that gets the reply alone."""

    def __init__(self, environment: Any, row: Mapping[str, Any]) -> None:
        self._environment = environment
        self._row = row
        self._is_trl = not hasattr(environment, "init")
        self._rewarded = 0.0

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        """Return what `init` adds to the prompt. Raises ValueError if it changes the prompt, whose tokens are fixed."""
        if self._is_trl:
            text = await _awaited(self._environment.reset(**self._row))
            return [] if text is None else [("user", text)]
        given = [as_map(message) for message in prompt.messages]
        conversation, _ = await _awaited(self._environment.init([dict(message) for message in given]))
        if conversation[: len(given)] != given:
            raise ValueError("init() changes the messages of the prompt: write the rows so that it only adds some")
        added: list[Any] = conversation[len(given) :]
        return added

    async def step(self, reply: str, finished: bool) -> Turn:
        """Return the turn. If the environment owns its reward, that of the turn is what the reward has risen by.

        The result of a step is a text, None, a map or an object. The numbers of its metadata become parts.
        """
        result = await _awaited(self._environment.step(reply))
        if isinstance(result, str | None):
            result = {"observation": result}
        fields = result if isinstance(result, Mapping) else vars(result)
        messages = fields.get("observations", fields.get("observation")) or []
        reward, done = fields.get("reward") or 0.0, bool(fields.get("done"))
        if hasattr(self._environment, "get_reward"):
            total = float(await _awaited(self._environment.get_reward()))
            reward, self._rewarded = total - self._rewarded, total
        if self._is_trl:
            done |= bool(getattr(self._environment, "done", False))
        metadata = (fields.get("metadata") or {}).items()
        parts = {name: float(value) for name, value in metadata if isinstance(value, int | float)}
        return Turn([("user", messages)] if isinstance(messages, str) else messages, reward, done, parts)

    async def close(self) -> None:
        await _awaited(getattr(self._environment, "close", lambda: None)())


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


# ---------------------------------------------------------------- Gymnasium

# The names of the actions by number, and what the picture shows.
_KNOWN = {
    "FrozenLake": (
        "left down right up",
        "Walk from S to G on the ice F and into no hole H. You are where the brackets are.",
    ),
    "CliffWalking": ("up right down left", "Walk from x to T along the cliff C, and not into it. o is free ground."),
    "Taxi": (
        "south north east west pickup dropoff",
        "Bring the passenger to the destination and drop them off. [ ] is the taxi, or [X] at a stop X; < > is the "
        "passenger's stop, { } the destination; cars drive through : and not through |.",
    ),
}
_COLOUR = re.compile(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m", re.DOTALL)
_WORD = re.compile(r"[a-z_]+|\d+")


class GymnasiumTask(ListedTask):
    """A Gymnasium environment with discrete actions that renders as text, such as FrozenLake-v1.

    The keys of prompts are numbers, and the seed of an episode is a hash of its key. A prompt has the `instruction`,
    the picture after the reset and the names of the actions. A reply means the last action that it names, by name or
    number; one that names none ends the episode with `parse_error` 1. `correct` is 1 if the environment terminates with
    a positive reward, or at CliffWalking's goal. `actions` are names, separated by spaces. With `map_size`, each key of
    FrozenLake has a map of its own. Other options are arguments of `gymnasium.make`.

    The luck of an environment, such as that of a slippery lake, is a function of the key and the actions, so episodes
    can be repeated. But the key is all that decides it, and no prompt reveals it: to the policy it is luck all the
    same, which the samples of one group share if they act alike. What this costs with stale data is in
    docs/objectives.md. Raises MissingExtra without gymnasium, TaskError if it does not make the environment.
    """

    name = "gymnasium"

    def __init__(
        self,
        id: str,
        prompts: int = 1000,
        held_out: int = 100,
        instruction: str = "",
        actions: str = "",
        map_size: int = 0,
        **options: Any,
    ) -> None:
        try:
            import gymnasium
        except ImportError:
            raise MissingExtra("gymnasium", "gymnasium") from None
        self._gymnasium: Any = gymnasium
        self._id, self._options, self._map_size = id, options, map_size
        # To make one takes up to 100 times as long as to reset it.
        self._free: list[Any] = []
        number = getattr(self._reset("0").action_space, "n", None)
        if number is None:
            raise TaskError(f"task gymnasium: {id} has no discrete actions")
        names, rules = _KNOWN.get(id.rpartition("-v")[0], ("", ""))
        self._actions = (actions or names).split() or [str(action) for action in range(number)]
        if len(self._actions) != number:
            raise TaskError(f"task gymnasium: {id} has {number} actions, and task.options.actions {len(self._actions)}")
        self.example_replies = self._actions
        self._rules = instruction or f"{rules} Answer with one action.".strip()
        self._prompts = [self._prompt(str(key)) for key in range(prompts)]
        self._held_out = [self._prompt(str(key)) for key in range(prompts, prompts + held_out)]

    def environment(self, prompt: Prompt) -> Environment:
        """Return an environment that was reset with the seed of the prompt."""
        return _Gymnasium(self._reset(prompt.key), self._actions, self._released)

    def _prompt(self, key: str) -> Prompt:
        made = self._reset(key)
        text = f"{self._rules}\n{observation(made, self._actions)}"
        self._released(made)
        return Prompt(key, text, messages=[("user", text)])

    def _reset(self, key: str) -> Any:
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()) >> (256 - _SEED_BITS)
        made = self._free.pop() if self._free else self._made(seed)
        made.reset(seed=seed)
        return made

    def _released(self, made: Any) -> None:
        # A map is of no use to another key.
        if not self._map_size:
            self._free.append(made)

    def _made(self, seed: int) -> Any:
        options = dict(self._options)
        if self._map_size:
            from gymnasium.envs.toy_text.frozen_lake import generate_random_map

            options["desc"] = generate_random_map(self._map_size, seed=seed)
        try:
            return self._gymnasium.make(self._id, render_mode="ansi", disable_env_checker=True, **options)
        except (self._gymnasium.error.Error, TypeError) as error:
            raise TaskError(f"task gymnasium: {self._id} is not made: {error}") from error


@dataclass(eq=False)
class _Gymnasium(Environment):
    made: Any
    actions: Sequence[str]
    released: Callable[[Any], None]

    def step(self, reply: str, finished: bool) -> Turn:
        action = action_in(reply, self.actions)
        if action is None:
            return Turn(done=True, parts={PARSE_ERROR: 1.0, CORRECT: 0.0})
        _, reward, terminated, truncated, _ = self.made.step(action)
        if terminated or truncated:
            # CliffWalking terminates at its goal alone, and gives no positive reward.
            is_goal = terminated and (reward > 0 or self.made.spec.id.startswith("CliffWalking"))
            return Turn((), reward, True, {PARSE_ERROR: 0.0, CORRECT: float(is_goal)})
        return Turn([("user", observation(self.made, self.actions))], reward, parts={CORRECT: 0.0})

    def close(self) -> None:
        self.released(self.made)


def action_in(reply: str, actions: Sequence[str]) -> int | None:
    """Return the number of the last action that a reply names after its thoughts, None if it names none."""
    numbers = {name.lower(): number for number, name in enumerate(actions)}
    numbers |= {str(number): number for number in range(len(actions)) if str(number) not in numbers}
    found = [numbers[word] for word in _WORD.findall(reply.rpartition("</think>")[2].lower()) if word in numbers]
    return found[-1] if found else None


def observation(made: Any, actions: Sequence[str]) -> str:
    """Return an environment's picture, with brackets in place of colours, and its actions."""
    picture = _COLOUR.sub(lambda part: _bracketed(*part.groups()), made.render()).strip("\n")
    return f"{picture}\nActions: {', '.join(actions)}"


def _bracketed(codes: str, text: str) -> str:
    """Mark a background, a bold text or another one."""
    numbers = codes.split(";")
    first, last = "[]" if any(code.startswith("4") for code in numbers) else "<>" if "1" in numbers else "{}"
    return f"{first}{text}{last}"
