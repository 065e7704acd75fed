"""The memory estimate of a trainer that does not run yet, for `tba run` and `tba doctor`. Imports torch lazily."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tba.common.config import Config
from tba.common.config.paths import SHARED_UTILIZATION
from tba.common.errors import ConfigError
from tba.common.system.devices import CPU, Gpu, choose_gpus, list_gpus, searcher_gpus, shared_gpus
from tba.common.weights.model_files import config_here

if TYPE_CHECKING:
    from tba.trainer.preflight.check import Report


def check_memory(config: Config) -> None:
    """Raise ConfigError for a trainer that does not fit, unless `train.check_memory` is off.

    A trainer on the CPU looks at the host itself: an import of torch would delay each start of a small run.
    """
    if not config.train.check_memory or config.train.gpu == CPU:
        return
    report = trainer_memory(config)
    if not isinstance(report, str):
        report.check()


def trainer_memory(config: Config, assumed: Sequence[Gpu] | None = None) -> "Report | str":
    """Return the estimate for `train.gpu`, or why there is none.

    The share of engines on the same GPU is left out. `assumed` are the GPUs of a node that is not this one, whose host
    memory is not known. Raises UsageError for a GPU that does not exist, ConfigError for a model that does not load.
    """
    directory = config_here(config.model.path)
    if directory is None:
        return "the model's config.json is not on this machine"
    if find_spec("torch") is None:
        return "torch is not installed here"
    ranks, gpu_total = 1, None
    if config.train.gpu != CPU:
        present = list_gpus() if assumed is None else assumed
        chosen = choose_gpus(config.train.gpu, present, "train.gpu")
        total = min((gpu.total_mib for gpu in present for name in chosen if gpu.is_called(name)), default=0)
        # MIG slices are not in nvidia-smi's list: the trainer asks torch.
        if not total:
            return f"nvidia-smi does not tell the memory of GPU {config.train.gpu}"
        ranks, gpu_total = len(chosen), int((total << 20) * (1 - _share_of_engines(config, present)))
    from tba.trainer.preflight.check import report_on

    node = None if assumed is None else len(assumed)
    return report_on(config, directory, ranks=ranks, gpu_total=gpu_total, assumed=node)


def _share_of_engines(config: Config, present: Sequence[Gpu]) -> float:
    """Return the fraction of the trainer's GPU that engines reserve.

    Engines with a share of more than a half are on another node, or the run is refused (`check_gpus_apart`).
    """
    search = config.search
    if search.engine != "vllm" or search.gpu_memory_utilization > SHARED_UTILIZATION:
        return 0.0
    engines = [searcher_gpus(search.gpus, config.train.gpu, present), config.eval.gpu or CPU]
    sharing = [gpus for gpus in engines if shared_gpus(gpus, config.train.gpu, present)]
    return len(sharing) * search.gpu_memory_utilization


def model_parameters(config: Config) -> int | None:
    """Return the number of parameters that config.json of `model.path` tells, None if it cannot be read here."""
    try:
        directory = config_here(config.model.path)
        if directory is None or find_spec("torch") is None:
            return None
        from tba.trainer.preflight.shape import meta_model, shape_of

        return shape_of(meta_model(directory)).parameters
    except ConfigError:
        return None
