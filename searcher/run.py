"""Starting one searcher from a configuration."""

import contextlib
import socket
from collections.abc import Callable

import numpy as np

from tba.common.client import BufferClient
from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.errors import ConfigError, MissingExtra
from tba.common.log import get_logger
from tba.common.model_files import model_directory
from tba.common.process import StopSignal
from tba.searcher.engine import Engine
from tba.searcher.exploration import Exploration
from tba.searcher.groups import Tokenizer
from tba.searcher.loop import Searcher
from tba.searcher.model_rewards import make_model_scorer
from tba.searcher.node_cache import clear, make_directory
from tba.searcher.prefetch import weights_directory
from tba.searcher.references import References
from tba.searcher.rewards import Rewards
from tba.searcher.tasks import load_task
from tba.searcher.tasks.task import Task

log = get_logger(__name__)


def search(config: Config, *, device: str, label: str, stop: StopSignal) -> None:
    """Generate until the run is finished or `stop()`. `device` is `cpu` or the visible `cuda`.

    `label` tells the searchers of this machine apart: `cpu0`, `gpu3`, `gpu0-1`, or the UUID of a GPU.

    Raises ConfigError for a model or task that cannot be loaded, WorkerLost where a reward model or a task could not be
    loaded now, Refused if the buffer will not have us.
    """
    log.info("starting", model=config.model.path, engine=config.search.engine, buffer=config.buffer.address)
    task = load_task(config.task)
    tokenizer = load_tokenizer(config.model.path)
    make_directory(weights_directory(config))  # one that cannot be used is told before the minutes an engine takes
    clock = SystemClock()
    name = f"{socket.gethostname()}-{label}"  # the same after a restart, so that the buffer knows who came back
    client = BufferClient(config.buffer.address, role="searcher", name=name, clock=clock)
    with contextlib.ExitStack() as ending:
        ending.callback(_clear_weights, config, client)
        ending.callback(client.close)
        # Before the engine: its threads and memory are no concern of the workers, and the model's memory is one of its.
        rewards = make_rewards(config, task, device, stop)
        ending.callback(rewards.close)
        if stop():
            return
        with stop.ends_at_once():  # it may take minutes, and nothing is generated yet
            engine = make_engine(config, device=device, name=name)
            ending.callback(engine.close)
            references = make_references(config, device)  # after the engine, which must find the memory of a GPU free
            ending.callback(references.close)
        searcher = Searcher(
            config,
            engine=engine,
            task=task,
            rewards=rewards,
            references=references,
            tokenizer=tokenizer,
            exploration=Exploration(config.search, run_seed=config.run.seed, searcher=name),
            client=client,
            clock=clock,
        )
        ending.callback(searcher.close)
        searcher.run(stop)


def _clear_weights(config: Config, client: BufferClient) -> None:
    """Of a finished run the last searcher of the node leaves no weights behind; those before it hold theirs."""
    if client.state is not None and client.state.finished:
        clear(weights_directory(config))


def make_engine(config: Config, *, device: str, name: str) -> Engine:
    """The engine that the configuration names. Raises MissingExtra if its packages are not installed."""
    # From the name, so that no two searchers of a run explore alike.
    seed = int(np.random.SeedSequence([config.run.seed, *name.encode()]).generate_state(1)[0])
    if config.search.engine == "vllm":
        return _vllm_engine(config, seed)
    try:
        from tba.searcher.engine_transformers import TransformersEngine
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "transformers", "train") from error
    return TransformersEngine(
        config.model.path,
        dtype=config.model.dtype,
        device=device,
        max_in_flight=config.search.max_in_flight,
        seed=seed,
        canary_tolerance=config.canary_tolerance,
    )


def make_rewards(config: Config, task: Task, device: str, stop: Callable[[], bool]) -> Rewards:
    """The workers of the task, and the reward model if there is one; after `stop()` they are good for nothing.

    Raises ConfigError, TaskError, WorkerLost.
    """
    model = make_model_scorer(config, device, stop)
    try:
        return Rewards(task, config.task, model)
    except BaseException:
        if model is not None:
            model.close()
        raise


def make_references(config: Config, device: str) -> References:
    """What adds reference log-probabilities to groups, or nothing. Raises ConfigError if the model does not load."""
    if not config.search.reference_logprobs:
        return References(None)
    from tba.searcher.reference_model import ReferenceModel

    return References(ReferenceModel(config.model.path, device=device, dtype=config.model.dtype).logprobs)


def _vllm_engine(config: Config, seed: int) -> Engine:
    from tba.searcher.engine_vllm import VllmEngine

    search = config.search
    return VllmEngine(
        config.model.path,
        dtype=config.model.dtype,
        max_model_len=search.max_model_len or None,
        max_in_flight=search.max_in_flight,
        seed=seed,
        kv_cache_gib=search.kv_cache_gib,
        gpu_memory_utilization=search.gpu_memory_utilization,
        tensor_parallel=search.tensor_parallel,
        enforce_eager=search.enforce_eager,
        canary_tolerance=config.canary_tolerance,
        keep_prefix_cache=search.keep_prefix_cache,
    )


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a model. Raises ConfigError if it cannot be loaded."""
    directory = model_directory(model)
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError:
        raise MissingExtra("transformers", "train") from None
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # the library raises many kinds; all mean that the files are no tokenizer
        raise ConfigError(f"{directory} has no tokenizer that loads: {str(error).splitlines()[0]}") from error
    return tokenizer
