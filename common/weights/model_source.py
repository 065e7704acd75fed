"""What `tba generate` loads and `tba export-model` writes: a snapshot, a checkpoint or a model directory."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tba.common.config import Config
from tba.common.errors import SnapshotError, UsageError
from tba.common.weights.node_store import pin_path, weights_directory
from tba.common.weights.snapshot import MANIFEST, choose_snapshots, directory_name, list_snapshots

_SHOWN_VERSIONS = 20
_ATTEMPTS = 10


def find_source(config: Config, named: Path | None, version: int | None) -> Path:
    """Return what to export or to load: the named directory, a version that the run keeps, or its newest snapshot.

    A run directory stands for its newest snapshot. Raises UsageError if there is no such directory.
    """
    if named is None and version is None:
        return choose_snapshots(config.snapshots, weights_directory(config), None, every=False)[-1]
    directory = config.snapshots if named is None else named
    if version is None and (directory / MANIFEST).is_file():
        return directory
    if named is not None and version is None and (directory / "config.json").is_file():
        return directory
    if named is not None and not named.is_dir():
        what = "is a file" if named.exists() else "does not exist"
        raise UsageError(f"{named} {what}: name a run directory, a snapshot, a checkpoint or a model directory")
    if named is not None and (named / "snapshots").is_dir():
        directory = named / "snapshots"
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
    """Yield what `find_source` returns. The newest snapshot in memory is not deleted while the block runs.

    It is chosen again if the trainer deletes it before it is held. Raises SnapshotError if that happens each time. What
    is on disk is not held: the trainer deletes a snapshot there after `train.keep_snapshots` more.
    """
    if named is not None or version is not None:
        yield find_source(config, named, version)
        return
    for _ in range(_ATTEMPTS):
        source = find_source(config, None, None)
        if source.parent != weights_directory(config):
            yield source
            return
        if (pinned := pin_path(source)) is not None:
            try:
                yield source
            finally:
                pinned.release()
            return
    raise SnapshotError(f"{config.snapshots}: each snapshot was deleted before it could be read: try again")


def check_export(source: Path, out: Path) -> None:
    """Raise UsageError if `source` is a model directory already, or `out` exists and is not an empty directory."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists already: name another directory")
    if not (source / MANIFEST).is_file():
        raise UsageError(f"{source} is a model directory already: copy it")
