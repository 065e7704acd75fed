"""[task] and [reward_model]: prompts, and how responses are scored."""

import re
from itertools import pairwise
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import Field, FiniteFloat, SecretStr, field_validator, model_validator

from tba.common.config.section import BearerToken, NonNegative, Positive, PositiveFloat, Section, matching
from tba.common.wire.fields import MAX_PHASES

MIXTURE = "mixture"
# The part of the reward that is the reward model's logit.
MODEL_PART = "reward_model"
TASKS = ("arithmetic", "answers", "calculator", "gsm8k", "guess", "gymnasium", "math", "reasoning_gym", MIXTURE)
FROM_FILES = ("answers", "gsm8k", "math")
_WITHOUT_CODE = ("answers", "arithmetic", "calculator", "gsm8k", "guess")
_OWN_TASK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*|[^:]+\.py(:[A-Za-z_]\w*)?")
_LARGEST_REWARD = 1e9
# What becomes of a response that was cut off.
_Unscored = Literal["score", "mask"]
Truncated = _Unscored | Annotated[float, Field(ge=-_LARGEST_REWARD, le=_LARGEST_REWARD)]


def server_address(url: str) -> str:
    """Return the address of an HTTP server without a slash at its end. Raises ValueError if it is not one."""
    # Reading the port checks it.
    is_address = re.fullmatch(r"https?://[^\s/@?#]+(/[^\s@?#]*)?", url) and urlsplit(url).port != 0
    if not (is_address and urlsplit(url).hostname):
        raise ValueError("write the address of a server, such as http://node0:8000, without a name or a key")
    return url.rstrip("/")


