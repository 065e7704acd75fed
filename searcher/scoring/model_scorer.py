"""The reward model's scores: one worker per searcher, in which responses of all groups are batched together.

The worker cuts what it is sent into batches by length. Once the model has been loaded, no failure of it ends the
searcher: while there is no worker, a response fails after `reward_model.time_limit_seconds`, and generation, which is
at most two loads of requests ahead, continues at that pace.
"""

import multiprocessing.connection
from collections.abc import Callable

from tba.common.config import RewardModelSection
from tba.common.errors import ConfigError, WorkerLost
from tba.common.log import get_logger
from tba.common.weights.model_files import model_directory
from tba.searcher.scoring.worker_pool import PoolSettings, WorkerPool

log = get_logger(__name__)

# Enough pairs to sort them by length, few enough that results come back soon.
_BATCH = 256
_GATHER_SECONDS = 0.05
_POLL_SECONDS = 0.05


class ModelScorer(WorkerPool):
    """Scores by the classifier of `[reward_model]`. `device` is the searcher's own: `cpu` or `cuda`.

    The constructor returns when the model is loaded, so that an engine on the same GPU finds its memory taken, or
    after `stop()`: then it scores nothing and must be closed. Raises ConfigError if the files are no reward model,
    WorkerLost if it was not loaded for another reason.
    """

    def __init__(self, config: RewardModelSection, device: str, stop: Callable[[], bool] = lambda: False) -> None:
        self.config = config
        device, environment = _placement(config.device, device)
        directory = model_directory(config.path, setting="reward_model.path")
        super().__init__(
            PoolSettings(
                name="reward model",
                section="reward_model",
                module="tba.searcher.scoring.model_worker",
                settings={"config": config.model_dump(mode="json"), "directory": str(directory), "device": device},
                workers=1,
                batch=_BATCH,
                load_seconds=config.load_seconds,
                work_seconds=config.time_limit_seconds,
                gather_seconds=_GATHER_SECONDS,
                max_wait_seconds=config.time_limit_seconds,
                environment=environment,
            )
        )
        try:
            while not (self.ready or stop()):
                self.poll()
                if self.refusal:
                    raise ConfigError(self.refusal)
                if self.failed_starts:
                    raise WorkerLost(f"reward_model.path {config.path} is not loaded: {self.trouble}")
                multiprocessing.connection.wait(self.channels, _POLL_SECONDS)
        except BaseException:
            self.close()
            raise
        log.info("reward model", path=config.path, device=device, ready=self.ready)


def _placement(configured: str, own: str) -> tuple[str, dict[str, str]]:
    """The device as torch names it in the worker, and the environment that shows the worker only that device.

    A configured GPU number is the one of nvidia-smi, whichever GPU the searcher itself sees.
    """
    kind, _, number = (own if configured == "auto" else configured).partition(":")
    if kind == "cpu":
        return "cpu", {}
    visible = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": number} if number else {}
    return "cuda:0", visible
