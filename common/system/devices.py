"""GPUs: which ones exist, which ones a setting names, and whether they are free, and whether
the driver can run what torch was built for. Does not load torch."""

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tba.common.errors import DeviceBusy, UsageError, quantity

CPU = "cpu"
_RANGE = re.compile(r"(\d+)-(\d+)")
# Values of CUDA_VISIBLE_DEVICES that hide every GPU.
_NO_DEVICES = ("", "-1", "NoDevFiles")
_NVIDIA_SMI_SECONDS = 30
_NODE = re.compile(r"(\d{1,4})x(\d{1,5}(?:\.\d+)?)")
_MOST_ASSUMED = 1024
_SHOWN = 0.99


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use. Memory is in MiB, 0 if nvidia-smi does not report it."""

    index: str
    uuid: str = ""
    total_mib: int = 0
    used_mib: int = 0
    processes: tuple[str, ...] = ()
    """Descriptions of the processes on it, such as `python (pid 4711, 70321 MiB)`."""

    def is_called(self, name: str) -> bool:
        """Return whether a name means this GPU: its index, its UUID, or a prefix of the UUID, as in CUDA."""
        return name == self.index or (not name.isdigit() and self.uuid.startswith(name))


def list_gpus() -> list[Gpu]:
    """Return the GPUs that this process may use, by CUDA_VISIBLE_DEVICES; [] without a driver.

    Raises UsageError if nvidia-smi fails or does not answer.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in _NO_DEVICES:
        return []
    present = _query_gpus()
    return present if visible is None else [_named(name.strip(), present) for name in visible.split(",")]


def need_gpus(asked: Mapping[str, str], present: Sequence[Gpu], flag: str = "") -> None:
    """Raise UsageError if settings ask for GPUs (values by key) and there are none; `flag` as in `choose_gpus`."""
    if not asked or present:
        return
    settings = " and ".join(f"{key} asks for GPU {wanted}" for key, wanted in asked.items())
    remedy = " and ".join(f'{key} = "{CPU}"' for key in asked)
    raise UsageError(
        f"{settings}, but this machine shows no GPU (CUDA_VISIBLE_DEVICES is empty, or nvidia-smi "
        "lists none or is not installed): "
        f"{f'pass {flag}, or ' if flag else ''}set {remedy}"
    )


def choose_gpus(wanted: str, present: Sequence[Gpu], key: str, flag: str = "") -> list[str]:
    """Return the names of the GPUs in a list such as `0-6`, `0,2,4`, `GPU-8f3a...` or `all`.

    `key` is the setting that holds the list, and `flag` the option that chooses the CPU instead, if the command has
    one: error sentences name them. Raises UsageError if the list is malformed or names a GPU that does not exist.
    """
    need_gpus({key: wanted}, present, flag)
    if wanted == "all":
        return [gpu.index for gpu in present]
    chosen = _expand_all(wanted)
    found = [_find(name, wanted, present) for name in chosen]
    for name, gpu in zip(chosen, found, strict=True):
        if (gpu is not None and found.count(gpu) > 1) or chosen.count(name) > 1:
            raise UsageError(f"GPU {name} is named twice in {wanted}")
    return chosen


def shared_gpus(one: str, other: str, present: Sequence[Gpu]) -> list[str]:
    """Return the GPUs that two lists name, as far as that can be said; `all` are those `present`."""
    if CPU in (one, other):
        return []
    first, second = (set(_indices(wanted, present)) for wanted in (one, other))
    return sorted(first & second, key=lambda name: (len(name), name))


def searcher_gpus(wanted: str, trainer: str, present: Sequence[Gpu]) -> str:
    """Return the searchers' GPUs on the trainer's machine: `all` are all but the trainer's, if there are others."""
    if wanted != "all" or trainer == CPU:
        return wanted
    taken = _indices(trainer, present)
    return ",".join(gpu.index for gpu in present if gpu.index not in taken) or wanted


def assumed_gpus(text: str) -> list[Gpu]:
    """Return the GPUs of a node that is not this one, from their number and size, such as `8x80`.

    The size is that of the product's name: a GPU sold with 80 GB shows a percent less than 80 GiB.
    Raises UsageError for any other text.
    """
    match = _NODE.fullmatch(text.strip())
    if match is None or not (1 <= int(match[1]) <= _MOST_ASSUMED and float(match[2]) > 0):
        raise UsageError(f"--assume {text}: write the number of GPUs and the GB of each, such as 8x80")
    total_mib = int(float(match[2]) * 1024 * _SHOWN)
    return [Gpu(str(index), total_mib=total_mib) for index in range(int(match[1]))]


