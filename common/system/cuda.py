"""The CUDA driver of this machine, and why torch shows no GPU. Does not load torch."""

import ctypes
import re
from dataclasses import dataclass

from tba.common.errors import UsageError
from tba.common.system.devices import ask_nvidia_smi

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
    return f"driver {driver.version} and CUDA {built_for} go together, but torch says: {error or 'nothing'}"
