"""Checks of what a searcher loads, for `tba.cli.checks` and the start of a run."""

import asyncio

from tba.common.config import Config, RewardModelSection
from tba.common.config.root import check_batches
from tba.common.errors import MissingExtra, TaskError
from tba.common.rendering import PromptRenderer
from tba.common.terminal import need
from tba.common.weights.model_files import model_here
from tba.common.weights.pretrained import load_tokenizer
from tba.searcher.engines.stopping import read_stopping, unstopped_turn
from tba.searcher.tasks import load_task
from tba.searcher.tasks.task import Task, check_prompts, check_rendering, has_environment, is_random

_SERVER_SECONDS = 3.0


def check_task_and_prompts(config: Config) -> str:
    """Raise TbaError for a task that does not load, whose prompts cannot be used, or that has too few for a batch.

    Where the model and transformers are installed, also for a prompt that cannot be rendered or that the context has no
    room for, and for malformed end tokens. Returns a warning if the template ends a turn with another token, or if the
    objective is wrong for a random environment, else "".
    """
    from tba.searcher.build import check_scored, context_of

    task = load_task(config.task)
    check_scored(config, task)
    check_prompts(task)
    check_number_of_prompts(config, task)
    luck = explained_luck(config, task)
    directory = model_here(config.model.path)
    if directory is None:
        return luck
    try:
        renderer = PromptRenderer(load_tokenizer(directory), config.task)
    except MissingExtra:
        return luck
    every = [*task.prompts(), *task.held_out()]
    check_rendering(task, every, renderer, context_of(config))
    return "; ".join(filter(None, (luck, unstopped_turn(read_stopping(config, renderer.tokenizer), renderer, every))))


def explained_luck(config: Config, task: Task) -> str:
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
        from tba.searcher.scoring.http_model import HttpModel
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "httpx2", "train") from error
    async with HttpModel(config, config.api_key.get_secret_value()) as model:
        await model.try_out(seconds=_SERVER_SECONDS)
    return f"{config.url} scores by {config.api}"
