"""Checks of `tba doctor` on space and file systems: checkpoints, snapshots, the weights directory, other nodes."""

import os
import pwd
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tba.common import run_files
from tba.common.config import Config
from tba.common.config.paths import check_directories, nearest_existing
from tba.common.errors import TbaError
from tba.common.run_snapshots import MEMORY, weights_directory
from tba.common.weights.model_files import model_here, weight_files
from tba.common.weights.node_store import COPIES, SNAPSHOT
from tba.common.weights.tensor_file import ITEM_BYTES, read_layout
from tba.common.wire.socket_files import is_local

Result = tuple[str, str]
GIB, MIB = 1 << 30, 1 << 20
_LOW_DISK_GIB = 10
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
# Of a parameter in a checkpoint: the weight and Adam's two moments, all in float32.
CHECKPOINT_BYTES = 12
# Users below are system users (login.defs).
_FIRST_USER = 1000
_NETWORK_FILE_SYSTEMS = ("nfs", "lustre", "ceph", "beegfs", "gpfs", "cifs", "smb", "fuse.", "9p", "virtiofs", "wekafs")


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
    """Compare free space with what the run will store at the size of its model.

    `count` returns the number of parameters that config.json of the model tells, for one whose weights are not here.
    Without `here` the run is meant for another node, whose space is not known.
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
    for what, path, size in _still_needs(config, weights):
        by_device.setdefault(os.stat(nearest_existing(path)).st_dev, []).append((what, path, size))
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


def _still_needs(config: Config, weights: int) -> list[tuple[str, Path, int]]:
    """Return the needs without what the run has written."""
    return [(what, path, max(0, size - _size_of(path))) for what, path, size in _needs(config, weights)]


def _size_of(directory: Path) -> int:
    if not os.access(directory, os.R_OK | os.X_OK):
        return 0
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def _compare(entries: list[tuple[str, Path, int]]) -> Result:
    place = nearest_existing(entries[0][1])
    usage, needed = shutil.disk_usage(place), sum(size for _, _, size in entries)
    detail = f"{usage.free / GIB:.1f} GiB free at {place}, {_parts(entries)}"
    if usage.free >= needed and (usage.free >= _LOW_DISK_GIB * GIB or mount_of(place).type == "tmpfs"):
        return "ok", detail
    return "warn", f"{detail}: free space, choose another directory, or keep fewer (train.keep_snapshot_every)"


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
    if others := _size_of_other_runs(place):
        detail += f"; other runs have {others / MIB:,.0f} MiB in {place.parent}: delete what belongs to stopped ones"
    if mount.point == MEMORY and deleted_at_logout(os.getuid()):
        return "warn", (
            f"{detail}; systemd deletes it when this user has logged out (RemoveIPC): `loginctl enable-linger`, or set "
            "search.weights_dir"
        )
    return "ok", detail


def _size_of_other_runs(place: Path) -> int:
    """Bytes of the weights of other runs: one that is killed or stopped leaves its newest ones, also in memory."""
    found = (path for path in place.parent.glob(f"*/{SNAPSHOT}") if path.parent != place)
    return sum(_size_of(path) for path in found)


def deleted_at_logout(uid: int, root: Path = Path("/")) -> bool:
    """Whether systemd-logind may delete a user's files in /dev/shm after the last session: RemoveIPC in logind.conf(5).

    System users and users that linger are excepted.
    """
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
        return (
            "warn",
            f"train.serve_snapshots {serves} is for this machine only, and buffer.address is not: use tcp://*",
        )
    if serves:
        others = config.search.serve_snapshots
        return "ok", f"the trainer serves snapshots at {serves}" + (
            f", and each node serves them at {others}"
            if others
            else '; with search.serve_snapshots = "tcp://*:5759" on each node, nodes fetch from one another too'
        )
    mount = mount_of(config.run.dir)
    if mount.is_network and config.train.snapshots_in != "memory":
        return "ok", f"other machines read {config.snapshots} on {mount.type}, if they mount it at the same path"
    return "warn", (
        f"other machines may connect to {config.address}, but their searchers cannot get weights: set "
        'train.serve_snapshots = "tcp://*:5758", or put run.dir on a shared file system (not with '
        'train.snapshots_in = "memory")'
    )
