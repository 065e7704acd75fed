"""Making the complete weights of a published snapshot on this node, from what is here already and what changed.

    full     its files, linked or fetched
    delta    newest complete ancestor ──► copy ──► patch with each delta since, in order ──► the hash it must have
    adapter  its base ──► copy ──► merge ──► the hash it must have

A version's files are made anew and never change, so an engine can reread the weights that it served before. Whatever
is in doubt (a delta is missing or damaged, the result has another hash) is made from the full snapshot instead. What
the newest adapters are on stays here, however old it is: each of them needs it again.
"""

import functools
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tba.common import adapter, delta
from tba.common.clock import Clock
from tba.common.durable import copy_file, link_or_copy
from tba.common.errors import DamagedInUse, SnapshotCorrupt, SnapshotError, SnapshotOutdated
from tba.common.log import get_logger
from tba.common.snapshot import MANIFEST, Manifest, Snapshot, check_hash, directory_name, read
from tba.common.tensor_file import Tensor, map_tensors
from tba.common.wire import WeightsRef
from tba.searcher.node_cache import Held, NodeCache
from tba.searcher.sources import Source, bring_manifest, bring_proved, open_source

log = get_logger(__name__)

_CHAIN = "chain"


@dataclass(frozen=True, slots=True)
class _Link:
    """A delta or an adapter on the way from a complete ancestor, with the directory its file is in."""

    manifest: Manifest
    directory: Path

    def apply(self, tensors: Mapping[str, Tensor]) -> None:
        """Make the weights of this version of those of its base, in place."""
        if self.manifest.change == adapter.FILE:
            adapter.apply_adapter(self.directory / adapter.FILE, tensors)
        else:
            delta.apply_delta(self.directory / delta.FILE, tensors)