def nominal_gpus(*lists: str) -> list[Gpu]:
    """Return GPUs with the names in some lists, for a machine that has none. `all` is one GPU, since none is known."""
    given = [wanted for wanted in lists if wanted not in ("", CPU)]
    names = [name for wanted in given for name in (["all"] if wanted == "all" else _expand_all(wanted))]
    return [Gpu(name) for name in dict.fromkeys(names)]


def count_gpus() -> int:
    """Return how many GPUs this machine has, also those that this process may not use; 0 if nvidia-smi cannot say."""
    try:
        return len(_query("--query-gpu=index", columns=1))
    except UsageError:
        return 0


def group_gpus(gpus: Sequence[str], tensor_parallel: int) -> list[list[str]]:
    """Cut GPUs into consecutive groups of `tensor_parallel`, one per engine. Raises UsageError for a remainder."""
    if len(gpus) % tensor_parallel:
        raise UsageError(
            f"{quantity(len(gpus), 'GPU')} ({', '.join(gpus)}) cannot be cut into groups of search.tensor_parallel = "
            f"{tensor_parallel}: name a multiple of {tensor_parallel}"
        )
    return [list(gpus[start : start + tensor_parallel]) for start in range(0, len(gpus), tensor_parallel)]


def label(group: Sequence[str]) -> str:
    """Return the name of the searcher on these GPUs: `gpu3`, `gpu0-1` for two, or UUIDs."""
    joined = "-".join(group)
    return f"gpu{joined}" if group[0].isdigit() else joined


def check_free(names: Sequence[str], present: Sequence[Gpu], *, utilization: float) -> None:
    """Raise DeviceBusy for a GPU with less free memory than the fraction `utilization` that an engine reserves.

    A GPU whose memory nvidia-smi does not report (MIG) passes: its engine fails if there is too little.
    """
    for name in names:
        gpu = _named(name, present)
        if gpu.total_mib - gpu.used_mib >= utilization * gpu.total_mib:
            continue
        holders = ", ".join(gpu.processes) or "a process that nvidia-smi does not list (in another container?)"
        raise DeviceBusy(
            f"GPU {name} is busy: {holders} holds memory, {gpu.used_mib} of {gpu.total_mib} MiB are in use and "
            f"search.gpu_memory_utilization = {utilization:g} needs {utilization * gpu.total_mib:.0f} MiB; end that "
            f"process, leave GPU {name} out of search.gpus, or lower search.gpu_memory_utilization"
        )


def pin(gpus: Sequence[str]) -> None:
    """Let this process see only these GPUs, numbered as by nvidia-smi. Call it before torch is imported."""
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)


def choose_and_pin(wanted: str, key: str, *, most: int | None = None) -> list[str]:
    """Let this process see only the chosen GPUs, the first `most` of them, and return these. See `choose_gpus`."""
    gpus = choose_gpus(wanted, list_gpus(), key, "--cpu")[:most]
    pin(gpus)
    return gpus


def _find(name: str, wanted: str, present: Sequence[Gpu]) -> Gpu | None:
    """Return the GPU of that name, None for a MIG slice, which nvidia-smi does not list as a GPU."""
    found = [gpu for gpu in present if gpu.is_called(name)]
    if not found and name.startswith("MIG-"):
        return None
    if len(found) != 1:
        present_names = ", ".join(f"{gpu.index} ({gpu.uuid})" if gpu.uuid else gpu.index for gpu in present)
        problem = "matches several UUIDs" if found else "does not exist"
        raise UsageError(f"GPU {name} (in {wanted}) {problem}; GPUs here: {present_names}")
    return found[0]


def _named(name: str, present: Sequence[Gpu]) -> Gpu:
    # One that a scheduler allows, or a MIG slice, exists even if nvidia-smi cannot describe it: no memory is known.
    return next((gpu for gpu in present if gpu.is_called(name)), Gpu(name))


def _indices(wanted: str, present: Sequence[Gpu]) -> list[str]:
    """Return the indices of the GPUs in a list, and the names of those that are not `present`."""
    if wanted == "all":
        return [gpu.index for gpu in present]
    return [_named(name, present).index for name in _expand_all(wanted)]


def _expand_all(wanted: str) -> list[str]:
    names: list[str] = []
    for part in map(str.strip, wanted.split(",")):
        if (match := _RANGE.fullmatch(part)) and int(match[1]) <= int(match[2]):
            names += map(str, range(int(match[1]), int(match[2]) + 1))
        elif part.isdigit() or part.startswith(("GPU-", "MIG-")):
            names.append(part)
        else:
            raise UsageError(f"{wanted!r} is not a list of GPUs: write 0-6, 0,2,4, a UUID, all, or cpu")
    return names


