"""Which GPUs there are and which of them are meant, without loading torch."""

import os
import re
import shutil
import subprocess

from tba.common.errors import UsageError

CPU = "cpu"
_RANGE = re.compile(r"(\d+)-(\d+)")


def list_gpus() -> list[str]:
    """The GPUs that this process may use, by index or UUID; [] where there is no driver.

    A `CUDA_VISIBLE_DEVICES` that is set already, by a container or a scheduler, is the limit.
    """
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        return visible.split(",")
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=index", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise UsageError("nvidia-smi does not answer within 30 s: the driver or a GPU hangs") from None
    return result.stdout.split() if result.returncode == 0 else []


def choose_gpus(wanted: str, present: list[str]) -> list[str]:
    """The GPUs of a list such as `0-6`, `0,2,4`, `GPU-8f3a...` or `all`.

    Raises UsageError if the list is malformed or names a GPU that is not there.
    """
    if not present:
        raise UsageError(
            f"GPU {wanted} was asked for and this machine shows no GPU: use --cpu (search.gpus, train.gpu)"
        )
    if wanted == "all":
        return present
    chosen = [gpu for part in wanted.split(",") for gpu in _expand(part.strip(), wanted)]
    for gpu in chosen:
        if gpu.isdigit() and gpu not in present:
            raise UsageError(f"GPU {gpu} was asked for ({wanted}); this machine has {', '.join(present)}")
    if repeated := [gpu for gpu in chosen if chosen.count(gpu) > 1]:
        raise UsageError(f"GPU {repeated[0]} stands twice in {wanted}")
    return chosen


def _expand(part: str, whole: str) -> list[str]:
    if match := _RANGE.fullmatch(part):
        first, last = int(match[1]), int(match[2])
        if first <= last:
            return [str(number) for number in range(first, last + 1)]
    elif part.isdigit() or part.startswith(("GPU-", "MIG-")):
        return [part]
    raise UsageError(f"{whole!r} is no list of GPUs: write 0-6, 0,2,4, a UUID, all, or cpu")


def pin(gpu: str) -> None:
    """Let this process see one GPU only, by the numbers that nvidia-smi shows. Before torch is imported."""
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
