"""Keep an engine on the newest weights: which snapshot to load, when to retry, and what a swap cost.

The next snapshot is prepared in the background, while the engine generates:

    searcher's thread   want ──► [newest wanted] ────────────┐                     ┌──► take ──► swap ──► swapped
    preparation thread                            assemble ──┴──► engine.prepare ──┘

Only the newest snapshot counts: one that is wanted replaces another that was wanted and not begun. One that was begun
is finished, or a searcher would never catch up with a trainer that publishes faster than a node can prepare.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tba.common.clock import Clock
from tba.common.config import Config
from tba.common.errors import (
    CanaryMismatch,
    ConfigError,
    EngineError,
    SnapshotError,
    SnapshotMissing,
    SnapshotOutdated,
    SnapshotRefused,
)
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
# Snapshots in a row whose files are gone at the first attempt, and that do not count as refused: newer ones have
# replaced them, and are announced next.
_MOST_MISSED = 2


@dataclass(frozen=True, slots=True)
class Prepared:
    """A snapshot whose complete files are verified, and the pin that keeps them."""

    ref: WeightsRef
    snapshot: Snapshot
    pinned: PinnedSnapshot
    seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A snapshot that could not be prepared, and why."""

    ref: WeightsRef
    error: SnapshotError


class Preparation:
    """A thread that prepares snapshots for an engine. Its methods are for one other thread.

    `make_ready` is called in the preparation thread with a complete snapshot.

    Invariant: nothing is prepared while `_result` is set, from its preparation until the engine has swapped it in. The
    engine holds what was made ready for one snapshot only: preparing another one would overwrite it.
    """

    def __init__(self, config: Config, clock: Clock, make_ready: Callable[[Snapshot], None]) -> None:
        self.progress = Progress()
        # Addresses of the nodes to ask for files before the trainer. Set by the other thread.
        self.nodes: Sequence[str] = ()
        self._assembler = SnapshotAssembler(
            weights_directory(config), config.search.weights_from, clock, self.progress, node_pair(config.security.keys)
        )
        self._make_ready = make_ready
        # Guards everything below.
        self._changed = threading.Condition()
        # What to prepare next, and whether to trust nothing that is in the cache.
        self._wanted: tuple[WeightsRef, bool] | None = None
        self._preparing: WeightsRef | None = None
        self._result: Prepared | Failed | None = None
        self._thread = Background("preparation", self._run, wake=self._wake)
        self._thread.start()

    def want(self, ref: WeightsRef, *, refresh: bool) -> None:
        """Prepare a snapshot, unless that is in progress or done. `refresh` trusts nothing that is in the cache."""
        with self._changed:
            if (failure := self._thread.failure) is not None:
                raise SnapshotError(f"the thread that prepares weights has failed: {failure}") from failure
            if ref == self._preparing or (self._result is not None and ref == self._result.ref):
                self._wanted = None
            elif self._wanted is None or self._wanted[0] != ref:
                self._wanted = (ref, refresh)
                self._changed.notify_all()
            self.progress.outdated = self._wanted is not None

    def take(self) -> Prepared | Failed | None:
        """The result; None if there is none. Call `swapped` afterwards."""
        return self._result

    def swapped(self) -> None:
        """The engine has loaded or refused what was taken: the next snapshot may be prepared."""
        with self._changed:
            self._result = None
            self._changed.notify_all()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for a result to take; False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._result is not None, timeout_seconds)

    def close(self) -> None:
        """End the thread, after the work in progress unless that only waits. Releases results not taken."""
        ended = self._thread.stop(_CLOSE_SECONDS)
        if isinstance(self._result, Prepared):
            self._result.pinned.release()
        if ended:
            self._assembler.close()

    # In the preparation thread:

    def _wake(self) -> None:
        with self._changed:
            self.progress.outdated = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (wanted := self._next()) is not None:
            result = self._prepare(*wanted)
            with self._changed:
                self._preparing = None
                self.progress.report("")
                self._result = result
                self._changed.notify_all()

    def _next(self) -> tuple[WeightsRef, bool] | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._thread.stopping.is_set() or (self._wanted is not None and self._result is None)
            )
            if self._thread.stopping.is_set() or self._wanted is None:
                return None
            wanted, self._wanted = self._wanted, None
            self.progress.outdated = False
            self._preparing = wanted[0]
            return wanted

    def _prepare(self, ref: WeightsRef, refresh: bool) -> Prepared | Failed | None:
        """The snapshot, ready for the engine; or why not; None if it is not wanted any more."""
        started = time.perf_counter()
        try:
            snapshot, pinned = self._assembler.assemble(ref, refresh=refresh, nodes=self.nodes)
            try:
                if self._thread.stopping.is_set():
                    pinned.release()
                    return None
                self._make_ready(snapshot)
            except BaseException:
                pinned.release()
                raise
        except SnapshotOutdated:
            return None
        except EngineError:
            # Another snapshot would not help: it ends the thread.
            raise
        except SnapshotError as error:
            return Failed(ref, error)
        # Of a weights directory that cannot be used now.
        except ConfigError as error:
            return Failed(ref, SnapshotError(str(error)))
        except Exception as error:
            # For example, a manifest with invalid values. It is reported and tried again.
            log.exception("weights not prepared", version=ref.version)
            return Failed(ref, SnapshotError(f"v{ref.version}: {type(error).__name__}: {error}"))
        return Prepared(ref, snapshot, pinned, time.perf_counter() - started)


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

    def __init__(self, engine: Engine, clock: Clock, preparation: Preparation) -> None:
        self._engine = engine
        self._clock = clock
        self._preparation = preparation
        self._refused: _Refused | None = None
        # Its files stay pinned: an engine may read them again.
        self._served: Prepared | None = None
        self.last_load_seconds = 0.0
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
    def last_prepare_seconds(self) -> float:
        """How long the preparation of the snapshot that serves took."""
        return self._served.seconds if self._served else 0.0

    @property
    def reason(self) -> str:
        """Why the newest snapshot does not serve, for people; empty when it does, or soon will.

        One that is missing is not worth a word while another serves: the next one is announced soon.
        """
        if self._refused and not (self._refused.missed and self.current):
            return self._refused.reason
        return self._preparation.progress.waits_for

    @property
    def refused_version(self) -> int | None:
        """The version of the newest snapshot if it was refused and waits to be tried again."""
        return self._refused.ref.version if self._refused and not self._refused.missed else None

    def ask(self, nodes: Sequence[str]) -> None:
        """Have the next snapshot fetched from these addresses, in order, before the trainer is asked."""
        self._preparation.nodes = nodes

    def update(self, newest: WeightsRef | None) -> None:
        """Swap to the snapshot that is ready, if one is, and have the newest one prepared.

        Raises EngineError when the engine has refused several in a row.
        """
        if (result := self._preparation.take()) is not None:
            if isinstance(result, Prepared):
                self._swap(result)
            else:
                self._refuse(result.ref, result.error)
            self._preparation.swapped()
        if newest is not None and newest != self.current:
            refused = self._refused if self._refused is not None and self._refused.ref == newest else None
            if refused is None or self._clock.monotonic() >= refused.retry_at:
                self._preparation.want(newest, refresh=refused is not None)

    def close(self) -> None:
        """End the preparation and release the files."""
        self._preparation.close()
        if self._served is not None:
            self._served.pinned.release()

    def _swap(self, prepared: Prepared) -> None:
        started = time.perf_counter()
        try:
            self.report = self._engine.load_weights(prepared.snapshot)
        except SnapshotError as error:
            prepared.pinned.release()
            self._refuse(prepared.ref, error)
            return
        self.last_load_seconds = time.perf_counter() - started
        if self._served is not None:
            self._served.pinned.release()
        self._served, self._refused = prepared, None
        self._missed = self._refused_by_engine = 0
        log.info(
            "weights loaded",
            version=prepared.ref.version,
            step=prepared.ref.step,
            seconds=self.last_load_seconds,
            seconds_prepare=prepared.seconds,
            way=self.report.way,
            **self.report.metrics(),
        )

    def _refuse(self, ref: WeightsRef, error: SnapshotError) -> None:
        attempts = self._refused.attempts + 1 if self._refused and self._refused.ref == ref else 1
        delay = backoff(attempts, _RETRY_SECONDS, _MAX_RETRY_SECONDS)
        missed = isinstance(error, SnapshotMissing) and attempts == 1 and self._missed < _MOST_MISSED
        self._refused = _Refused(ref, attempts, self._clock.monotonic() + delay, str(error), missed)
        serving = f"v{self.current.version}" if self.current else "nothing"
        about = {"version": ref.version, "attempt": attempts, "serving": serving, "reason": str(error)}
        if missed:
            self._missed += 1
            log.info("weights missed", **about)
            return
        self.refusals += 1
        log.warning("weights refused", **about)
        self._refused_by_engine = self._refused_by_engine + 1 if isinstance(error, SnapshotRefused) else 0
        if self._refused_by_engine == _MOST_REFUSED:
            advice = (
                "If engine and trainer run the same model and settings, raise search.canary_tolerance"
                if isinstance(error, CanaryMismatch)
                else "Engine and trainer must load the same model directory"
            )
            refused = f"the engine refused {_MOST_REFUSED} snapshots in a row, and serves {serving}"
            raise EngineError(f"{refused}; the last: {error}. {advice}")
