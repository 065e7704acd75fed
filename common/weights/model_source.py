"""What `tba generate` loads and `tba export-model` writes: a snapshot, a checkpoint or a model directory."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tba.common import run_files
from tba.common.config import Config
from tba.common.errors import UsageError
from tba.common.weights.node_store import PinnedSnapshot, pin_newest, pin_path, weights_directory
from tba.common.weights.snapshot import MANIFEST, directory_name, list_snapshots

_SHOWN_VERSIONS = 20


def find_source(config: Config, named: Path | None, version: int | None) -> Path:
    """Return what to export or to load: the named directory, or a version that the run keeps.

    A run directory stands for its newest snapshot. Raises UsageError if there is no such directory.
    """
    directory = config.snapshots if named is None else named
    if version is None and (directory / MANIFEST).is_file():
        return directory
    if named is not None and version is None and (directory / "config.json").is_file():
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
    """Yield what `find_source` returns, or the newest snapshot of the run if nothing is named.

    The newest one is not deleted while the block runs if it is in memory. What is on disk is not held: the trainer
    deletes a snapshot there after `train.keep_snapshots` more. Raises as `find_source` and `pin_newest`.
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