class HostCopy:
    """Complete snapshots on this node. `wanted` says whether the present one still is; `tell` hears what is awaited."""

    def __init__(
        self,
        directory: Path,
        weights_from: Literal["auto", "path", "trainer"],
        clock: Clock,
        *,
        wanted: Callable[[], bool] = lambda: True,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._cache = NodeCache(directory, wanted=wanted, tell=tell)
        self._weights_from = weights_from
        self._clock = clock
        self._wanted = wanted
        self._tell = tell
        self._base: Held | None = None  # what the newest adapters are on

    def prepare(self, ref: WeightsRef, *, anew: bool = False) -> tuple[Snapshot, Held]:
        """The complete files of an announced snapshot, proved by their hashes, and the hold that keeps them.

        `anew` trusts nothing that was made or checked before. Raises SnapshotError; what was fetched is kept.
        """
        source = open_source(ref, self._weights_from, self._clock, wanted=self._wanted, tell=self._tell)
        try:
            held = self._complete(source, ref.version, ref.manifest_sha256, anew=anew)
        except OSError as error:  # a full disk, for one
            raise SnapshotError(f"v{ref.version} cannot be made in {self._cache.directory}: {error}") from error
        finally:
            source.close()
        snapshot = read(held.path)
        self._keep_base(snapshot.manifest)
        self._cache.collect()
        return snapshot, held

    def remove_made(self) -> None:
        """Leave nothing behind that was made here, except what somebody holds by now."""
        self.close()
        self._cache.remove_made()

    def close(self) -> None:
        """Let go of what is kept for snapshots to come."""
        if self._base is not None:
            self._base.release()
            self._base = None

    def _keep_base(self, manifest: Manifest) -> None:
        """Hold the base of adapters, if it is here, also where another searcher of the node has merged them."""
        if manifest.change == adapter.FILE and (base := self._cache.hold(_name(*_base(manifest)))) is not None:
            self.close()
            self._base = base

    def _complete(self, source: Source, version: int, sha256: str, *, anew: bool) -> Held:
        name = _name(version, sha256)
        if anew:
            self._cache.forget(name)
        return self._cache.acquire(
            name,
            make=lambda part: self._make(source, version, sha256, part, anew=anew),
            check=functools.partial(_check_complete, sha256),
        )

    def _make(self, source: Source, version: int, sha256: str, part: Path, *, anew: bool) -> None:
        manifest = bring_manifest(source, version, sha256, part)
        for name, entry in manifest.files.items():
            bring_proved(source, version, name, part / name, entry)
        if manifest.base is None:
            return
        if not anew:
            try:
                self._patch(source, manifest, part, from_full=False)
                return
            except SnapshotOutdated:
                raise
            except SnapshotError as error:
                log.warning("change not applied, going back to the full snapshot", version=version, reason=str(error))
        self.close()  # the base is checked, and made anew if it is damaged
        self._patch(source, manifest, part, from_full=True)

    def _patch(self, source: Source, manifest: Manifest, part: Path, *, from_full: bool) -> None:
        """Make the complete files of a delta or an adapter in the directory that its own file is in."""
        base, links = self._ancestor(source, _Link(manifest, part), from_full=from_full)
        try:
            complete = manifest.complete_files
            for name, entry in complete.items():
                (part / name).unlink(missing_ok=True)
                if name.endswith(".safetensors"):
                    copy_file(base.path / name, part / name)
                    _apply(links, part / name)
                else:
                    link_or_copy(base.path / name, part / name)
                check_hash(part / name, entry.sha256)
        except FileNotFoundError as error:
            raise SnapshotCorrupt(f"v{manifest.version} needs a file that its base lacks: {error}") from error
        finally:
            base.release()
        shutil.rmtree(part / _CHAIN, ignore_errors=True)

    def _ancestor(self, source: Source, newest: _Link, *, from_full: bool) -> tuple[Held, list[_Link]]:
        """The newest ancestor whose complete files are here, or else the full one; and the changes since, oldest first.

        `from_full` goes back to the full one in any case, and checks it again.
        """
        links = [newest]
        while True:
            version, sha256 = _base(links[0].manifest)
            name = _name(version, sha256)
            if not from_full and (held := self._cache.find(name, functools.partial(_check_complete, sha256))):
                return held, links
            directory = newest.directory / _CHAIN / directory_name(version)
            directory.mkdir(parents=True, exist_ok=True)
            manifest = bring_manifest(source, version, sha256, directory)
            if (change := manifest.change) is None:
                return self._full(source, manifest, sha256, directory, anew=from_full), links
            bring_proved(source, version, change, directory / change, manifest.files[change])
            links.insert(0, _Link(manifest, directory))

    def _full(self, source: Source, manifest: Manifest, sha256: str, directory: Path, *, anew: bool) -> Held:
        """The full snapshot of the cache; or brought into `directory` if that one is damaged and somebody serves it."""
        try:
            return self._complete(source, manifest.version, sha256, anew=anew)
        except DamagedInUse as error:
            log.warning("brought for this snapshot alone", version=manifest.version, reason=str(error))
        for name, entry in manifest.files.items():
            bring_proved(source, manifest.version, name, directory / name, entry)
        return Held.within(directory)


def _name(version: int, sha256: str) -> str:
    """A snapshot's name in the cache. The hash tells snapshots of the same version in different runs apart."""
    return f"{directory_name(version)}-{sha256[:16]}"


def _base(manifest: Manifest) -> tuple[int, str]:
    assert manifest.base is not None
    assert manifest.base_manifest_sha256 is not None
    return manifest.base, manifest.base_manifest_sha256


def _apply(links: list[_Link], weights: Path) -> None:
    tensors = map_tensors(weights, writable=True)
    for link in links:
        link.apply(tensors)


def _check_complete(manifest_sha256: str, path: Path) -> None:
    check_hash(path / MANIFEST, manifest_sha256)
    manifest = read(path).manifest
    for name, entry in {**manifest.files, **manifest.complete_files}.items():
        check_hash(path / name, entry.sha256)
