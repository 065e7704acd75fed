"""Follow the stalls of the run that is served: since when, and a line in the log for each."""

from tba.common.clock import Clock
from tba.common.log import get_logger
from tba.common.stall.facts import Stall

log = get_logger(__name__)

# What passes sooner is neither logged nor counted as the end of a stall.
_SETTLE_SECONDS = 5.0


class StallWatch:
    """Takes the stall of each moment, None while the run moves. A stall may change its reason while it lasts."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: float | None = None
        self._seen_at = 0.0
        self._logged = ""

    @property
    def seconds(self) -> float:
        """How long the run has stood still, 0 while it moves."""
        return 0.0 if self._since is None else self._clock.monotonic() - self._since

    def update(self, stall: Stall | None) -> None:
        """Take the stall of this moment. Call it about once a second."""
        now = self._clock.monotonic()
        if stall is None:
            if self._since is not None and now - self._seen_at >= _SETTLE_SECONDS:
                self._end(self._seen_at - self._since)
            return
        self._seen_at = now
        if self._since is None:
            self._since = now
        if now - self._since < _SETTLE_SECONDS:
            return
        if stall.reason != self._logged:
            self._logged = stall.reason
            log.warning("the run stands still", stall=stall.reason, reason=stall.sentence)

    def _end(self, seconds: float) -> None:
        if self._logged:
            log.info("the run moves again", stall=self._logged, seconds=seconds)
        self._since, self._logged = None, ""
