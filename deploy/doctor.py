"""Checks of a machine for `tba doctor`: packages, driver, compiler, caches, space, addresses, keys.

Each takes the configuration and returns (result, sentence), where the result is ok, warn, fail or unchecked, or raises
TbaError. `tba.cli.checks` has the list of all checks.
"""

import importlib.metadata
import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from urllib.parse import urlsplit

from tba.common import run_files
from tba.common.config import Config
from tba.common.config.paths import asked_packages, check_directories, nearest_existing
from tba.common.errors import ConfigError, TbaError, UsageError, quantity
from tba.common.run_snapshots import MEMORY, weights_directory
from tba.common.run_status import ask_status, monitor
from tba.common.system.devices import CPU, ask_nvidia_smi, choose_gpus, find_driver, list_gpus, why_no_cuda
from tba.common.terminal import need_engine
from tba.common.weights.model_files import model_here, weight_files
from tba.common.weights.node_store import COPIES, SNAPSHOT
from tba.common.weights.tensor_file import ITEM_BYTES, read_layout
from tba.common.wire.keys import AUTHORIZED, buffer_key, own_pair, read_authorized, server_keys
from tba.common.wire.socket_files import is_local, is_private

Result = tuple[str, str]
NO_GPU = "no GPU is configured"
_CONNECT_SECONDS = 2.0
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
GIB, MIB = 1 << 30, 1 << 20
_LOW_DISK_GIB = 10
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
# Of a parameter in a checkpoint: the weight and Adam's two moments, all in float32.
CHECKPOINT_BYTES = 12
# Users below are system users (login.defs).
_FIRST_USER = 1000
_NETWORK_FILE_SYSTEMS = ("nfs", "lustre", "ceph", "beegfs", "gpfs", "cifs", "smb", "fuse.", "9p", "virtiofs", "wekafs")


def check_packages(config: Config) -> Result:
    """Name the versions of the packages that roles need, and of those that a setting asks for."""
    asked = asked_packages(config)
    names = ["torch", "transformers", "safetensors", "pyzmq", "msgpack", *(module for _, module, _ in asked)]
    found = {name: _version(name) for name in names}
    detail = ", ".join(f"{name} {version or 'missing'}" for name, version in found.items())
    if all(found.values()):
        return "ok", detail
    for setting, module, extra in asked:
        if not found[module]:
            return "fail", f"{detail}: {setting} needs the extra {extra} (docs/install.md)"
    return "warn", f"{detail}: a trainer or searcher needs the extra train (docs/install.md), a buffer does not"


def check_engine(config: Config) -> Result:
    """Name the version of the engine. Raises MissingExtra."""
    engine = config.search.engine
    need_engine(engine, config.search.gpus)
    # Torch quotes the directories of headers for the compiler, and not those of libraries (2.13).
    if engine == "vllm" and config.search.gpus == CPU and " " in sys.prefix:
        return "warn", (
            f"{sys.prefix} has a space, which torch does not quote when it compiles for vLLM on a CPU: make the "
            "virtual environment elsewhere"
        )
    versions = ((name, _version(name)) for name in (engine, f"{engine}-cpu"))
    return "ok", next((f"{name} {version}" for name, version in versions if version), engine)


def check_address(config: Config) -> Result:
    """Check that the buffer of this run answers at its address, or no program."""
    address = config.address
    parts = urlsplit(address)
    if parts.scheme != "tcp" or parts.hostname in (None, "*") or not (parts.netloc.rpartition(":")[2]).isdigit():
        return "ok", f"{address} (not probed)"
    try:
        socket.create_connection((str(parts.hostname), parts.port or 0), _CONNECT_SECONDS).close()
        client = monitor(config, "doctor")
    except ConnectionRefusedError:
        return "ok", f"{address}: nothing listens there"
    # ValueError: the port is out of range.
    except (OSError, ValueError, ConfigError) as error:
        return "fail", f"{address}: {error}"
    with closing(client):
        status, obstacle = ask_status(client, deadline_seconds=2.0), client.obstacle
    if status is None:
        return "fail", f"{address}: {obstacle}" if obstacle else (
            f"{address} is in use by a program that does not answer like a buffer: set buffer.address, or run this "
            "again if a buffer is starting there"
        )
    if status.run_name != config.run.name:
        return "fail", f"{address} is in use by the buffer of run {status.run_name}: set buffer.address or run.name"
    return "ok", f"{address}: the buffer of run {status.run_name} answers"


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
    """Return the link of each ordered pair of GPUs, such as NV18 or SYS, from `nvidia-smi topo -m`."""
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
    trainers = [gpu.index for name in trainers for gpu in present if gpu.is_called(name)]
    return "ok", "; ".join([*_links(links, trainers), *_nodes(nodes)])


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


def check_endpoint(config: Config) -> Result:
    """Tell where searchers answer requests of agents, and check that the first can listen there."""
    if not config.search.serve:
        return "ok", "search.serve is not set"
    host, port = config.search.serve_address
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        return "warn", f"search.serve = {config.search.serve} cannot be bound: {error}; is it this run, at work?"
    asks = "with a token" if config.search.serve_token.get_secret_value() else "without a token, from this machine"
    many = "each searcher takes the first free port from there on"
    return "ok", f"http://{host}:{port}/v1 {asks}; {many if port else 'each searcher takes a free port and logs it'}"


