"""Checks of `tba doctor` for nodes with GPUs: driver, compiler, topology, and the caches of the compilers."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from itertools import combinations
from pathlib import Path

from tba.common.config import Config
from tba.common.config.paths import nearest_existing
from tba.common.errors import UsageError, quantity
from tba.common.system.devices import CPU, Gpu, ask_nvidia_smi, choose_gpus, find_driver, list_gpus, why_no_cuda

Result = tuple[str, str]
NO_GPU = "no GPU is configured"
UNITS_ENVIRONMENT = Path("/etc/tba/tba.env")
# Directories that the units hide (ProtectHome).
_HOMES = ("/home", "/root", "/run/user")
PCI_DEVICES = Path("/sys/bus/pci/devices")
_TORCH_SECONDS = 120
# In a process of its own: a broken driver may crash it, and this package does not load torch.
_ASK_TORCH = """
import json, torch
error = ""
try:
    torch.cuda.init()
except Exception as problem:
    error = str(problem)
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps([torch.__version__, torch.version.cuda, count, error]))
"""
# Each has its environment variable, and the directory below the home directory that it uses without one.
_CACHES = {
    "VLLM_CACHE_ROOT": ".cache/vllm",
    "TRITON_CACHE_DIR": ".triton",
    "TORCHINDUCTOR_CACHE_DIR": "",
}


def uses_gpu(config: Config) -> bool:
    """Whether a searcher or the trainer is configured to run on a GPU."""
    return config.search.gpus != CPU or config.train.gpu != CPU


def check_cuda(config: Config) -> Result:
    """Compare the driver with the CUDA release that torch is built for, and ask torch for the GPUs."""
    if not uses_gpu(config):
        return "ok", NO_GPU
    try:
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=_TORCH_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "fail", f"torch did not find the GPUs within {_TORCH_SECONDS} s: the driver or a GPU hangs"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        missing = "No module named 'torch'" in last
        return ("unchecked", "torch is not installed here") if missing else ("fail", f"torch does not load: {last}")
    version, built_for, count, error = json.loads(done.stdout.splitlines()[-1])
    if not count:
        return _no_gpus(version, built_for, error)
    try:
        driver = find_driver()
    except UsageError as problem:
        return "fail", str(problem)
    named = driver or "a driver that nvidia-smi does not name"
    return "ok", f"torch {version} for CUDA {built_for} shows {quantity(count, 'GPU')} with {named}"


def _no_gpus(version: str, built_for: str | None, error: str) -> Result:
    """Return the finding of a torch that shows no GPU. On a machine without GPUs it is not torch that is wrong."""
    if built_for is None:
        with suppress(UsageError):
            if find_driver() is None:
                return "unchecked", f"no NVIDIA driver is visible, and torch {version} is built without CUDA"
    return "fail", why_no_cuda(version, built_for, error)


def check_compiler(config: Config) -> Result:
    """Check that Triton, which vLLM and torch.compile use on a GPU, can build its launchers: compiler and headers."""
    if not uses_gpu(config):
        return "ok", NO_GPU
    named = os.environ.get("CC")
    compiler = shutil.which(named) if named else shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        what = f"CC = {named} does not exist" if named else "neither gcc nor clang is installed"
        return "fail", f"{what}: Triton compiles with it when an engine starts (apt install gcc, or set CC)"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        return "fail", f"{header} does not exist: Triton compiles with it (apt install python3-dev)"
    return "ok", f"{compiler}, {header}"


def check_caches(_: Config) -> Result:
    """Check that the compilers' caches can be written to: here, and in the units if they are installed."""
    if os.path.isfile(UNITS_ENVIRONMENT):
        try:
            lines = UNITS_ENVIRONMENT.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            return "unchecked", f"{UNITS_ENVIRONMENT}: {error.strerror}"
        return _caches_of_units(dict(line.split("=", 1) for line in lines if re.match(r"\w+=", line)))
    places = {
        name: Path(os.environ.get(name) or os.path.expanduser(f"~/{default}"))
        for name, default in _CACHES.items()
        if os.environ.get(name) or default
    }
    for name, place in places.items():
        # As the containers of a user id that the system does not know.
        if place.parts[0] == "~":
            return "warn", f"this user has no home directory: set {name}, or HOME"
        if not os.access(nearest_existing(place), os.W_OK | os.X_OK):
            return "warn", f"{place} cannot be written to: set {name}, or each start compiles again"
    return "ok", ", ".join(str(place) for place in places.values())


