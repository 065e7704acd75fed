"""The memory estimate of a trainer that does not run yet, for `tba run` and `tba doctor`. Imports torch lazily."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tba.common.config import Config
from tba.common.config.paths import SHARED_UTILIZATION
from tba.common.errors import ConfigError
from tba.common.system.devices import CPU, Gpu, choose_gpus, list_gpus, searcher_gpus, shared_gpus
from tba.common.system.process import node_number
from tba.common.weights.model_files import config_here
from tba.common.weights.pretrained import refuse_quantized
from tba.common.wire.socket_files import is_local

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

    What engines on the same GPU take is left out. `assumed` are the GPUs of a node that is not this one, whose host
    memory is not known. Raises UsageError for a GPU that does not exist, ConfigError for a model that does not load.
    """
    directory = config_here(config.model.path)
    if directory is None:
        return "the model's config.json is not on this machine"
    reference = config_here(config.reference.path) if config.reference.path else None
    if config.reference.path and reference is None:
        return "the config.json of reference.path is not on this machine"
    if find_spec("torch") is None:
        return "torch is not installed here"
    ranks, nodes, gpu_total, sharing = 1, 1, None, 0
    if config.train.gpu != CPU:
        present = list_gpus() if assumed is None else assumed
        chosen = choose_gpus(config.train.gpu, present, "train.gpu")
        total = min((gpu.total_mib for gpu in present for name in chosen if gpu.is_called(name)), default=0)
        # MIG slices are not in nvidia-smi's list: the trainer asks torch.
        if not total:
            return f"nvidia-smi does not tell the memory of GPU {config.train.gpu}"
        nodes = node_number()[1]
        ranks, gpu_total = len(chosen) * nodes, total << 20
        sharing = _count_engines(config, present)
    from tba.trainer.preflight.check import engine_bytes, examine
    from tba.trainer.preflight.shape import meta_model, shape_of, with_reference

    refuse_quantized(config.model.path)
    node = None if assumed is None else len(assumed)
    shape = with_reference(shape_of(meta_model(directory), config.lora.targets), reference)
    engines = sharing * engine_bytes(config, shape, gpu_total) if gpu_total is not None else 0
    return examine(config, shape, ranks=ranks, nodes=nodes, gpu_total=gpu_total, assumed=node, engines=engines)


def _count_engines(config: Config, present: Sequence[Gpu]) -> int:
    """Return the number of engines, of searcher and evaluator, on the trainer's GPU.

    Those of vLLM with a share of more than a half are on another node, or the run is refused (`check_gpus_apart`).
    Those of Transformers may be on another node if the buffer's address is on a network.
    """
    search = config.search
    large = search.gpu_memory_utilization > SHARED_UTILIZATION
    apart = large if search.engine == "vllm" else not is_local(config.address)
    if apart:
        return 0
    engines = [searcher_gpus(search.gpus, config.train.gpu, present), config.eval.gpu or CPU]
    return sum(bool(shared_gpus(gpus, config.train.gpu, present)) for gpus in engines)


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
