"""Procedural problems of reasoning-gym (Stojanovski et al. 2025, arXiv 2505.24760), with its scorers.

The problems are made once per process that needs them, in a child process, and each prompt carries its problem, so
that a reward worker scores what the searcher generated. The child is `python -m tba.searcher.tasks.reasoning`: it reads
`Items` as JSON on stdin, and prints [training problems, held-out problems] as JSON on stdout. With PYTHONHASHSEED = 0
the problems depend on nothing but the settings and the version of reasoning-gym.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from tba.common.errors import MissingExtra, TaskError
from tba.common.log import get_logger
from tba.searcher.tasks.rows import key_of
from tba.searcher.tasks.task import CORRECT, Prompt, Reward

log = get_logger(__name__)

_TEMPLATE = "{question}\n"
_OPEN, _CLOSE = "<answer>", "</answer>"
_GENERATION_SECONDS = 600
# Keys of a generator's table that are not settings of the generator.
_WEIGHT = "weight"
# Problems that are made for each one that is asked for, before a generator counts as exhausted.
_ATTEMPTS = 4
# Between the seeds of training and of held-out problems.
_SEED_DISTANCE = 1_000_000_007
_TUPLE, _DICT = "!tuple", "!dict"
_Generators = str | Sequence[str] | Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Items:
    """The problems to make: (weight, settings) by generator, their numbers, and the seed."""

    generators: Mapping[str, tuple[float, Mapping[str, Any]]]
    size: int
    held_out_size: int
    seed: int

    @property
    def counts(self) -> Mapping[str, tuple[int, ...]]:
        """(training, held-out) problems of each generator, in proportion to the weights, at least one of each."""
        total = sum(weight for weight, _ in self.generators.values())
        shares = {name: weight / total for name, (weight, _) in self.generators.items()}
        sizes = (self.size, self.held_out_size)
        return {
            name: tuple(max(1, round(size * share)) if size else 0 for size in sizes) for name, share in shares.items()
        }


class ReasoningGymTask:
    """Problems of one generator or several. Raises TaskError if reasoning-gym refuses them, MissingExtra.

    `generators` is a name, a list of names, or a table of generators with their settings, in which `weight` (1 without
    it) is a generator's share of the problems. `size` and `held_out_size` are numbers of problems; `seed` chooses them,
    and the held-out ones come from another seed and have other questions. `prompt` is the text of a prompt, with the
    question in place of `{question}`.
    """

    name = "reasoning_gym"

    def __init__(
        self,
        generators: _Generators,
        size: int = 1000,
        held_out_size: int = 100,
        seed: int = 0,
        prompt: str = _TEMPLATE,
    ) -> None:
        try:
            import reasoning_gym
        except ImportError:
            raise MissingExtra("reasoning_gym", "reasoning") from None
        self._library = reasoning_gym
        if "{question}" not in prompt:
            raise TaskError(
                f"task.options.prompt = {prompt!r} of reasoning_gym has no {{question}}: write where it stands"
            )
        self._settings = _settings(generators)
        self._sizes, self._seed, self._template = (size, held_out_size), seed, prompt
        self._scorers: dict[str, Callable[..., float]] = {}

    def prompts(self) -> Sequence[Prompt]:
        return self._made[0]

    def held_out(self) -> Sequence[Prompt]:
        return self._made[1]

    def score(self, prompt: Prompt, response: str, finished: bool) -> Reward:
        """Return the score of the generator's own scorer, 0 to 1; 0 for a response that was cut off.

        `correct` is 1 for a full score: some scorers give a little for a wrong answer of the right form. An answer for
        which the scorer fails, as some do on what is not a number, is wrong if it can score the problem's own answer.
        Raises what the scorer raises if it cannot: it then measures nothing.
        """
        problem = json.loads(prompt.answer)
        scorer, entry = self._scorer(problem["generator"]), decode_entry(problem["entry"])
        score = 0.0
        if finished:
            try:
                score = _finite(scorer(_answer(response), entry))
            except MemoryError:
                raise
            # The scorers are programs for well-formed answers, and raise many types for others.
            except Exception as error:  # noqa: BLE001
                _finite(scorer(entry["answer"], entry))
                # The error may quote the response: one warning a minute for each generator.
                log.warning("scorer failed", by=problem["generator"], prompt=prompt.key, error=repr(error)[:200])
        return Reward(score, {CORRECT: float(score >= 1), "score": score})

    @cached_property
    def _made(self) -> tuple[list[Prompt], list[Prompt]]:
        training, held_out = _make(Items(self._settings, self._sizes[0], self._sizes[1], self._seed))
        return self._as_prompts(training), self._as_prompts(held_out)

    def _as_prompts(self, problems: Sequence[dict[str, Any]]) -> list[Prompt]:
        return [
            Prompt(
                problem["key"],
                self._template.replace("{question}", problem["question"]),
                json.dumps({name: problem[name] for name in ("generator", "entry")}),
            )
            for problem in problems
        ]

    def _scorer(self, generator: str) -> Callable[..., float]:
        """Return the scorer of a generator with its settings, on which some depend."""
        if generator not in self._scorers:
            _, settings = self._settings[generator]
            dataset = self._library.create_dataset(generator, size=1, seed=self._seed, **settings)
            self._scorers[generator] = dataset.score_answer
        return self._scorers[generator]


def _finite(score: Any) -> float:
    if not math.isfinite(number := float(score)):
        raise ValueError(f"the scorer returned {number}")
    return number


def _answer(response: str) -> str:
    """Return the text in the last pair of `<answer>` tags, or the whole response without one."""
    before, closed, _ = response.rpartition(_CLOSE)
    return (before.rpartition(_OPEN)[2] if closed else response).strip()


def _settings(generators: _Generators) -> dict[str, tuple[float, dict[str, Any]]]:
    if isinstance(generators, str):
        generators = [generators]
    if not isinstance(generators, Mapping):
        generators = {name: {} for name in generators}
    found = {}
    for name, table in generators.items():
        settings = dict(table)
        weight = settings.pop(_WEIGHT, 1.0)
        if not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise TaskError(f"task.options.generators.{name}.weight = {weight!r}: set a positive number")
        found[name] = (float(weight), settings)
    if not found:
        raise TaskError("task.options.generators of reasoning_gym is empty: name at least one")
    return found


def _make(items: Items) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Make all problems in a child process, with hash seed 0: some generators iterate over sets. Raises TaskError."""
    command = [sys.executable, "-m", "tba.searcher.tasks.reasoning"]
    try:
        made = subprocess.run(  # noqa: S603
            command, input=json.dumps(asdict(items)), capture_output=True, text=True, timeout=_GENERATION_SECONDS,
            env={**os.environ, "PYTHONHASHSEED": "0"}, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TaskError(
            f"task reasoning_gym: {items.size + items.held_out_size} problems take longer than {_GENERATION_SECONDS} s "
            "to make: lower task.options.size"
        ) from None
    if made.returncode:
        last = made.stderr.strip().rpartition("\n")[2] or f"exit code {made.returncode}"
        raise TaskError(f"task reasoning_gym: the problems cannot be made: {last}")
    training, held_out = json.loads(made.stdout)
    return training, held_out


def make(items: Items) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the training and the held-out problems. No question occurs twice, in either or in both."""
    training: list[dict[str, Any]] = []
    held_out: list[dict[str, Any]] = []
    for name, (size, held_out_size) in items.counts.items():
        _, settings = items.generators[name]
        seen: set[str] = set()
        # Held-out ones first: a generator with few different questions then has fewer training problems.
        held_out += islice(_different(name, held_out_size, items.seed + _SEED_DISTANCE, settings, seen), held_out_size)
        training += islice(_different(name, size, items.seed, settings, seen), size)
    # The first N, of `task.limit`, then have the proportions of all.
    return sorted(training, key=lambda one: key_of(one["key"])), sorted(held_out, key=lambda one: key_of(one["key"]))


def _different(
    name: str, size: int, seed: int, settings: Mapping[str, Any], seen: set[str]
) -> Iterator[dict[str, Any]]:
    """Yield problems whose questions are not in `seen`, and add them, from a data set in which `size` should be."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(name, size=size * _ATTEMPTS, seed=seed, **settings)
    for index in range(size * _ATTEMPTS):
        entry = dataset[index]
        if entry["question"] in seen:
            continue
        seen.add(entry["question"])
        made = {"generator": name, "question": entry["question"], "entry": encode_entry(entry)}
        yield {"key": f"{name}-{seed}-{index}"} | made


def encode_entry(value: Any) -> Any:
    """Return a value as JSON holds it, with tuples and other keys than strings marked, so that it can be restored."""
    if isinstance(value, tuple):
        return {_TUPLE: [encode_entry(item) for item in value]}
    if isinstance(value, list):
        return [encode_entry(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: encode_entry(item) for key, item in value.items()}
    if isinstance(value, dict):
        return {_DICT: [[encode_entry(key), encode_entry(item)] for key, item in value.items()]}
    # Scalars of NumPy.
    return value.item() if hasattr(value, "item") else value


def decode_entry(value: Any) -> Any:
    """Return the value that `encode_entry` was given."""
    if isinstance(value, list):
        return [decode_entry(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TUPLE}:
        return tuple(decode_entry(value[_TUPLE]))
    if value.keys() == {_DICT}:
        return {decode_entry(key): decode_entry(item) for key, item in value[_DICT]}
    return {key: decode_entry(item) for key, item in value.items()}


if __name__ == "__main__":
    json.dump(make(Items(**json.load(sys.stdin))), sys.stdout)
