"""Build the parts of a searcher, an evaluation or `tba generate` from the configuration."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tba.common.config import Config
from tba.common.config.search import TRANSFORMERS_IN_FLIGHT
from tba.common.errors import ConfigError, MissingExtra
from tba.common.rendering import PromptRenderer
from tba.common.weights.model_files import model_directory, read_json
from tba.common.weights.pretrained import load_tokenizer
from tba.searcher.engines.engine import Engine
from tba.searcher.engines.stopping import Stopping, read_stopping
from tba.searcher.scoring.model_scorer import ModelScorer
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.tasks import load_task
from tba.searcher.tasks.task import Prompt, Task, has_environment

_MEASURED_PROMPTS = 256


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


def load(config: Config) -> LoadedTask:
    """Load the task and the tokenizer of the model."""
    task = load_task(config.task)
    renderer = PromptRenderer(load_tokenizer(model_directory(config.model.path)), config.task)
    return LoadedTask(task, renderer, read_stopping(config, renderer.tokenizer))


def make_rewards(config: Config, task: Task, device: str, stop: Callable[[], bool]) -> Rewards:
    """Start the workers that score: the task's, and the reward model's if one is configured.

    Raises ConfigError for a reward model with a task that has episodes.
    """
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
    config: Config, stopping: Stopping, *, device: str, name: str, prompt_tokens: int = 0, kept: bool = False
) -> Engine:
    """Start the engine that the configuration names. `prompt_tokens` is the length of a typical prompt.

    With `kept` it must tell which tokens were left to sample from. Raises MissingExtra if its packages are not
    installed, ConfigError if it cannot.
    """
    # Derived from the name, so that the searchers of a run explore differently.
    seed = int(np.random.SeedSequence([config.run.seed, *name.encode()]).generate_state(1)[0])
    if config.search.engine == "vllm":
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
