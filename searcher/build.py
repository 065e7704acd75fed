"""Build the parts of a searcher, an evaluation or `tba generate` from the configuration, and check what they load."""

import asyncio
import contextlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tba.common.config import Config, LoraSection, RewardModelSection
from tba.common.config.paths import check_adapters
from tba.common.config.root import check_batches
from tba.common.config.search import TRANSFORMERS_IN_FLIGHT
from tba.common.errors import ConfigError, MissingExtra, TaskError
from tba.common.rendering import PromptRenderer
from tba.common.run_snapshots import find_source
from tba.common.system.process import importing
from tba.common.terminal import need
from tba.common.weights.model_files import local_model, model_directory, model_here, read_json
from tba.common.weights.pretrained import check_same_tokens, load_tokenizer
from tba.searcher.engines.engine import Engine
from tba.searcher.engines.stopping import Stopping, read_stopping, unstopped_turn
from tba.searcher.scoring.rewards import ModelScorer, Rewards
from tba.searcher.tasks import load_task
from tba.searcher.tasks.task import Prompt, Task, check_prompts, check_rendering, has_environment, is_random

_MEASURED_PROMPTS = 256
_SERVER_SECONDS = 3.0
_POLICY = "search.policy"


def context_of(config: Config) -> int | None:
    """Return the largest number of tokens of prompt and response, None if only the engine knows it."""
    model = read_json(model_directory(config.model.path) / "config.json")
    model = model.get("text_config", model)
    positions: int | None = model.get("max_position_embeddings")
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) in ("longrope", "su"):
        # Longer sequences are rotated in another way: `Rotation`.
        key = "original_max_position_embeddings"
        positions = rope.get(key) or model.get(key) or positions
    if config.search.engine == "vllm":
        # vLLM derives the context of models with scaled positions.
        scaled = model.get("rope_scaling") or "factor" in (model.get("rope_parameters") or {})
        return config.search.max_model_len or (None if scaled else positions)
    return positions


class LoadedTask(NamedTuple):
    """A task with what renders its prompts and what ends their responses."""

    task: Task
    renderer: PromptRenderer
    stopping: Stopping


def load(config: Config, task: Task | None = None) -> LoadedTask:
    """Load the task, unless it is given, and the tokenizer of the model."""
    task = task or load_task(config.task)
    renderer = PromptRenderer(load_tokenizer(model_directory(config.model.path)), config.task)
    return LoadedTask(task, renderer, read_stopping(config, renderer.tokenizer))


def make_rewards(config: Config, task: Task, device: str, stop: Callable[[], bool]) -> Rewards:
    """Start the workers that score. Raises ConfigError for a reward model with a task that has episodes."""
    check_scored(config, task)
    model = ModelScorer(config.reward_model, device, stop) if config.reward_model.configured else None
    return Rewards(task, config.task, model, weight=config.reward_model.weight)


def check_scored(config: Config, task: Task) -> None:
    """Raise ConfigError if a reward model would have to score episodes."""
    if config.reward_model.configured and has_environment(task):
        raise ConfigError(
            f"[reward_model] scores one response to a prompt, and task {task.name} has episodes of several turns: "
            "remove the reward model, or call it in the environment"
        )


def mean_tokens(prompts: Sequence[Prompt], renderer: PromptRenderer) -> int:
    """Return the mean length of the first prompts, in tokens."""
    first = prompts[:_MEASURED_PROMPTS]
    return round(np.mean([len(renderer.ids(prompt)) for prompt in first])) if first else 0


def make_engine(
    config: Config, stopping: Stopping, device: str, name: str, *, prompt_tokens: int = 0, kept: bool = False
) -> Engine:
    """Start the engine that the configuration names. `prompt_tokens` is the length of a typical prompt.

    With `kept` it must tell which tokens were left to sample from. Raises MissingExtra if its packages are not
    installed, ConfigError if it cannot.
    """
    # Derived from the name, so that the searchers of a run explore differently.
    seed = int(np.random.SeedSequence([config.run.seed, *name.encode()]).generate_state(1)[0])
    if config.search.engine == "vllm":
        check_adapters(config)
        from tba.searcher.engines.vllm.engine import VllmEngine

        return VllmEngine(
            config.model,
            config.search if kept else config.search.model_copy(update={"top_k": 0}),
            seed=seed,
            canary_tolerance=config.canary_tolerance,
            lora_rank=config.lora.rank if config.lora.publish == "adapter" else 0,
            prompt_tokens=prompt_tokens,
            stopping=stopping,
        )
    try:
        with importing():
            from tba.searcher.engines.transformers_engine import TransformersEngine
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "transformers", "train") from error
    return TransformersEngine(
        config.model.path,
        dtype=config.model.dtype,
        device=device,
        max_in_flight=TRANSFORMERS_IN_FLIGHT if config.search.max_in_flight == "auto" else config.search.max_in_flight,
        seed=seed,
        canary_tolerance=config.canary_tolerance,
        stopping=stopping,
    )