def _query_gpus() -> list[Gpu]:
    processes: dict[str, list[str]] = {}
    # The name is last, since it may have commas.
    for uuid, pid, used, name in _query("--query-compute-apps=gpu_uuid,pid,used_memory,process_name", columns=4):
        holds = f", {used} MiB" if used.isdigit() else ""
        processes.setdefault(uuid, []).append(f"{os.path.basename(name)} (pid {pid}{holds})")
    return [
        Gpu(index, uuid, _mib(total), _mib(used), tuple(processes.get(uuid, ())))
        for index, uuid, total, used in _query("--query-gpu=index,uuid,memory.total,memory.used", columns=4)
    ]


def _mib(text: str) -> int:
    # nvidia-smi writes `[N/A]` for a GPU that is divided into MIG slices.
    return int(text) if text.isdigit() else 0


def ask_nvidia_smi(*arguments: str) -> str | None:
    """Return what nvidia-smi prints, None if it is not installed. Raises UsageError with its message if it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        result = subprocess.run(  # noqa: S603
            [program, *arguments], capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"nvidia-smi did not answer within {_NVIDIA_SMI_SECONDS} s, so the driver or a GPU hangs: reboot"
        ) from None
    if result.returncode:
        message = (result.stderr.strip() or result.stdout.strip() or f"exit code {result.returncode}").splitlines()[0]
        raise UsageError(f"nvidia-smi failed, so no GPU can be used: {message}")
    return result.stdout


def _query(query: str, *, columns: int) -> list[list[str]]:
    """Return the rows that nvidia-smi prints. Raises UsageError with its message if it fails."""
    output = ask_nvidia_smi(query, "--format=csv,noheader,nounits") or ""
    rows = [[field.strip() for field in line.split(",", columns - 1)] for line in output.splitlines()]
    return [row for row in rows if len(row) == columns]


_LIBRARY = "libcuda.so.1"
_VERSION = re.compile(r"\d+(\.\d+)+")


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver's version, and the newest CUDA release that its library supports, None if that does not load."""

    version: str
    cuda: tuple[int, int] | None

    def __str__(self) -> str:
        """Return `driver 580.65.06 (CUDA 13.0)`."""
        return f"driver {self.version} ({f'CUDA {self.release}' if self.cuda else f'{_LIBRARY} does not load'})"

    @property
    def release(self) -> str:
        """The newest CUDA release that it supports, such as `12.4`; empty if it is not known."""
        return ".".join(map(str, self.cuda or ()))

    def supports(self, cuda: str) -> bool:
        """Whether programs built with a CUDA release such as `12.8` run: within a major release all do.

        https://docs.nvidia.com/deploy/cuda-compatibility, "minor version compatibility".
        """
        return self.cuda is None or int(cuda.partition(".")[0]) <= self.cuda[0]


def find_driver() -> Driver | None:
    """Return the driver, None if nvidia-smi is not installed or does not name it. Raises UsageError if it fails."""
    # The header of its table, which has both versions, is for people: driver 610 has other words in it.
    output = ask_nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader") or ""
    first = output.partition("\n")[0].strip()
    return Driver(first, _supported_release()) if _VERSION.fullmatch(first) else None


def _supported_release() -> tuple[int, int] | None:
    """Return the newest CUDA release that the driver's library supports, None if it does not load.

    nvidia-smi has no field for it. The call needs no initialised driver, and is not affected by CUDA_VISIBLE_DEVICES.
    """
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL(_LIBRARY).cuDriverGetVersion(ctypes.byref(number))
    # AttributeError: it is another library.
    except (OSError, AttributeError):
        return None
    # 12040 is 12.4. A stub of the library, which the CUDA toolkit has for linking, fails.
    return None if failed or number.value <= 0 else (number.value // 1000, number.value % 1000 // 10)


def why_no_cuda(torch_version: str, built_for: str | None, error: str) -> str:
    """Return why torch shows no GPU, as one clause, and what to do.

    `built_for` is `torch.version.cuda`, and `error` the message of `torch.cuda.init()`.
    """
    if built_for is None:
        return f"torch {torch_version} is built without CUDA: install the wheel for CUDA (docs/install.md)"
    try:
        driver = find_driver()
    except UsageError as trouble:
        return str(trouble)
    if driver is None:
        return f"no NVIDIA driver is visible (nvidia-smi names none), and torch says: {error or 'nothing'}"
    if driver.cuda is None:
        return (
            f"driver {driver.version} is installed, but its {_LIBRARY} does not load: in a container, set "
            f"NVIDIA_DRIVER_CAPABILITIES=compute,utility; torch says: {error or 'nothing'}"
        )
    if not driver.supports(built_for):
        return (
            f"torch {torch_version} is built for CUDA {built_for}, and driver {driver.version} supports CUDA up to "
            f"{driver.release}: update the driver, or install a torch for CUDA {driver.cuda[0]}"
        )
    return f"driver {driver.version} and CUDA {built_for} are compatible, but torch says: {error or 'nothing'}"
