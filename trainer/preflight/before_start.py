"""The memory estimate of a trainer that does not run yet, for `tba run` and `tba doctor`. Imports torch lazily."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tba.common.config import Config
from tba.common.system.devices import CPU, Gpu, choose_gpus, list_gpus
from tba.common.weights.model_files import local_model

if TYPE_CHECKING:
    from tba.trainer.preflight.check import Report


def check_memory(config: Config) -> None:
    """Raise ConfigError for a trainer that does not fit, unless `train.check_memory` is off.

    A trainer on the CPU looks at the host itself: an import of torch would delay each start of a small run.
    """
    if config.train.check_memory and config.train.gpu != CPU and (report := trainer_memory(config)) is not None:
        report.check()


def trainer_memory(config: Config, assumed: Sequence[Gpu] | None = None) -> "Report | None":
    """Return the estimate for `train.gpu`; None without torch, or if the model is not on this machine.

    `assumed` are the GPUs of a node that is not this one, whose host memory is not known. Raises UsageError for a GPU
    that does not exist, ConfigError for a model that does not load.
    """
    directory = local_model(config.model.path)
    if directory is None or find_spec("torch") is None:
        return None
    ranks, gpu_total = 1, None
    if config.train.gpu != CPU:
        present = list_gpus() if assumed is None else assumed
        chosen = choose_gpus(config.train.gpu, present, "train.gpu")
        total = min((gpu.total_mib for gpu in present for name in chosen if gpu.is_called(name)), default=0)
        # MIG slices are not in nvidia-smi's list: the trainer asks torch.
        if not total:
            return None
        ranks, gpu_total = len(chosen), total << 20
    from tba.trainer.preflight.check import report_on

    node = None if assumed is None else len(assumed)
    return report_on(config, directory, ranks=ranks, gpu_total=gpu_total, assumed=node)