def check_keys(config: Config) -> Result:
    """Check the key files of this node, and that no address is open to other machines without keys."""
    addresses = {
        "buffer.address": config.address,
        "train.serve_snapshots": config.train.serve_snapshots,
        "search.serve_snapshots": config.search.serve_snapshots,
    }
    named = {setting: address for setting, address in addresses.items() if address}
    try:
        if config.security.keys is None:
            return _without_keys(config, named)
        own, buffer = own_pair(config.security.keys), buffer_key(config.security.keys)
    except ConfigError as error:
        return "fail", str(error)
    admitted = read_authorized(config.security.keys / AUTHORIZED)
    files = len(list((config.security.keys / AUTHORIZED).glob("*.pub")))
    if len(admitted) < files:
        return "warn", f"{quantity(files - len(admitted), 'key')} in {config.security.keys / AUTHORIZED} cannot be used"
    if own.public == buffer and not admitted:
        return "warn", f"the buffer of {own.name} admits no key: `tba keys authorize`"
    return "ok", f"{own.name}; its servers admit {quantity(len(admitted), 'key')}"


def _without_keys(config: Config, addresses: dict[str, str]) -> Result:
    for setting, address in addresses.items():
        server_keys(config.security.keys, address, setting, insecure=config.security.insecure)
    remote = [setting for setting, address in addresses.items() if not is_private(address)]
    if remote:
        return "warn", f"security.insecure: every program that reaches {', '.join(remote)} may read and change the run"
    open_here = [setting for setting, address in addresses.items() if address.startswith("tcp://")]
    if open_here:
        return "warn", f'every user of this machine may connect to {", ".join(open_here)}: use buffer.address = "auto"'
    return "ok", "none: the sockets are files of this user"


def check_modes(config: Config) -> Result:
    """Check that other users cannot read what the run has written."""
    # A directory of an earlier release may be open, and one that is made by hand.
    if config.run.dir.exists() and config.run.dir.stat().st_mode & 0o077:
        found = [config.run.dir / run_files.LOGS, config.snapshots, config.checkpoints, config.spool, config.database]
        for path in found:
            if path.exists() and path.stat().st_mode & 0o077:
                return "warn", f"other users may read {path}: chmod -R go= {config.run.dir}"
    return "ok", f"only this user may read what is in {config.run.dir}"


@dataclass(frozen=True, slots=True)
class Mount:
    """A file system: where it is mounted, and its type."""

    point: Path
    type: str

    @property
    def is_network(self) -> bool:
        """Whether other machines may see the same files."""
        return self.type.startswith(_NETWORK_FILE_SYSTEMS)


def mount_of(path: Path, mounts: Path = Path("/proc/self/mounts")) -> Mount:
    """Return the file system of a path that may not exist yet."""
    place = nearest_existing(path).resolve()
    found = Mount(Path("/"), "")
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        _, point, kind, *_ = line.split()
        one = Path(point.replace("\\040", " "))
        # A later mount hides an earlier one at the same point.
        if place.is_relative_to(one) and len(one.parts) >= len(found.point.parts):
            found = Mount(one, kind)
    return found


