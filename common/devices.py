"""Which GPUs there are, which are meant and whether they are free, without loading torch."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from tba.common.errors import DeviceBusy, UsageError
from tba.common.quantity import quantity

CPU = "cpu"
_RANGE = re.compile(r"(\d+)-(\d+)")
_NO_DEVICES = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that hide every GPU
_NVIDIA_SMI_SECONDS = 30


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use. Memory in MiB, 0 where nvidia-smi does not tell."""

    index: str
    uuid: str = ""
    total_mib: int = 0
    used_mib: int = 0
    processes: tuple[str, ...] = ()  # such as `python (pid 4711, 70321 MiB)`

    def is_called(self, name: str) -> bool:
        """By its index, or by its UUID or the first letters of that, as CUDA takes it."""
        return name == self.index or (not name.isdigit() and self.uuid.startswith(name))


def list_gpus() -> list[Gpu]:
    """The GPUs that this process may use; [] where there is no driver.

    A `CUDA_VISIBLE_DEVICES` that is set already, by a container or a scheduler, is the limit.
    Raises UsageError if nvidia-smi fails or does not answer.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in _NO_DEVICES:
        return []
    present = _query_gpus()
    if visible is None:
        return present
    return [_named(name.strip(), present) for name in visible.split(",")]


def choose_gpus(wanted: str, present: Sequence[Gpu], key: str, flag: str = "") -> list[str]:
    """The GPUs of a list such as `0-6`, `0,2,4`, `GPU-8f3a...` or `all`, which the setting `key` holds.

    `flag` is what chooses the CPU on the command line, if anything does.
    Raises UsageError if the list is malformed or names a GPU that is not there.
    """
    if not present:
        raise UsageError(
            f"GPU {wanted} was asked for ({key}) and this machine shows no GPU (nvidia-smi lists none, or is not "
            f'installed): {f"pass {flag}, or " if flag else ""}set {key} = "{CPU}"'
        )
    if wanted == "all":
        return [gpu.index for gpu in present]
    chosen = [name for part in wanted.split(",") for name in _expand(part.strip(), wanted)]
    found = [_find(name, wanted, present) for name in chosen]
    for name, gpu in zip(chosen, found, strict=True):
        if (gpu is not None and found.count(gpu) > 1) or chosen.count(name) > 1:
            raise UsageError(f"GPU {name} stands twice in {wanted}")
    return chosen


def group_gpus(gpus: Sequence[str], tensor_parallel: int) -> list[list[str]]:
    """Consecutive groups of `tensor_parallel` GPUs, one for each engine. Raises UsageError if some are left over."""
    if len(gpus) % tensor_parallel:
        raise UsageError(
            f"{quantity(len(gpus), 'GPU')} ({', '.join(gpus)}) cannot be cut into groups of search.tensor_parallel = "
            f"{tensor_parallel}: name a multiple of {tensor_parallel}"
        )
    return [list(gpus[start : start + tensor_parallel]) for start in range(0, len(gpus), tensor_parallel)]


def label(group: Sequence[str]) -> str:
    """What the searcher on these GPUs is called: `gpu3`, `gpu0-1` for two, or UUIDs."""
    joined = "-".join(group)
    return f"gpu{joined}" if group[0].isdigit() else joined


def check_free(names: Sequence[str], present: Sequence[Gpu], *, utilization: float) -> None:
    """Raise DeviceBusy for a GPU with less free memory than the part `utilization` that an engine will take.

    A GPU whose memory nvidia-smi does not tell (MIG) is left to the engine to judge.
    """
    for name in names:
        gpu = next((gpu for gpu in present if gpu.is_called(name)), None)
        if gpu is None or gpu.total_mib - gpu.used_mib >= utilization * gpu.total_mib:
            continue
        holders = ", ".join(gpu.processes) or "a process that nvidia-smi does not show, as from another container,"
        raise DeviceBusy(
            f"GPU {name} is busy: {holders} holds memory, {gpu.used_mib} of {gpu.total_mib} MiB are in use and "
            f"search.gpu_memory_utilization = {utilization:g} needs {utilization * gpu.total_mib:.0f} MiB; end that "
            f"process, leave GPU {name} out of search.gpus, or lower search.gpu_memory_utilization"
        )


def pin(gpus: Sequence[str]) -> None:
    """Let this process see these GPUs only, by the numbers that nvidia-smi shows. Before torch is imported."""
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)


def _find(name: str, wanted: str, present: Sequence[Gpu]) -> Gpu | None:
    """The GPU of that name; None for a MIG slice, which nvidia-smi does not list among the GPUs."""
    found = [gpu for gpu in present if gpu.is_called(name)]
    if not found and name.startswith("MIG-"):
        return None
    if len(found) != 1:
        there = ", ".join(f"{gpu.index} ({gpu.uuid})" if gpu.uuid else gpu.index for gpu in present)
        problem = "is the beginning of several UUIDs" if found else "is not there"
        raise UsageError(f"GPU {name} was asked for ({wanted}) and {problem}; this machine has {there}")
    return found[0]


def _named(name: str, present: Sequence[Gpu]) -> Gpu:
    # What a scheduler allows exists, also where there is no nvidia-smi to describe it.
    return next((gpu for gpu in present if gpu.is_called(name)), Gpu(name))


def _expand(part: str, whole: str) -> list[str]:
    if match := _RANGE.fullmatch(part):
        first, last = int(match[1]), int(match[2])
        if first <= last:
            return [str(number) for number in range(first, last + 1)]
    elif part.isdigit() or part.startswith(("GPU-", "MIG-")):
        return [part]
    raise UsageError(f"{whole!r} is no list of GPUs: write 0-6, 0,2,4, a UUID, all, or cpu")


def _query_gpus() -> list[Gpu]:
    if shutil.which("nvidia-smi") is None:
        return []
    processes: dict[str, list[str]] = {}
    for uuid, pid, name, used in _ask("--query-compute-apps=gpu_uuid,pid,process_name,used_memory", columns=4):
        holds = f", {used} MiB" if used.isdigit() else ""
        processes.setdefault(uuid, []).append(f"{os.path.basename(name)} (pid {pid}{holds})")
    return [
        Gpu(index, uuid, _mib(total), _mib(used), tuple(processes.get(uuid, ())))
        for index, uuid, total, used in _ask("--query-gpu=index,uuid,memory.total,memory.used", columns=4)
    ]


def _mib(text: str) -> int:
    return int(text) if text.isdigit() else 0  # `[N/A]` where the GPU is cut into MIG slices


def _ask(query: str, *, columns: int) -> list[list[str]]:
    """Rows of nvidia-smi. Raises UsageError with its own words if it fails."""
    command = [str(shutil.which("nvidia-smi")), query, "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"nvidia-smi does not answer within {_NVIDIA_SMI_SECONDS} s: the driver or a GPU hangs"
        ) from None
    if result.returncode:
        said = (result.stderr.strip() or result.stdout.strip() or f"exit code {result.returncode}").splitlines()[0]
        raise UsageError(f"nvidia-smi fails, so no GPU can be used: {said}")
    rows = [[field.strip() for field in line.split(",")] for line in result.stdout.splitlines()]
    return [row for row in rows if len(row) == columns]
