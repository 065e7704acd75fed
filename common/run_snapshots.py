"""Where the snapshots of a run are on this node, and which one a command means."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import xxhash

from tba.common import run_files
from tba.common.config import Config
from tba.common.errors import ConfigError, SnapshotError, UsageError
from tba.common.weights.model_files import model_here, weight_files
from tba.common.weights.node_store import COPIES, PinnedSnapshot, pin_path
from tba.common.weights.snapshot import MANIFEST, choose_snapshots, directory_name, list_snapshots

# Every user writes there; the directory below it is checked.
MEMORY = Path("/dev/shm")  # noqa: S108
# As much as the trainer leaves free by default, `train.min_free_mib`: it would wait there before its first snapshot.
_LEFT_FREE = 512 << 20
_SHOWN_VERSIONS = 20
# Attempts to pin the newest snapshot of a run that publishes and deletes quickly.
_ATTEMPTS = 10
T = TypeVar("T")


def weights_directory(config: Config) -> Path:
    """The directory of a run's snapshots on this node: in memory if there is room for a few copies of the model.

    The same for all processes of this user. Raises ConfigError if other users could write to it.
    """
    if config.search.weights_dir is not None:
        return config.search.weights_dir / config.run.name
    if not _fits_in_memory(config):
        return config.run.dir / run_files.WEIGHTS / config.run.name
    own = MEMORY / f"tba-{os.getuid()}"
    try:
        own.mkdir(mode=0o700, exist_ok=True)
        state = own.lstat()
    except OSError as error:
        raise ConfigError(f"{own} cannot be created ({error.strerror}): set search.weights_dir") from error
    if state.st_uid != os.getuid() or state.st_mode & 0o022 or own.is_symlink():
        raise ConfigError(f"{own} can be written to by other users: set search.weights_dir")
    # Another run of this name in another directory is another run.
    where = xxhash.xxh32_hexdigest(str(config.run.dir.resolve()).encode())
    return own / "weights" / f"{config.run.name}-{where}"


def _fits_in_memory(config: Config) -> bool:
    """Whether the memory file system is large enough, by settings of all roles. An absent model is taken for small."""
    if not os.access(MEMORY, os.W_OK | os.X_OK):
        return False
    size, model = shutil.disk_usage(MEMORY).total, model_here(config.model.path)
    try:
        files = [] if model is None else weight_files(model)
    except ConfigError:
        files = []
    needed = COPIES * sum(path.stat().st_size for path in files if path.is_file())
    return size >= needed + _LEFT_FREE


def pin_newest(config: Config, pin: Callable[[Path], T | None]) -> T:
    """Return what `pin` returns for the newest snapshot of a run; None means that the trainer has deleted it.

    Then the newest one is chosen again. Raises UsageError if there is none, SnapshotError if each was deleted.
    """
    for _ in range(_ATTEMPTS):
        (path,) = choose_snapshots(config.snapshots, weights_directory(config), None, every=False)
        if (pinned := pin(path)) is not None:
            return pinned
    raise SnapshotError(
        f"{config.snapshots}: each snapshot was deleted before it could be read: try again, or raise "
        "train.keep_snapshots"
    )


def is_model_directory(path: Path) -> bool:
    """Return whether a directory is a model that is no snapshot, as `tba sft` writes."""
    return (path / "config.json").is_file() and not (path / MANIFEST).is_file()


def find_source(config: Config, named: Path | None, version: int | None) -> Path:
    """Return a named directory, or a version that the run keeps, by default the newest. Raises UsageError."""
    directory = config.snapshots if named is None else named
    if version is None and ((directory / MANIFEST).is_file() or (named is not None and is_model_directory(named))):
        return directory
    if named is not None and not named.is_dir():
        what = "is a file" if named.exists() else "does not exist"
        raise UsageError(f"{named} {what}: name a run directory, a snapshot, a checkpoint or a model directory")
    if named is not None and (named / run_files.SNAPSHOTS).is_dir():
        directory = named / run_files.SNAPSHOTS
    kept = {path.name: path for path in list_snapshots(directory)}
    if not kept:
        raise UsageError(f"{directory} is not a run, snapshot, checkpoint or model directory")
    if version is None:
        return kept[max(kept)]
    if directory_name(version) not in kept:
        versions = ", ".join(str(int(name[1:])) for name in list(kept)[-_SHOWN_VERSIONS:])
        raise UsageError(f"{directory} has no version {version}; the newest that it has: {versions}")
    return kept[directory_name(version)]


@contextmanager
def held_source(config: Config, named: Path | None, version: int | None) -> Iterator[Path]:
    """Yield what `find_source` returns, or the run's newest snapshot if nothing is named, kept while it is in memory.

    Raises as `find_source` and `pin_newest`.
    """
    if named is not None or version is not None:
        yield find_source(config, named, version)
        return
    memory = weights_directory(config)
    pinned = pin_newest(config, lambda path: pin_path(path) if path.parent == memory else PinnedSnapshot(path))
    try:
        yield pinned.path
    finally:
        pinned.release()


def check_export(source: Path, out: Path) -> None:
    """Raise UsageError if `source` is a model directory already, or `out` exists and is not an empty directory."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists already: name another directory")
    if not (source / MANIFEST).is_file():
        raise UsageError(f"{source} is a model directory already: copy it")
