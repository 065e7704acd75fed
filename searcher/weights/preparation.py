"""Prepare the next snapshot in the background, while the engine generates.

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
from tba.common.errors import EngineError, SnapshotError, SnapshotOutdated
from tba.common.log import get_logger
from tba.common.system.background import Background
from tba.common.weights.node_store import PinnedSnapshot, weights_directory
from tba.common.weights.snapshot import Snapshot
from tba.common.wire.keys import node_pair
from tba.common.wire.messages import WeightsRef
from tba.searcher.weights.assembly import SnapshotAssembler
from tba.searcher.weights.progress import Progress

log = get_logger(__name__)

_CLOSE_SECONDS = 5.0


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
            weights_directory(config), config.search.weights_from, clock, self.progress, node_pair(config.security)
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

    # ------------------------------------------------------------ preparation thread

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
        except Exception as error:
            # Such as a manifest with values that nothing else checks. It is reported and tried again.
            log.exception("weights not prepared", version=ref.version)
            return Failed(ref, SnapshotError(f"v{ref.version}: {type(error).__name__}: {error}"))
        return Prepared(ref, snapshot, pinned, time.perf_counter() - started)
