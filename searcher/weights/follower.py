"""Keep an engine on the newest weights: which snapshot to load, when to retry, and what a swap cost.

The next snapshot is prepared in the background, while the engine generates:

    searcher's thread   update ──┐                                ┌──► update: swap
    preparation thread           └──► assemble ──► engine.prepare ┘

Only the newest snapshot counts. One that was begun is finished, or a searcher would never catch up with a trainer that
publishes faster than a node can prepare.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tba.common import errors
from tba.common.clock import Clock
from tba.common.config import Config
from tba.common.log import get_logger
from tba.common.run_snapshots import weights_directory
from tba.common.system.background import Background, backoff
from tba.common.weights.node_store import PinnedSnapshot
from tba.common.weights.snapshot import Snapshot
from tba.common.wire.keys import node_pair
from tba.common.wire.messages import WeightsRef
from tba.searcher.engines.engine import Engine, LoadReport
from tba.searcher.weights.assembly import SnapshotAssembler
from tba.searcher.weights.fetch import Progress

log = get_logger(__name__)

_CLOSE_SECONDS = 5.0
_RETRY_SECONDS = 1.0
_MAX_RETRY_SECONDS = 30.0
# Snapshots that the engine refuses in a row before the searcher gives up, counting attempts: about half a minute.
_MOST_REFUSED = 5
# Snapshots in a row that are gone at the first attempt and do not count as refused: newer ones are announced next.
_MOST_MISSED = 2


@dataclass(frozen=True, slots=True)
class Prepared:
    """A snapshot whose complete files are verified, and the pin that keeps them."""

    ref: WeightsRef
    snapshot: Snapshot
    pinned: PinnedSnapshot
    seconds: float


@dataclass(frozen=True, slots=True)
class _Refused:
    ref: WeightsRef
    attempts: int
    # Monotonic.
    retry_at: float
    reason: str
    # It probably does not exist any more.
    missed: bool


class WeightsFollower:
    """Keeps an engine on the newest snapshot that verifies and passes the canary.

    `update` only swaps snapshots that were prepared in the background. A refused snapshot is retried with backoff and
    from its full snapshot, while the old weights serve: a shared file system may lag behind the announcement, and with
    bounded staleness there may never be another snapshot. A searcher whose engine refuses several in a row, because
    they are another model's or fail the canary, gives up: it would serve old weights, or nothing, without an error.
    """

    def __init__(self, config: Config, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._progress = Progress()
        # Addresses of the nodes to ask for files before the trainer.
        self._nodes: Sequence[str] = ()
        directory, way, own = weights_directory(config), config.search.weights_from, node_pair(config.security.keys)
        self._assembler = SnapshotAssembler(directory, way, clock, self._progress, own)
        # What is being prepared, or is not swapped in yet: the engine holds what is ready for one snapshot only.
        self._preparing: WeightsRef | None = None
        self._thread: Background | None = None
        self._prepared: Prepared | None = None
        self._refused: _Refused | None = None
        # Its files stay pinned: an engine may read them again.
        self._served: Prepared | None = None
        # Of the snapshot that serves.
        self.last_load_seconds = self.last_prepare_seconds = 0.0
        # Report of the last swap.
        self.report: LoadReport | None = None
        self.refusals = 0
        # In a row. Those that the engine refuses have the right files.
        self._missed = 0
        self._refused_by_engine = 0

    @property
    def current(self) -> WeightsRef | None:
        """The snapshot that serves; None before the first."""
        return self._served.ref if self._served else None

    @property
    def reason(self) -> str:
        """Why the newest snapshot does not serve, for people; empty when it does, or soon will.

        One that is missing is not worth a word while another serves: the next one is announced soon.
        """
        if self._refused and not (self._refused.missed and self.current):
            return self._refused.reason
        return self._progress.waits_for

    @property
    def refused_version(self) -> int | None:
        """The version of the newest snapshot if it was refused and waits to be tried again."""
        return self._refused.ref.version if self._refused and not self._refused.missed else None

    @property
    def metadata(self) -> dict[str, Any]:
        """What rows that begin now have to record of who samples them."""
        return {}

    def ask(self, nodes: Sequence[str]) -> None:
        """Have the next snapshot fetched from these addresses, in order, before the trainer is asked."""
        self._nodes = nodes

    def update(self, newest: WeightsRef | None) -> None:
        """Swap to what is ready, and have the newest prepared. Raises EngineError if several in a row were refused."""
        if self._thread is not None and not self._thread.running:
            self._finish(self._preparing, self._thread.failure)
            self._thread = self._prepared = None
        if newest is None or newest == self.current:
            return
        refused = self._refused if self._refused is not None and self._refused.ref == newest else None
        if refused is not None and self._clock.monotonic() < refused.retry_at:
            return
        if self._thread is None:
            self._preparing, self._progress.outdated = newest, False
            # After a refusal nothing is trusted that is in the cache.
            self._thread = Background("preparation", partial(self._prepare, newest, refresh=refused is not None))
            self._thread.start()
        # A preparation of another one that only waits ends then.
        self._progress.outdated = newest != self._preparing

    def close(self) -> None:
        """End the preparation, after the work in progress unless that only waits, and release the files."""
        self._progress.outdated = True
        ended = self._thread is None or self._thread.stop(_CLOSE_SECONDS)
        for one in (self._prepared, self._served):
            if one is not None:
                one.pinned.release()
        if ended:
            self._assembler.close()

    def _finish(self, ref: WeightsRef | None, failure: BaseException | None) -> None:
        """Load what is ready, or note why the preparation of a snapshot failed."""
        if self._prepared is not None:
            self._swap(self._prepared)
        # Another snapshot would not help.
        elif isinstance(failure, errors.EngineError):
            raise failure
        elif ref is not None and failure is not None and not isinstance(failure, errors.SnapshotOutdated):
            self._refuse(ref, failure)

    def _prepare(self, ref: WeightsRef, *, refresh: bool) -> None:
        """Have the engine prepare a snapshot, in the preparation thread."""
        started = time.perf_counter()
        try:
            snapshot, pinned = self._assembler.assemble(ref, refresh=refresh, nodes=self._nodes)
        finally:
            self._progress.report("")
        with contextlib.ExitStack() as unused:
            unused.callback(pinned.release)
            if self._thread is not None and not self._thread.stopping.is_set():
                self._engine.prepare(snapshot)
                self._prepared = Prepared(ref, snapshot, pinned, time.perf_counter() - started)
                unused.pop_all()

    def _swap(self, prepared: Prepared) -> None:
        started = time.perf_counter()
        try:
            self.report = self._engine.load_weights(prepared.snapshot)
        except errors.SnapshotError as error:
            prepared.pinned.release()
            self._refuse(prepared.ref, error)
            return
        self.last_load_seconds, self.last_prepare_seconds = time.perf_counter() - started, prepared.seconds
        if self._served is not None:
            self._served.pinned.release()
        self._served, self._refused = prepared, None
        self._missed = self._refused_by_engine = 0
        about = {"version": prepared.ref.version, "step": prepared.ref.step}
        seconds = {"seconds": self.last_load_seconds, "seconds_prepare": prepared.seconds}
        log.info("weights loaded", **about, **seconds, way=self.report.way, **self.report.metrics())

    def _refuse(self, ref: WeightsRef, error: BaseException) -> None:
        # Other errors are of a manifest with invalid values, for example.
        why = str(error) if isinstance(error, errors.TbaError) else f"v{ref.version}: {errors.named(error)}"
        attempts = self._refused.attempts + 1 if self._refused and self._refused.ref == ref else 1
        delay = backoff(attempts, _RETRY_SECONDS, _MAX_RETRY_SECONDS)
        missed = isinstance(error, errors.SnapshotMissing) and attempts == 1 and self._missed < _MOST_MISSED
        self._refused = _Refused(ref, attempts, self._clock.monotonic() + delay, why, missed)
        serving = f"v{self.current.version}" if self.current else "nothing"
        about = {"version": ref.version, "attempt": attempts, "serving": serving}
        if missed:
            self._missed += 1
            log.info("weights missed", **about, reason="it is deleted already: the next version is newer")
            return
        self.refusals += 1
        log.warning("weights refused", **about, reason=why)
        self._refused_by_engine = self._refused_by_engine + 1 if isinstance(error, errors.SnapshotRefused) else 0
        if self._refused_by_engine == _MOST_REFUSED:
            advice = (
                "If engine and trainer run the same model and settings, raise search.canary_tolerance"
                if isinstance(error, errors.CanaryMismatch)
                else "Engine and trainer must load the same model directory"
            )
            refused = f"the engine refused {_MOST_REFUSED} snapshots in a row, and serves {serving}"
            raise errors.EngineError(f"{refused}; the last: {error}. {advice}")


class FixedWeights(WeightsFollower):
    """Keeps an engine on the weights that it has: those of an explorer, `search.policy`.

    `current` is the newest snapshot of the run all the same, which the staleness of the responses counts from: it says
    how much the policy has learned since they were begun.
    """

    def __init__(self, config: Config, engine: Engine, clock: Clock) -> None:
        super().__init__(config, engine, clock)
        self._policy = config.search.policy
        self._newest: WeightsRef | None = None

    @property
    def current(self) -> WeightsRef | None:
        """The newest snapshot of the run; None before the first, when there is nothing to explore for."""
        return self._newest

    @property
    def metadata(self) -> dict[str, Any]:
        return {"policy": self._policy} | ({"newest_version": self._newest.version} if self._newest else {})

    def update(self, newest: WeightsRef | None) -> None:
        self._newest = newest or self._newest