class TaskSource(Section):
    """One task: where its prompts and its scorer come from."""

    name: str = "arithmetic"
    """answers, arithmetic, calculator, gsm8k, guess, gymnasium, math, mixture, reasoning_gym, or your own:
    `path/to/file.py`, `path/to/file.py:Class`, or `package.module:Class` on PYTHONPATH (docs/tasks.md)."""
    train: str = ""
    """The data of answers, gsm8k, math, and environments like SkyRL-gym's or TRL's: a jsonl, csv or parquet file, or a
    hub id such as openai/gsm8k."""
    test: str = ""
    """The held-out file; empty uses the test split of the hub id."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the task's class (docs/tasks.md)."""
    limit: NonNegative = 0
    """Use only this many training prompts, from the first; 0: all."""
    held_out_limit: NonNegative = 0
    """Use only this many held-out prompts, from the first; 0: all."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name == "redteam":
            raise ValueError('it is a task of an example now: name = "examples/redteam/redteam.py"')
        if name not in TASKS and not _OWN_TASK.fullmatch(name):
            raise ValueError(
                f"no task has this name: use {', '.join(TASKS)}, or your own as `path/to/file.py` or "
                "`package.module:Class`"
            )
        return name

    @property
    def reads_files(self) -> bool:
        """Whether the task reads its prompts from `train` and `test`. The others bring their own."""
        return self.name in FROM_FILES


class MixturePart(TaskSource):
    """One task of a mixture."""

    label: Annotated[
        str, matching(r"|[A-Za-z_][\w-]{,39}", "up to 40 letters, digits, dashes and underscores, first a letter")
    ] = ""
    """Its name in prompt keys, reward parts and tables; empty is the name of the task."""
    weight: PositiveFloat | None = None
    """Its share of the prompts of an epoch, relative to the other weights."""


class Phase(Section):
    """One phase of the rewards."""

    until: Positive
    """The policy version at which the phase ends."""
    weights: Annotated[dict[str, FiniteFloat], Field(min_length=1)]
    """The reward of a response is the sum of these weights times the parts of its reward; the part `reward` is the
    reward that it would have without phases."""


class TaskSection(TaskSource):
    """The prompts, and how responses are scored."""

    mixture: tuple[MixturePart, ...] = ()
    """name = "mixture": its tasks, as tables `[[task.mixture]]` with name, train, test, options, limit, held_out_limit,
    label (its name in prompt keys and reward parts) and weight (its share of an epoch)."""
    phases: tuple[Phase, ...] = ()
    """Other rewards at first, as tables `[[task.phases]]`: until policy version `until`, the reward is the sum of
    `weights`, such as `{ reward_model = 0.5 }`, times the parts of the reward, of which `reward` is the whole
    (docs/rewards.md)."""
    template: Literal["auto", "chat", "raw"] = "auto"
    """How prompts are rendered (docs/prompts.md). chat: by the model's chat template, a text as one message of the
    user; raw: as they are; auto: chat for messages if the tokenizer has a chat template, else raw."""
    system: str = ""
    """A system message for each prompt that has none of its own; needs a chat template."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as `{ enable_thinking = false }` for Qwen 3."""
    truncated: Truncated = "score"
    """The reward of a cut-off response. score: that of the task; mask: it is not trained on; a number: this number."""
    reward_workers: NonNegative = 2
    """Processes per searcher that score responses; 0: the searcher itself, without limits."""
    reward_concurrency: Positive = 32
    """Responses that one worker scores at a time if the task's `score` is a coroutine."""
    reward_seconds: PositiveFloat = 10.0
    """Seconds for the score of a response, or for one call of an environment; then the row gets an error."""
    episode_seconds: PositiveFloat = 600.0
    """Seconds for an episode, checked after each turn."""
    reward_memory_mib: Annotated[int, Field(ge=128)] = 1024
    """MiB of memory of one reward worker."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.name == MIXTURE) != bool(self.mixture):
            raise ValueError('task.name = "mixture" and the tables [[task.mixture]] need each other')
        if any(part.name == MIXTURE for part in self.mixture):
            raise ValueError("task.mixture contains a mixture: name its tasks directly")
        if len({part.weight is None for part in self.mixture}) > 1:
            raise ValueError("task.mixture: give every task a weight, or none")
        if self.template == "raw" and (self.system or self.template_kwargs):
            raise ValueError(
                'task.system and task.template_kwargs have no effect with task.template = "raw": remove them'
            )
        return self

    @field_validator("phases")
    @classmethod
    def _check_phases(cls, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        if any(later.until <= one.until for one, later in pairwise(phases)):
            raise ValueError("task.phases: give each phase a larger `until` than the one before")
        if len(phases) > MAX_PHASES:
            raise ValueError(f"task.phases has {len(phases)} phases: at most {MAX_PHASES} are possible")
        return phases

    @field_validator("truncated", mode="before")
    @classmethod
    def _check_truncated(cls, value: Any) -> Any:
        if isinstance(value, str) and value not in get_args(_Unscored):
            raise ValueError('write "score", "mask", or the reward of a response that was cut off, such as -1.0')
        return value

    @property
    def sources(self) -> tuple[TaskSource, ...]:
        """The tasks of a mixture, or the task itself."""
        return self.mixture or (self,)

    @property
    def checked_by_loading(self) -> bool:
        """Whether only loading it shows that it works: your own code, or a task with options or a library."""
        return any(source.name not in _WITHOUT_CODE or source.options for source in self.sources)


class RewardModelSection(Section):
    """A sequence classifier with one label, here or behind an HTTP server, whose logit is added to the reward of the
    task (docs/rewards.md)."""

    path: str = ""
    """A Hugging Face model directory or hub id, loaded by each searcher."""
    url: str = ""
    """Instead of `path`: an HTTP server with the model, such as http://node0:8000."""
    api_key: BearerToken = SecretStr("")
    """With `url`: a bearer token, not stored with the run; TBA_REWARD_MODEL__API_KEY keeps it out of the file."""
    template: Literal["concatenation", "chat"] = "concatenation"
    """concatenation: prompt and response as one text; chat: messages by its tokenizer's chat template."""
    api: Literal["classify", "pooling", "score"] = "classify"
    """With `url`: the route of vLLM; score, for cross-encoders, sends two texts."""
    served_model: str = ""
    """With `url`: the model's name at the server, if it has several."""
    concurrency: Positive = 64
    """With `url`: maximum requests in flight of each searcher, with one response each."""
    device: Annotated[str, matching(r"auto|cpu|cuda:\d+", "auto, cpu or cuda:NUMBER")] = "auto"
    """Its device. auto is the searcher's own, where search.gpu_memory_utilization must leave memory for it; `cuda:1` is
    GPU 1 of nvidia-smi."""
    time_limit_seconds: PositiveFloat = 60.0
    """Seconds for a forward pass; then its rows get an error and the process is replaced. With `url`: for a response's
    score, retries included."""
    weight: float = 1.0
    """The reward is the task's plus this weight times the logit."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        return server_address(url) if url else url

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.path and self.url:
            raise ValueError("path and url both name a model: remove one")
        if self.url and self.api == "score" and self.template == "chat":
            raise ValueError('api = "score" sends prompt and response as two texts: remove template = "chat"')
        return self

    @property
    def configured(self) -> bool:
        """Whether there is a model."""
        return bool(self.path or self.url)

    @property
    def source(self) -> str:
        """The path or the URL of the model."""
        return self.path or self.url
