"""Following the trainer: which snapshot to load, when to try again, and what it cost."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from tba.common.clock import Clock
from tba.common.errors import SnapshotError
from tba.common.log import get_logger
from tba.common.snapshot import verify
from tba.common.wire import WeightsRef
from tba.searcher.engine import Engine, LoadReport

log = get_logger(__name__)

_RETRY_SECONDS = 1.0
_LONGEST_RETRY_SECONDS = 30.0


@dataclass(slots=True)
class _Refused:
    ref: WeightsRef
    attempts: int
    retry_at: float  # monotonic


class WeightsFollower:
    """Keeps an engine on the newest snapshot that verifies and passes the canary.

    A snapshot that is refused is tried again, ever more rarely, while the old weights serve: a shared file
    system may lag behind the announcement, and with a bounded staleness no other snapshot may ever come.
    """

    def __init__(self, engine: Engine, clock: Clock, between: Callable[[], None]) -> None:
        self._engine = engine
        self._clock = clock
        self._between = between  # called now and then while a snapshot is verified
        self._refused: _Refused | None = None
        self.current: WeightsRef | None = None
        self.last_load_seconds = 0.0
        self.report: LoadReport | None = None  # of the last swap
        self.refusals = 0
        self.trouble = ""

    def follow(self, newest: WeightsRef | None) -> bool:
        """Load the newest snapshot if it is another one than the current. True if weights changed."""
        if newest is None or newest == self.current or self._too_early(newest):
            return False
        started = time.perf_counter()
        try:
            self.report = self._engine.load_weights(verify(newest, self._between))
        except SnapshotError as error:
            self._refuse(newest, error)
            return False
        self.last_load_seconds = time.perf_counter() - started
        self.current, self._refused, self.trouble = newest, None, ""
        log.info(
            "weights loaded",
            version=newest.version,
            step=newest.step,
            seconds=self.last_load_seconds,
            way=self.report.way,
            **self.report.metrics(),
        )
        return True

    def _too_early(self, ref: WeightsRef) -> bool:
        refused = self._refused
        if refused is None or refused.ref != ref:
            return False
        return self._clock.monotonic() < refused.retry_at

    def _refuse(self, ref: WeightsRef, error: SnapshotError) -> None:
        attempts = self._refused.attempts + 1 if self._refused and self._refused.ref == ref else 1
        delay = min(_RETRY_SECONDS * 2 ** (attempts - 1), _LONGEST_RETRY_SECONDS)
        self._refused = _Refused(ref, attempts, self._clock.monotonic() + delay)
        self.refusals += 1
        self.trouble = str(error)
        serving = f"v{self.current.version}" if self.current else "nothing"
        log.warning("weights refused", version=ref.version, attempt=attempts, serving=serving, reason=str(error))
