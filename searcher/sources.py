"""Where the files of published snapshots come from: the trainer's directory, or its file server."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

from tba.common.clock import Clock
from tba.common.durable import link_or_copy
from tba.common.errors import SnapshotCorrupt, SnapshotError
from tba.common.log import get_logger
from tba.common.snapshot import MANIFEST, FileEntry, Manifest, check_hash, directory_name, read
from tba.common.wire import WeightsRef
from tba.searcher.fetch import Fetcher

log = get_logger(__name__)


class Source(Protocol):
    """Brings single files of the snapshots of one run."""

    def bring(self, version: int, name: str, target: Path, size: int | None) -> None:
        """Have a file of a snapshot at `target`, where the beginning of it may be. Raises SnapshotError."""

    def close(self) -> None:
        """Close what is open."""


class PathSource:
    """A directory of snapshots on this machine or on a shared file system."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def bring(self, version: int, name: str, target: Path, size: int | None) -> None:  # noqa: ARG002
        """Give the file a second name where the file system can, so that nobody can take it away; else copy it."""
        source = self._directory / directory_name(version) / name
        target.unlink(missing_ok=True)
        try:
            link_or_copy(source, target)
        except OSError as error:
            raise SnapshotError(f"{source}: {error.strerror}: not there, or already collected") from error

    def close(self) -> None:
        """Nothing is open."""


class TrainerSource:
    """The trainer's file server."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def bring(self, version: int, name: str, target: Path, size: int | None) -> None:
        """Fetch what is missing of the file."""
        try:
            self._fetcher.fetch(version, name, target, size)
        except OSError as error:
            raise SnapshotError(f"{target} cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Close the connection."""
        self._fetcher.close()


def open_source(
    ref: WeightsRef,
    weights_from: Literal["auto", "path", "trainer"],
    clock: Clock,
    *,
    wanted: Callable[[], bool],
    tell: Callable[[str], None],
) -> Source:
    """The source of an announced snapshot and those it is based on. Raises SnapshotError if there is none."""
    path = Path(ref.path)
    if weights_from == "path" or (weights_from == "auto" and ((path / MANIFEST).is_file() or not ref.address)):
        return PathSource(path.parent)
    if not ref.address:
        raise SnapshotError(
            f'v{ref.version} cannot be fetched: search.weights_from = "trainer", and the trainer serves no snapshots; '
            "set train.serve_snapshots"
        )
    return TrainerSource(Fetcher(ref.address, clock, wanted=wanted, tell=tell))


def bring_proved(source: Source, version: int, name: str, target: Path, entry: FileEntry) -> None:
    """A file with the hash that it must have; brought once more if it has another. Raises SnapshotError."""
    source.bring(version, name, target, entry.bytes)
    try:
        check_hash(target, entry.sha256)
    except SnapshotCorrupt as error:
        log.warning("brought again", file=name, version=version, reason=str(error))
        target.unlink(missing_ok=True)
        source.bring(version, name, target, entry.bytes)
        check_hash(target, entry.sha256)


def bring_manifest(source: Source, version: int, sha256: str, target: Path) -> Manifest:
    """The manifest with this hash, in the directory `target`. Raises SnapshotError."""
    path = target / MANIFEST
    for attempt in range(2):
        if attempt or not path.is_file():
            path.unlink(missing_ok=True)
            source.bring(version, MANIFEST, path, None)
        try:
            check_hash(path, sha256)
            break
        except SnapshotCorrupt:
            if attempt:
                raise
    manifest = read(target).manifest
    if manifest.version != version:
        raise SnapshotCorrupt(f"the manifest of v{version} is that of v{manifest.version}")
    return manifest
