"""What `tba train` and `tba sft` do before they load a model."""

from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from tba.common.config import Config
from tba.common.errors import ConfigError, UsageError
from tba.common.log import get_logger
from tba.common.system.devices import why_no_cuda
from tba.common.weights.model_files import model_directory
from tba.trainer.checkpoints import checkpoint
from tba.trainer.checkpoints.checkpoint import Checkpoint
from tba.trainer.distributed.ranks import Ranks
from tba.trainer.model.scorer import in_half
from tba.trainer.preflight.check import Report, require

log = get_logger(__name__)


def prepare(config: Config, device: str) -> None:
    """Set seed, threads and GPU of this process, and on a CPU deterministic operations. Raises ConfigError."""
    exact = config.model.head_dtype == "float32" and in_half(torch.device(device), config.model.dtype)
    if exact and "dtype" not in torch.ops.aten.mm.overloads():  # type: ignore[no-untyped-call]
        raise ConfigError(
            'model.head_dtype = "float32" needs torch 2.8 or newer on a GPU, and torch '
            f"{torch.__version__} is installed (its torch.mm has no out_dtype): install a newer one, or set it to "
            '"model"'
        )
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"train.gpu names a GPU, but torch sees none: {_why_no_cuda()}; or train on the CPU (--cpu)")
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    transformers_logging.disable_progress_bar()
    torch.manual_seed(config.run.seed)
    torch.use_deterministic_algorithms(device == "cpu")
    # Else all memory is filled with NaN when it is allocated: one more pass over every result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if config.train.threads:
        torch.set_num_threads(config.train.threads)


def _why_no_cuda() -> str:
    error = ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    # AssertionError: torch is built without CUDA. RuntimeError: of the driver.
    except (AssertionError, RuntimeError) as problem:
        error = str(problem)
    return why_no_cuda(torch.__version__, torch.version.cuda, error)


def require_memory(config: Config, device: torch.device, ranks: Ranks, *, supervised: bool = False) -> Report:
    """Raise ConfigError before anything is loaded if the model does not fit. `supervised` is `tba sft`."""
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    files = model_directory(config.model.path)
    report = require(config, files, ranks=ranks.size, gpu_total=total, supervised=supervised)
    log.info("memory", estimate=report.sentence())
    return report


def find_checkpoint(directory: Path, *, resume: bool, otherwise: str) -> Checkpoint | None:
    """Return the newest checkpoint, None if there is none.

    Raises UsageError if there is one and `resume` is false; `otherwise` is what the user can do instead of resuming.
    """
    if not resume:
        if existing := checkpoint.list_checkpoints(directory):
            raise UsageError(
                f"{existing[-1]} is of an earlier start: pass --resume to continue from it, or {otherwise}"
            )
        return None
    return checkpoint.newest(directory)