def count_parameters(config: Config) -> int | None:
    """Return the number of weights in the model's files, None if they are not on this machine or cannot be read."""
    try:
        model = model_here(config.model.path)
        spans = [] if model is None else [s for file in weight_files(model) for s in read_layout(file).spans.values()]
    except TbaError:
        return None
    return sum((span.end - span.start) // ITEM_BYTES[span.dtype] for span in spans) or None


def check_disk(config: Config, count: Callable[[Config], int | None], *, here: bool = True) -> Result:
    """Compare free space with what the run will store, if it is to run `here`.

    `count` returns the number of parameters that config.json tells, for a model whose weights are not here.
    """
    try:
        if here:
            check_directories(config)
        weights = count_parameters(config) or count(config)
    except TbaError as error:
        return "fail", str(error)
    if not here:
        return "unchecked", _parts(_needs(config, weights)) if weights else "the model is not here: its size is unknown"
    if not weights:
        free = shutil.disk_usage(nearest_existing(config.run.dir)).free / GIB
        result = "unchecked" if free >= _LOW_DISK_GIB else "warn"
        return result, f"{free:.0f} GiB free for {config.run.dir}; the model is not here, so its needs are unknown"
    by_device: dict[int, list[tuple[str, Path, int]]] = {}
    for what, path, size in _needs(config, weights):
        # Without what the run has written.
        entry = what, path, max(0, size - _size_of(path))
        by_device.setdefault(os.stat(nearest_existing(path)).st_dev, []).append(entry)
    results = [_compare(entries) for entries in by_device.values()]
    worst = "warn" if any(result == "warn" for result, _ in results) else "ok"
    return worst, "; ".join(detail for _, detail in results)


def _needs(config: Config, weights: int) -> list[tuple[str, Path, int]]:
    """Return (what, directory, bytes) that a trainer, and the searchers of its node, write in a whole run."""
    train, snapshot = config.train, weights * _DTYPE_BYTES[config.model.dtype]
    kept = train.steps // train.keep_snapshot_every if train.keep_snapshot_every else 0
    # With adapters, a checkpoint has only theirs.
    checkpoint = 0 if config.lora.rank else weights * CHECKPOINT_BYTES
    # One more than are kept: the oldest is deleted when the newest is complete.
    return [
        ("checkpoints", config.checkpoints, (run_files.KEEP_CHECKPOINTS + 1) * checkpoint),
        ("snapshots", config.snapshots, (train.keep_snapshots + kept + 2) * snapshot),
        ("weights", weights_directory(config), COPIES * snapshot),
    ]


def _size_of(directory: Path) -> int:
    """Return the bytes on disk of what can be read there. A run may delete some of it meanwhile."""
    size = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                size += os.stat(os.path.join(folder, name)).st_blocks * 512
    return size


def _compare(entries: list[tuple[str, Path, int]]) -> Result:
    place = nearest_existing(entries[0][1])
    usage, needed = shutil.disk_usage(place), sum(size for _, _, size in entries)
    detail = f"{usage.free / GIB:.1f} GiB free at {place}, {_parts(entries)}"
    if usage.free < needed:
        return "warn", f"{detail}: free space, choose another directory, or keep fewer (train.keep_snapshot_every)"
    if usage.free < _LOW_DISK_GIB * GIB and mount_of(place).type != "tmpfs":
        return "warn", f"{detail}: that fits, and responses in the database need more as the run goes on"
    return "ok", detail


def _parts(entries: list[tuple[str, Path, int]]) -> str:
    total = sum(size for _, _, size in entries)
    unit, name = (GIB, "GiB") if total >= GIB else (MIB, "MiB")
    parts = ", ".join(f"{what} {size / unit:.1f}" for what, _, size in entries)
    return f"up to {total / unit:.1f} {name} needed ({parts})"


def check_weights_directory(config: Config) -> Result:
    """Describe where the weights that searchers map are, and whether a kept snapshot is a link or a copy of them."""
    try:
        place = weights_directory(config)
    except TbaError as error:
        return "fail", str(error)
    if model_here(config.model.path) is None:
        return "unchecked", "the model is not here: its size decides whether the weights are in /dev/shm"
    mount, snapshots = mount_of(place), mount_of(config.snapshots)
    if mount.is_network:
        return "fail", f"{place} is on {mount.type}: locks need a local file system; set search.weights_dir"
    detail = f"{place} on {mount.type} at {mount.point}"
    if mount.type != "tmpfs":
        size = shutil.disk_usage(MEMORY).total / GIB if MEMORY.is_dir() else 0.0
        detail += f", a disk (/dev/shm has {size:.1f} GiB); each publication is faster in memory"
    if mount.point != snapshots.point:
        detail += f"; snapshots on {snapshots.type} at {snapshots.point}: kept ones are copied, not linked"
    # A run that is killed or stopped leaves its newest ones, also in memory.
    others = sum(_size_of(path) for path in place.parent.glob(f"*/{SNAPSHOT}") if path.parent != place)
    if others:
        detail += f"; other runs have {others / MIB:,.0f} MiB in {place.parent}: delete what belongs to stopped ones"
    if mount.point == MEMORY and deleted_at_logout(os.getuid()):
        return "warn", (
            f"{detail}; systemd deletes it when this user has logged out (RemoveIPC): `loginctl enable-linger`, or set "
            "search.weights_dir"
        )
    return "ok", detail


def deleted_at_logout(uid: int, root: Path = Path("/")) -> bool:
    """Whether systemd-logind deletes a user's files in /dev/shm at the last logout (RemoveIPC in logind.conf(5))."""
    if uid < _FIRST_USER or not (root / "run/systemd/system").is_dir():
        return False
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        return False
    return not (root / "var/lib/systemd/linger" / name).exists()


def check_other_nodes(config: Config) -> Result:
    """Check that searchers on other machines, which a buffer's address admits, can get the weights."""
    serves = config.train.serve_snapshots
    if is_local(config.address):
        return "ok", f"buffer.address {config.address} is for this machine only"
    if serves and is_local(serves):
        detail = f"train.serve_snapshots {serves} is for this machine only, and buffer.address is not: use tcp://*"
        return "warn", detail
    if serves:
        others = config.search.serve_snapshots
        more = f", and each node serves them at {others}" if others else ""
        return "ok", f"the trainer serves snapshots at {serves}{more}"
    mount = mount_of(config.run.dir)
    if mount.is_network and config.train.snapshots_in != "memory":
        return "ok", f"other machines read {config.snapshots} on {mount.type}, if they mount it at the same path"
    return "warn", (
        f"other machines may connect to {config.address}, but their searchers cannot get weights: set "
        'train.serve_snapshots = "tcp://*:5758", or put run.dir on a shared file system (not with '
        'train.snapshots_in = "memory")'
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
