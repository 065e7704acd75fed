"""Preparing the next snapshot in the background, while the engine generates.

    searcher's thread   want ──► [newest wanted] ────────┐                            ┌──► take ──► swap ──► swapped
    prefetch thread                                fetch ┴► make ready for the engine ─┘

Only the newest counts: what is wanted replaces what was wanted before and is not begun. What is begun is finished, or
a trainer that publishes faster than a node prepares would never be followed.
"""

import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tba.common.clock import Clock
from tba.common.config import Config
from tba.common.errors import ConfigError, EngineError, SnapshotError, SnapshotOutdated
from tba.common.log import get_logger
from tba.common.snapshot import Snapshot
from tba.common.wire import WeightsRef
from tba.searcher.host_copy import HostCopy
from tba.searcher.node_cache import Held

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A snapshot whose complete files are here and proved; `held` keeps them. Or why there is none."""

    ref: WeightsRef
    snapshot: Snapshot | None
    held: Held | None
    error: SnapshotError | None
    seconds: float


class Prefetcher:
    """A thread that prepares snapshots. `want` and `take` are for one other thread."""

    def __init__(self, config: Config, clock: Clock) -> None:
        self._copies = HostCopy(
            weights_directory(config), config.search.weights_from, clock, wanted=self._is_wanted, tell=self._tell
        )
        # What remains to be done with a complete snapshot (the second argument: with nothing that was made before).
        self.make_ready: Callable[[Snapshot, bool], Snapshot] | None = None
        self._changed = threading.Condition()
        self._swapping = False  # a result was taken and is not yet swapped in
        self._wanted: tuple[WeightsRef, bool] | None = None
        self._busy_with: WeightsRef | None = None
        self._results: deque[Prepared] = deque()  # at most one snapshot, and after it one error
        self._closing = False
        self._failure: Exception | None = None
        self.waits_for = ""  # what the thread waits for, for people
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
        self._thread.start()

    def want(self, ref: WeightsRef, *, anew: bool) -> None:
        """Have a snapshot prepared, unless that is under way. `anew`: with nothing that was made before."""
        with self._changed:
            if self._failure is not None:
                raise SnapshotError(f"weights are prepared no more: {self._failure}") from self._failure
            ready = any(result.ref == ref for result in self._results)  # since the last `take`
            if ready or ref == self._busy_with:
                self._wanted = None
            elif self._wanted is None or self._wanted[0] != ref:
                self._wanted = (ref, anew)
                self._changed.notify_all()

    def take(self) -> Prepared | None:
        """The oldest result, once, if there is one. `swapped` is to follow."""
        with self._changed:
            result = self._results.popleft() if self._results else None
            self._swapping = result is not None
            return result

    def swapped(self) -> None:
        """The engine is done with what was taken, whether or not it serves."""
        with self._changed:
            self._swapping = False
            self._changed.notify_all()

    def wait(self, timeout_seconds: float) -> bool:
        """Until there is a result to take; False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._results), timeout_seconds)

    def close(self) -> None:
        """End the thread, after what it does now if that is not waiting."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=5.0)
        while (left := self.take()) is not None:
            if left.held is not None:
                left.held.release()
        if not self._thread.is_alive():
            self._copies.close()

    # ------------------------------------------------------------ prefetch thread

    def _work(self) -> None:
        try:
            while (wanted := self._next()) is not None:
                result = self._prepare(*wanted)
                with self._changed:
                    self._busy_with = None
                    self.waits_for = ""
                    if result is not None:
                        self._put(result)
                    self._changed.notify_all()
        except Exception as error:  # kept, and raised again in the searcher's thread
            log.exception("prefetch failed")
            self._failure = error

    def _put(self, result: Prepared) -> None:
        """The newest error counts; a snapshot that is not taken yet is still worth a swap (`_prepare` lets none by)."""
        if self._results and self._results[-1].error is not None:
            self._results.pop()
        self._results.append(result)

    def _next(self) -> tuple[WeightsRef, bool] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._wanted is not None)
            if self._closing or self._wanted is None:
                return None
            wanted, self._wanted = self._wanted, None
            self._busy_with = wanted[0]
            return wanted

    def _prepare(self, ref: WeightsRef, anew: bool) -> Prepared | None:
        started = time.perf_counter()
        try:
            return self._prepared(ref, anew, started)
        except SnapshotOutdated:
            return None
        except EngineError:  # nothing that another snapshot would mend
            raise
        except SnapshotError as error:
            return Prepared(ref, None, None, error, time.perf_counter() - started)
        except Exception as error:  # what nobody foresaw, such as a manifest that lies: it is told, and tried again
            log.exception("weights not prepared", version=ref.version)
            told = SnapshotError(f"v{ref.version}: {type(error).__name__}: {error}")
            return Prepared(ref, None, None, told, time.perf_counter() - started)

    def _prepared(self, ref: WeightsRef, anew: bool, started: float) -> Prepared | None:
        """The snapshot, ready for the engine; None if this is closing. Raises whatever is wrong with it."""
        snapshot, held = self._copies.prepare(ref, anew=anew)
        try:
            # An engine readies one snapshot at a time, and a swap would have to wait for it.
            with self._changed:
                self._changed.wait_for(lambda: self._closing or not (self._swapping or self._results))
            if self._closing:  # the engine is about to go, or has failed
                held.release()
                return None
            if self.make_ready is not None:
                snapshot = self.make_ready(snapshot, anew)
        except BaseException:
            held.release()
            raise
        return Prepared(ref, snapshot, held, None, time.perf_counter() - started)

    def _is_wanted(self) -> bool:
        return self._wanted is None and not self._closing

    def _tell(self, waits_for: str) -> None:
        self.waits_for = waits_for


def weights_directory(config: Config) -> Path:
    """Where this node keeps weights. Raises ConfigError if others could write to it."""
    if config.search.weights_dir is not None:
        return config.search.weights_dir / config.run.name
    mine = Path(tempfile.gettempdir()) / f"tba-{os.getuid()}"
    try:
        mine.mkdir(mode=0o700, exist_ok=True)
        state = mine.lstat()
    except OSError as error:
        raise ConfigError(f"{mine} cannot be made ({error.strerror}): set search.weights_dir") from error
    if state.st_uid != os.getuid() or state.st_mode & 0o022 or mine.is_symlink():
        raise ConfigError(f"{mine} is not this user's alone: set search.weights_dir")
    return mine / "weights" / config.run.name