def _caches_of_units(environment: dict[str, str]) -> Result:
    for name in _CACHES:
        place = environment.get(name, "").strip().strip("\"'")
        if not place:
            return "warn", (
                f"{UNITS_ENVIRONMENT} does not set {name}: the units hide home directories, so that each start "
                f"compiles again or fails; take the line from deploy/systemd/tba.env"
            )
        if place.startswith(tuple(f"{home}/" for home in _HOMES)):
            return "fail", f"{UNITS_ENVIRONMENT}: {name} = {place} is hidden from the units: use /var/lib/tba"
    return "ok", f"{UNITS_ENVIRONMENT} sets {', '.join(_CACHES)}"


def parse_links(text: str) -> dict[tuple[str, str], str]:
    """Return the link of each ordered pair of GPUs, such as NV18 or SYS, from what `nvidia-smi topo -m` prints.

    It is a table for people, but nvidia-smi has no fields for links.
    """
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split("\t") for line in text.splitlines()]
    header = next((row for row in rows if len(row) > 1 and row[1].strip() == "GPU0"), [])
    names = [cell.strip() for cell in header]
    return {
        (row[0].strip().removeprefix("GPU"), other.removeprefix("GPU")): cell.strip()
        for row in rows
        if row[0].strip() in names and row[0].strip().startswith("GPU")
        for other, cell in zip(names[1:], row[1:], strict=False)
        if re.fullmatch(r"GPU\d+", other) and cell.strip() != "X"
    }


def numa_nodes() -> dict[str, str]:
    """Return the NUMA node of each GPU whose node the kernel tells, by index. Raises UsageError if nvidia-smi fails."""
    output = ask_nvidia_smi("--query-gpu=index,pci.bus_id", "--format=csv,noheader") or ""
    found: dict[str, str] = {}
    for line in output.splitlines():
        index, _, bus = (part.strip() for part in line.partition(","))
        # nvidia-smi writes eight digits of the domain, in capitals, and the kernel at least four.
        domain, _, place = bus.lower().partition(":")
        with suppress(OSError, ValueError):
            node = (PCI_DEVICES / f"{int(domain, 16):04x}:{place}" / "numa_node").read_text(encoding="ascii").strip()
            # -1: the machine has a single node.
            found |= {index: node} if node.isdigit() else {}
    return found


def check_topology(config: Config) -> Result:
    """Advise on NVLink between GPUs that train together, and on NUMA nodes. Never fails."""
    if not uses_gpu(config):
        return "ok", NO_GPU
    try:
        links, nodes = parse_links(ask_nvidia_smi("topo", "-m") or ""), numa_nodes()
        if not (present := list_gpus()):
            return "unchecked", "this machine shows no GPU"
        trainers = choose_gpus(config.train.gpu, present, "train.gpu") if config.train.gpu != CPU else []
    except UsageError as error:
        return "unchecked", str(error)
    if not links and not nodes:
        return "unchecked", "neither nvidia-smi topo -m nor the kernel tells how GPUs are connected"
    return "ok", "; ".join([*_links(links, _indices(trainers, present)), *_nodes(nodes)])


def _indices(names: list[str], present: list[Gpu]) -> list[str]:
    return [gpu.index for name in names for gpu in present if gpu.is_called(name)]


def _links(links: Mapping[tuple[str, str], str], trainers: list[str]) -> list[str]:
    fast = sum(link.startswith("NV") for link in links.values()) // 2
    slow = [
        f"{one} and {other} ({links[one, other]})"
        for one, other in combinations(trainers, 2)
        if not links.get((one, other), "NV").startswith("NV")
    ]
    found = [f"{quantity(fast, 'pair')} of GPUs with NVLink"]
    if slow:
        found.append(f"GPUs that train together without it, which is slow: {', '.join(slow)}")
    return found


def _nodes(numa: Mapping[str, str]) -> list[str]:
    nodes = sorted(set(numa.values()))
    if len(nodes) < 2:
        return []
    gpus = {node: ",".join(gpu for gpu, at in numa.items() if at == node) for node in nodes}
    where = "; ".join(f"`numactl --cpunodebind={node} --membind={node}` for GPUs {gpus[node]}" for node in nodes)
    return [
        f"{len(nodes)} NUMA nodes: searchers and their copies of weights stay local if each is started with {where}"
    ]
