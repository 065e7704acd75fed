"""Start of one searcher from a configuration: task, tokenizer, workers, engine, loop."""

import contextlib
import socket
from collections.abc import Callable, Sequence

import numpy as np

from tba.common.clock import Clock, SystemClock
from tba.common.config import Config
from tba.common.errors import MissingExtra
from tba.common.log import get_logger
from tba.common.rendering import PromptRenderer
from tba.common.system.cpu_affinity import give_way
from tba.common.system.devices import CPU, number_of
from tba.common.system.process import StopSignal
from tba.common.weights.model_files import model_directory, read_json
from tba.common.weights.node_store import clear, make_directory, weights_directory
from tba.common.weights.tokenizer import load_tokenizer
from tba.common.wire.client import BufferClient
from tba.common.wire.keys import buffer_client_keys
from tba.searcher.engines.engine import Engine
from tba.searcher.engines.stopping import Stopping, read_stopping
from tba.searcher.exploration import Exploration
from tba.searcher.loop import Searcher
from tba.searcher.scoring.model_scorer import ModelScorer
from tba.searcher.scoring.reference_scorer import ReferenceScorer
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.tasks import load_task
from tba.searcher.tasks.task import Prompt, Task, check_prompts, check_rendering

log = get_logger(__name__)

_MEASURED_PROMPTS = 256
# Its KV cache grows as needed, so there is nothing to derive a number from.
_TRANSFORMERS_IN_FLIGHT = 256


def search(config: Config, *, device: str, label: str, stop: StopSignal) -> None:
    """Generate until the run is finished or `stop()`. `device` is `cpu` or the visible `cuda`.

    `label` distinguishes the searchers of this machine: `cpu0`, `gpu3`, `gpu0-1`, or the UUID of a GPU.

    Raises ConfigError for a model or task that cannot be loaded, WorkerLost if loading a reward model or a task failed
    for a reason that may be transient, and Refused if the buffer rejects this searcher.
    """
    log.info("starting", model=config.model.path, engine=config.search.engine, buffer=config.address)
    if device == CPU == config.train.gpu:
        give_way()
    task, renderer = _load_prompts(config)
    stopping = read_stopping(config, renderer.tokenizer)
    # A directory that cannot be used is reported before the engine starts, which may take minutes.
    make_directory(weights_directory(config))
    clock = SystemClock()
    # The same after a restart, so that the buffer recognizes the searcher.
    name = f"{socket.gethostname()}-{label}"
    client = _connect(config, name, clock)
    with contextlib.ExitStack() as ending:
        ending.callback(_clear_weights, config, client)
        ending.callback(client.close)
        # Before the engine: workers must not inherit its threads and memory, and it measures the free memory of the GPU
        # after the reward model is loaded.
        rewards = make_rewards(config, task, device, stop)
        ending.callback(rewards.close)
        if stop():
            return
        # Starting the engine may take minutes, and there is nothing to finish yet.
        with stop.exits_immediately():
            prompt_tokens = mean_tokens(task.prompts(), renderer)
            engine = make_engine(config, stopping, device=device, name=name, prompt_tokens=prompt_tokens)
            ending.callback(engine.close)
            # After the engine, which claims a fraction of the GPU's free memory.
            references = _make_references(config, device, ending)
        searcher = Searcher(
            config,
            engine=engine,
            task=task,
            rewards=rewards,
            references=references,
            renderer=renderer,
            stopping=stopping,
            exploration=Exploration(config.search, run_seed=config.run.seed, searcher=name),
            client=client,
            clock=clock,
            number=number_of(label),
        )
        ending.callback(searcher.close)
        searcher.run(stop)


def _load_prompts(config: Config) -> tuple[Task, PromptRenderer]:
    """Load the task and what renders its prompts, and check that every prompt can be used."""
    task = load_task(config.task)
    check_prompts(task)
    renderer = PromptRenderer(load_tokenizer(model_directory(config.model.path)), config.task)
    check_rendering(task, task.prompts(), renderer, context_of(config))
    return task, renderer


def context_of(config: Config) -> int | None:
    """Return the largest number of tokens of prompt and response, None if only the engine knows it."""
    model = read_json(model_directory(config.model.path) / "config.json")
    model = model.get("text_config", model)
    positions: int | None = model.get("max_position_embeddings")
    if config.search.engine == "vllm":
        # vLLM derives the context of models with scaled positions.
        scaled = model.get("rope_scaling") or "factor" in (model.get("rope_parameters") or {})
        return config.search.max_model_len or (None if scaled else positions)
    return positions


def make_rewards(config: Config, task: Task, device: str, stop: Callable[[], bool]) -> Rewards:
    """Start the workers that score: the task's, and the reward model's if one is configured."""
    model = ModelScorer(config.reward_model, device, stop) if config.reward_model.configured else None
    return Rewards(task, config.task, model, weight=config.reward_model.weight)


def _connect(config: Config, name: str, clock: Clock) -> BufferClient:
    keys = buffer_client_keys(config.security, config.address)
    return BufferClient(config.address, role="searcher", name=name, clock=clock, keys=keys)


def _make_references(config: Config, device: str, ending: contextlib.ExitStack) -> ReferenceScorer | None:
    """Load the frozen reference if the searcher is to compute its log-probabilities. `ending` closes it."""
    if not config.search.reference_logprobs:
        return None
    from tba.searcher.scoring.reference_model import ReferenceModel

    model = ReferenceModel(config.model.path, device=device, dtype=config.model.dtype)
    references = ReferenceScorer(model.logprobs)
    ending.callback(references.close)
    return references


def _clear_weights(config: Config, client: BufferClient) -> None:
    """Delete the node's cached weights if the run is finished. Other searchers of the node keep theirs pinned."""
    if client.state is not None and client.state.finished:
        clear(weights_directory(config))


def mean_tokens(prompts: Sequence[Prompt], renderer: PromptRenderer) -> int:
    """Return the mean length of the first prompts, in tokens."""
    first = prompts[:_MEASURED_PROMPTS]
    return round(np.mean([len(renderer.ids(prompt)) for prompt in first])) if first else 0


def make_engine(config: Config, stopping: Stopping, *, device: str, name: str, prompt_tokens: int = 0) -> Engine:
    """Start the engine that the configuration names. `prompt_tokens` is the length of a typical prompt.

    Raises MissingExtra if its packages are not installed.
    """
    # Derived from the name, so that the searchers of a run explore differently.
    seed = int(np.random.SeedSequence([config.run.seed, *name.encode()]).generate_state(1)[0])
    if config.search.engine == "vllm":
        from tba.searcher.engines.vllm.engine import VllmEngine

        return VllmEngine(
            config.model,
            config.search,
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
        max_in_flight=_TRANSFORMERS_IN_FLIGHT if config.search.max_in_flight == "auto" else config.search.max_in_flight,
        seed=seed,
        canary_tolerance=config.canary_tolerance,
        stopping=stopping,
    )
