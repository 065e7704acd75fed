"""Print the options with which pip installs torch on this machine; the Makefile passes them on.

    python requirements/torch_options.py https://download.pytorch.org/whl/cpu

Without an NVIDIA driver, the index of CPU builds is added if it answers: the default build has gigabytes of CUDA
libraries. It is added and does not replace PyPI, which has the versions of torch's dependencies that constraints.txt
names; of 2.13.0 and 2.13.0+cpu pip takes the latter. Nothing is printed if torch is installed, or if there is a driver.
"""

import importlib.util
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

# For the whole answer, name resolution included: SIGALRM ends a process that still waits, without options.
_SECONDS = 5
_DRIVER = Path("/proc/driver/nvidia/version")


def has_driver() -> bool:
    """Whether an NVIDIA driver is loaded, or nvidia-smi works (as under WSL, where /proc does not show the driver)."""
    try:
        return _DRIVER.exists() or subprocess.run(["nvidia-smi"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def answers(index: str) -> bool:
    """Whether an index has a page of torch."""
    try:
        with urllib.request.urlopen(f"{index.rstrip('/')}/torch/", timeout=_SECONDS) as reply:
            return bool(reply.status == 200)
    except (OSError, ValueError):
        return False


def main(index: str) -> None:
    if importlib.util.find_spec("torch") or has_driver():
        return
    signal.alarm(_SECONDS)
    if answers(index):
        print(f"--extra-index-url {index}")


if __name__ == "__main__":
    main(sys.argv[1])