def find_policy(config: Config) -> Path | None:
    """Return the model directory of `search.policy`, None if it is empty.

    Raises ConfigError if its tokens are not those of `model.path`, UsageError for a version that is not kept.
    """
    named = config.search.policy
    if not named:
        return None
    is_version = re.fullmatch(r"v\d+", named)
    directory = local_model(str(find_source(config, None, int(named[1:]))) if is_version else named, setting=_POLICY)
    if directory is None:
        raise ConfigError(f"{_POLICY} {named} is no directory here: `hf download {named}` makes one of the hub's model")
    names = (f"{_POLICY} {named}", "model.path", "an explorer")
    # Prompts and end tokens are those of model.path: it may not have further tokens either.
    check_same_tokens(directory, model_directory(config.model.path), names=names, further=False)
    return directory


def served(config: Config, directory: Path) -> Config:
    """Return the configuration of an engine that serves a model directory instead of the run's policy."""
    model = config.model.model_copy(update={"path": str(directory)})
    return config.model_copy(update={"model": model, "lora": LoraSection()})


def check_task_and_prompts(config: Config) -> str:
    """Raise TbaError for a task that does not load, whose prompts cannot be used, or that has too few for a batch.

    Where the model and transformers are installed, also for a prompt that cannot be rendered or that the context has no
    room for, and for malformed end tokens. Returns a warning if the template ends a turn with another token, the
    tokenizer does not know the prompts, or the objective is wrong for a random environment, else "".
    """
    task = load_task(config.task)
    check_scored(config, task)
    check_prompts(task)
    check_number_of_prompts(config, task)
    with contextlib.suppress(MissingExtra):
        if model_here(config.model.path) is not None:
            return check_loaded(config, load(config, task), [*task.prompts(), *task.held_out()])
    return _explained_luck(config, task)


def check_loaded(config: Config, loaded: LoadedTask, prompts: Sequence[Prompt]) -> str:
    """Raise TaskError for a prompt that cannot be rendered or that the context has no room for; return warnings."""
    task, renderer, stopping = loaded
    check_rendering(task, prompts, renderer, context_of(config))
    if config.search.guided and not any(one.demonstration and not has_environment(task, one) for one in prompts):
        raise TaskError(
            f"task {task.name} has no prompt with a demonstration, with which guided responses begin: give it some "
            "(docs/tasks.md), or set search.guided = 0"
        )
    of_prompts = unstopped_turn(stopping, renderer, prompts), renderer.unknown_tokens(prompts, config.model.path)
    return "; ".join(filter(None, (_explained_luck(config, task), *of_prompts)))


def _explained_luck(config: Config, task: Task) -> str:
    """Return a warning if the objective would train on stale data of a random environment to explain its luck."""
    plays_luck = has_environment(task) and is_random(task)
    if not plays_luck or not config.objective.explains_luck or config.max_staleness == 0:
        return ""
    return (
        f"the environments of task {task.name} are random, and on stale data objective.name = {config.objective.name} "
        "explains their luck by the actions after it (docs/objectives.md, several turns): set objective.name = tb with "
        'objective.log_z = "turn", or tba_prime, or buffer.max_staleness = 0'
    )


def check_number_of_prompts(config: Config, task: Task | None = None) -> None:
    """Raise TaskError if no batch can ever be sampled of as many prompts, or if the task cannot be loaded."""
    task = task or load_task(config.task)
    try:
        check_batches(config, len(task.prompts()))
    except ValueError as error:
        raise TaskError(f"task {task.name}: {error}") from error


def check_reward_model(config: RewardModelSection) -> str:
    """Return a description of the reward model. Imports torch, which only such a model needs on this machine.

    Of one behind a server, a first score is asked for. Raises TbaError if it cannot be used.
    """
    if config.url:
        return asyncio.run(_check_server(config))
    need("torch", "train")
    need("transformers", "train")
    from tba.searcher.scoring.classifier import check_files

    return check_files(config)


async def _check_server(config: RewardModelSection) -> str:
    try:
        from tba.searcher.scoring.http_model import PROBE, HttpModel
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "httpx2", "train") from error
    async with contextlib.aclosing(HttpModel(config, config.api_key.get_secret_value())) as model:
        await model.score(PROBE, "a", seconds=_SERVER_SECONDS)
    return f"{config.url} scores by {config.api}"
