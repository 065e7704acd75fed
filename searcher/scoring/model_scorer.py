"""The reward model's scores: one worker per searcher, in which responses of all groups are batched together.

The worker has the model, and cuts what it is sent into batches by length; or it asks the HTTP server that has it. Once
there was a first score, no failure of the model ends the searcher: while there is no worker or no server, a response
fails after `time_limit_seconds`, and generation, which is at most two loads of requests ahead, continues at that pace.
"""

import multiprocessing.connection
from collections.abc import Callable
from typing import Any

from tba.common.config import RewardModelSection
from tba.common.errors import ConfigError, WorkerLost
from tba.common.log import get_logger
from tba.common.weights.model_files import model_directory
from tba.searcher.scoring.worker_pool import LOAD_SECONDS, PoolSettings, WorkerPool

log = get_logger(__name__)

# Enough pairs to sort them by length, few enough that results come back soon.
_BATCH = 256
_GATHER_SECONDS = 0.05
_POLL_SECONDS = 0.05
# A worker that asks a server keeps its limits itself, and is replaced if it has not done so this much later.
_GRACE_SECONDS = 5.0


class ModelScorer(WorkerPool):
    """Scores by the classifier of `[reward_model]`.

    `device` is the searcher's own: `cpu` or `cuda`. The constructor returns when the model is loaded, so that an
    engine on the same GPU finds its memory taken, or after `stop()`: then it scores nothing and must be closed. Raises
    ConfigError if it is not a reward model, WorkerLost if it was not loaded or reached for another reason.
    """

    def __init__(self, config: RewardModelSection, device: str, stop: Callable[[], bool] = lambda: False) -> None:
        self.config = config
        super().__init__(_server(config) if config.url else _own_process(config, device))
        try:
            while not (self.ready or stop()):
                self.poll()
                if self.refusal:
                    raise ConfigError(self.refusal)
                if self.failed_starts:
                    what = "url does not answer" if config.url else f"path {config.path} is not loaded"
                    raise WorkerLost(f"reward_model.{what}: {self.last_error}")
                multiprocessing.connection.wait(self.channels, _POLL_SECONDS)
        except BaseException:
            self.close()
            raise
        log.info("reward model", model=config.source, ready=self.ready)


def _own_process(config: RewardModelSection, device: str) -> PoolSettings:
    device, environment = _placement(config.device, device)
    directory = model_directory(config.path, setting="reward_model.path")
    return PoolSettings(
        name="reward model",
        module="tba.searcher.scoring.classifier",
        settings={"config": _sent(config), "directory": str(directory), "device": device},
        workers=1,
        batch=_BATCH,
        load_seconds=LOAD_SECONDS,
        work_seconds=config.time_limit_seconds,
        gather_seconds=_GATHER_SECONDS,
        max_wait_seconds=config.time_limit_seconds,
        environment=environment,
    )


def _server(config: RewardModelSection) -> PoolSettings:
    key = config.api_key.get_secret_value()
    return PoolSettings(
        name="reward model",
        module="tba.searcher.scoring.http_model",
        settings={"config": _sent(config), "key": key, "load_seconds": LOAD_SECONDS},
        workers=1,
        batch=max(_BATCH, config.concurrency),
        load_seconds=LOAD_SECONDS + _GRACE_SECONDS,
        work_seconds=config.time_limit_seconds + _GRACE_SECONDS,
        max_wait_seconds=config.time_limit_seconds,
    )


def _sent(config: RewardModelSection) -> dict[str, Any]:
    """Return the settings as a worker reads them."""
    return config.model_dump(mode="json", exclude={"api_key"})


def _placement(configured: str, own: str) -> tuple[str, dict[str, str]]:
    """The device as torch names it in the worker, and the environment that shows the worker only that device.

    A configured GPU number is the one of nvidia-smi, whichever GPU the searcher itself sees.
    """
    kind, _, number = (own if configured == "auto" else configured).partition(":")
    if kind == "cpu":
        return "cpu", {}
    visible = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": number} if number else {}
    return "cuda:0", visible
