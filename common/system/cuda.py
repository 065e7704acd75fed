"""The CUDA driver of this machine, and why torch shows no GPU. Does not load torch."""

import re
from dataclasses import dataclass

from tba.common.errors import UsageError
from tba.common.system.devices import ask_nvidia_smi

_HEADER = re.compile(r"Driver Version:\s*(\S+)\s+CUDA Version:\s*(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver's version, and the newest CUDA release that it supports."""

    version: str
    cuda: tuple[int, int]

    def supports(self, cuda: str) -> bool:
        """Whether programs built with a CUDA release such as `12.8` run: within a major release all do.

        https://docs.nvidia.com/deploy/cuda-compatibility, "minor version compatibility".
        """
        return int(cuda.partition(".")[0]) <= self.cuda[0]


def find_driver() -> Driver | None:
    """Return the driver, None if nvidia-smi is not installed or does not name it. Raises UsageError if it fails."""
    output = ask_nvidia_smi()
    found = None if output is None else _HEADER.search(output)
    return found and Driver(found[1], (int(found[2]), int(found[3])))


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
    if not driver.supports(built_for):
        return (
            f"torch {torch_version} is built for CUDA {built_for}, and driver {driver.version} supports CUDA up to "
            f"{driver.cuda[0]}.{driver.cuda[1]}: update the driver, or install a torch for CUDA {driver.cuda[0]}"
        )
    return f"driver {driver.version} and CUDA {built_for} go together, but torch says: {error or 'nothing'}"
