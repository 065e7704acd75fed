"""Following the trainer: which snapshot to load, when to try again, and what it cost."""

import time
from dataclasses import dataclass, replace

from tba.common.clock import Clock
from tba.common.errors import SnapshotError
from tba.common.log import get_logger
from tba.common.snapshot import Snapshot
from tba.common.wire import WeightsRef
from tba.searcher.engine import Engine, LoadReport
from tba.searcher.node_cache import Held
from tba.searcher.prefetch import Prefetcher, Prepared
from tba.searcher.snapshot_checks import on_one_base

log = get_logger(__name__)

_RETRY_SECONDS = 1.0
_LONGEST_RETRY_SECONDS = 30.0


@dataclass(slots=True)
class _Refused:
    ref: WeightsRef
    attempts: int
    retry_at: float  # monotonic
    reason: str


class WeightsFollower:
    """Keeps an engine on the newest snapshot that verifies and passes the canary.

    Snapshots are prepared beside generation; `follow` only swaps what is ready. One that is refused is tried again,
    ever more rarely and from its full snapshot, while the old weights serve: a shared file system may lag behind the
    announcement, and with a bounded staleness no other snapshot may ever come.
    """

    def __init__(self, engine: Engine, clock: Clock, prefetcher: Prefetcher) -> None:
        self._engine = engine
        self._clock = clock
        self._prefetcher = prefetcher
        prefetcher.make_ready = self._make_ready
        self._refused: _Refused | None = None
        self._held: Held | None = None  # the files that serve: an engine may read them again
        self._served: Snapshot | None = None  # what they are
        self.current: WeightsRef | None = None
        self.last_load_seconds = 0.0
        self.last_prepare_seconds = 0.0
        self.report: LoadReport | None = None  # of the last swap
        self.refusals = 0

    @property
    def trouble(self) -> str:
        """Why the newest snapshot does not serve, for people; empty when all is well."""
        return self._refused.reason if self._refused else self._prefetcher.waits_for

    def follow(self, newest: WeightsRef | None) -> bool:
        """Swap to the snapshot that is ready, if one is, and have the newest prepared. True if weights changed."""
        changed = False
        if (prepared := self._prefetcher.take()) is not None:
            changed = self._accept(prepared)
            self._prefetcher.swapped()
        if newest is not None and newest != self.current and not self._too_early(newest):
            again = self._refused is not None and self._refused.ref == newest
            self._prefetcher.want(newest, anew=again)
        return changed

    def close(self) -> None:
        """End the preparation and let go of the files."""
        self._prefetcher.close()
        if self._held is not None:
            self._held.release()

    def _accept(self, prepared: Prepared) -> bool:
        if prepared.snapshot is None or prepared.held is None:
            assert prepared.error is not None
            self._refuse(prepared.ref, prepared.error)
            return False
        try:
            report = self._load(prepared.ref, prepared.snapshot)
        except SnapshotError as error:
            prepared.held.release()
            self._refuse(prepared.ref, error)
            return False
        if self._held is not None:
            self._held.release()
        self._held, self._served, self._refused = prepared.held, prepared.snapshot, None
        self.last_prepare_seconds = prepared.seconds
        log.info(
            "weights loaded",
            version=prepared.ref.version,
            step=prepared.ref.step,
            seconds=self.last_load_seconds,
            seconds_prepare=prepared.seconds,
            way=report.way,
            **report.metrics(),
        )
        return True

    def _make_ready(self, snapshot: Snapshot, anew: bool) -> Snapshot:
        """In the prefetch thread, while nothing is swapped: what the engine can do beside generation.

        What changed goes along only where the engine serves the base, or other adapters on it, and nothing is in doubt.
        """
        base = self.current.manifest_sha256 if self.current else None
        on_served = snapshot.manifest.base_manifest_sha256 == base
        if not on_served and self._served is not None:
            on_served = on_one_base(snapshot, self._served)
        if anew or not on_served:
            snapshot = replace(snapshot, delta=None)
        self._engine.prepare(snapshot)
        return snapshot

    def _load(self, ref: WeightsRef, snapshot: Snapshot) -> LoadReport:
        started = time.perf_counter()
        self.report = self._engine.load_weights(snapshot)
        self.last_load_seconds = time.perf_counter() - started
        self.current = ref
        return self.report

    def _too_early(self, ref: WeightsRef) -> bool:
        refused = self._refused
        if refused is None or refused.ref != ref:
            return False
        return self._clock.monotonic() < refused.retry_at

    def _refuse(self, ref: WeightsRef, error: SnapshotError) -> None:
        attempts = self._refused.attempts + 1 if self._refused and self._refused.ref == ref else 1
        delay = min(_RETRY_SECONDS * 2 ** (attempts - 1), _LONGEST_RETRY_SECONDS)
        self._refused = _Refused(ref, attempts, self._clock.monotonic() + delay, str(error))
        self.refusals += 1
        serving = f"v{self.current.version}" if self.current else "nothing"
        log.warning("weights refused", version=ref.version, attempt=attempts, serving=serving, reason=str(error))
