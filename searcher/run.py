"""Start of one searcher from a configuration: task, tokenizer, workers, engine, loop."""

import contextlib
import errno
import socket
from collections.abc import Callable

from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.log import get_logger
from tba.common.run_snapshots import weights_directory
from tba.common.system.devices import CPU
from tba.common.system.process import StopSignal, extend_start, give_way
from tba.common.weights.node_store import clear, make_directory
from tba.common.wire.client import BufferClient
from tba.common.wire.keys import buffer_client_keys
from tba.searcher.build import LoadedTask, context_of, load, make_engine, make_rewards, mean_tokens
from tba.searcher.checks import explained_luck
from tba.searcher.endpoint import Completions, Endpoint
from tba.searcher.engines.stopping import unstopped_turn
from tba.searcher.loop import Searcher
from tba.searcher.pipeline import Exploration
from tba.searcher.tasks.task import check_prompts, check_rendering

log = get_logger(__name__)

# At most, for the searchers of a machine.
ENDPOINT_PORTS = 64


def search(config: Config, *, device: str, label: str, stop: StopSignal) -> None:
    """Generate until the run is finished or `stop()`. `device` is `cpu` or the visible `cuda`.

    `label` distinguishes the searchers of this machine: `cpu0`, `gpu3`, `gpu0-1`, or the UUID of a GPU.

    Raises ConfigError for a model or task that cannot be loaded, WorkerLost if loading a reward model or a task failed
    for a reason that may be transient, and Refused if the buffer rejects this searcher.
    """
    log.info("starting", model=config.model.path, engine=config.search.engine, buffer=config.address)
    if device == CPU == config.train.gpu:
        give_way()
    loaded = _load_task(config)
    task = loaded.task
    # A directory that cannot be used is reported before the engine starts, which may take minutes.
    make_directory(weights_directory(config))
    clock = SystemClock()
    # The same after a restart, so that the buffer recognizes the searcher.
    name = f"{socket.gethostname()}-{label}"
    keys = buffer_client_keys(config.security.keys, config.address)
    client = BufferClient(config.address, role="searcher", name=name, clock=clock, keys=keys)
    with contextlib.ExitStack() as ending:
        ending.callback(_clear_weights, config, client)
        ending.callback(client.close)
        # Before the engine: workers must not inherit its threads and memory, and it measures the free memory of the GPU
        # after the reward model is loaded.
        rewards = make_rewards(config, task, device, stop)
        ending.callback(rewards.close)
        if stop():
            return
        # Before the engine, too: it tells that there are no weights yet.
        if (endpoint := open_endpoint(config, loaded, lambda: client.run)) is not None:
            ending.callback(endpoint.close)
        extend_start()
        # Starting the engine may take minutes, and there is nothing to finish yet.
        with stop.exits_immediately():
            prompt_tokens = mean_tokens(task.prompts(), loaded.renderer)
            engine = make_engine(
                config, loaded.stopping, device=device, name=name, prompt_tokens=prompt_tokens, kept=config.needs_kept
            )
            ending.callback(engine.close)
        searcher = Searcher(
            config,
            engine=engine,
            loaded=loaded,
            rewards=rewards,
            exploration=Exploration(config.search, run_seed=config.run.seed, searcher=name),
            client=client,
            clock=clock,
        )
        ending.callback(searcher.close)
        searcher.run(stop, endpoint)


def _load_task(config: Config) -> LoadedTask:
    """Load the task, what renders its prompts and what ends responses, and check that every prompt can be used."""
    loaded = task, renderer, stopping = load(config)
    check_prompts(task)
    check_rendering(task, task.prompts(), renderer, context_of(config))
    if warning := unstopped_turn(stopping, renderer, task.prompts()):
        log.warning("responses may not end", reason=warning)
    if luck := explained_luck(config, task):
        log.warning("the objective is wrong for this task", reason=luck)
    return loaded


def open_endpoint(config: Config, loaded: LoadedTask, run: Callable[[], str]) -> Endpoint | None:
    """Open the endpoint of a searcher at the first free port from that of `search.serve` on.

    With port 0 it is any free one. None without `search.serve`, or if the address cannot be bound: the run goes on
    without. `run` returns the uuid of the run.
    """
    if not config.search.serve:
        return None
    host, port = config.search.serve_address
    token = config.search.serve_token.get_secret_value()
    completions = Completions(config, loaded.renderer, loaded.stopping, context_of(config), run)
    last = min(port + ENDPOINT_PORTS, 1 << 16) - 1 if port else 0
    endpoint = None
    while endpoint is None:
        try:
            endpoint = Endpoint(host, port, token=token, completions=completions)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port >= last:
                log.warning("no endpoint", host=host, port=port, reason=str(error))
                return None
            port += 1
    log.info("endpoint", url=endpoint.url)
    return endpoint


def _clear_weights(config: Config, client: BufferClient) -> None:
    """Delete the node's cached weights if the run is finished. Other searchers of the node keep theirs pinned."""
    if client.state is not None and client.state.finished:
        clear(weights_directory(config))
