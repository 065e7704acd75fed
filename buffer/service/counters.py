"""What `tba status` shows of the server's work since it started."""

import math
from collections import Counter, deque

from tba.buffer.sampling.sampler import Draw
from tba.common.clock import Clock
from tba.common.errors import quantity
from tba.common.log import get_logger

log = get_logger(__name__)

# The window that `puts_per_second` is a mean over.
_RATE_SECONDS = 10.0
# Transactions that `commit_seconds` is a mean over.
_COMMITS = 100
# The least time between two warnings that a batch found no recent data.
_WARN_SECONDS = 300.0


class Counters:
    """Counts of committed puts and of rejections, and the duration of commits.

    `rejected` counts messages that got an error reply, by code; `duplicates` counts rows that came again.
    The writer sets `queued_bytes`, `stalled_seconds`, and `storage_trouble`: why the last transaction failed, until one
    succeeds.
    """

    def __init__(self, clock: Clock) -> None:
        self.rejected: Counter[str] = Counter()
        self.queued_bytes = 0
        self.stalled_seconds = 0.0
        self.storage_trouble = ""
        self.duplicates = 0
        self._clock = clock
        self._started = clock.monotonic()
        # (monotonic time, stored rows) of recent puts.
        self._puts: deque[tuple[float, int]] = deque()
        self._commit_seconds: deque[float] = deque(maxlen=_COMMITS)

    def note_commit(self, seconds: float) -> None:
        """Count a transaction of this duration, including the work of its handlers."""
        self._commit_seconds.append(seconds)
        self.storage_trouble = ""

    def note_put(self, *, stored: int, duplicates: int) -> None:
        """Count a committed put, in rows."""
        self.duplicates += duplicates
        self._puts.append((self._clock.monotonic(), stored))
        self._forget_old_puts()

    @property
    def uptime_seconds(self) -> float:
        """Seconds since the service was made."""
        return self._clock.monotonic() - self._started

    @property
    def puts_per_second(self) -> float:
        """Rows stored per second, a mean over the last ten seconds."""
        self._forget_old_puts()
        return sum(rows for _, rows in self._puts) / _RATE_SECONDS

    @property
    def commit_seconds(self) -> float:
        """Mean duration of the last transactions."""
        return sum(self._commit_seconds) / max(1, len(self._commit_seconds))

    def _forget_old_puts(self) -> None:
        while self._puts and self._clock.monotonic() - self._puts[0][0] >= _RATE_SECONDS:
            self._puts.popleft()


class DataLag:
    """Counts the batches that were asked for by recency and found no data within the window.

    `sentence` describes the last batch if it was one, and is empty otherwise.
    """

    def __init__(self, clock: Clock) -> None:
        self.batches = 0
        self.sentence = ""
        self._clock = clock
        self._warn_at = -math.inf

    def note(self, draw: Draw, step: int) -> None:
        """Count a batch that was drawn for this step. Warn, at most once in five minutes, if no data was recent."""
        if draw.recency_missed < draw.recency_groups or not draw.recency_groups:
            self.sentence = ""
            return
        self.batches += 1
        newest = step - max(entry.step for group in draw.groups for entry in group)
        self.sentence = (
            f"the last batch found no data within buffer.recency_window = {quantity(draw.recency_window, 'step')}, "
            f'its newest is {quantity(newest, "step")} old: searchers lag behind, and "auto" follows them'
        )
        if self._clock.monotonic() >= self._warn_at:
            self._warn_at = self._clock.monotonic() + _WARN_SECONDS
            log.warning("no recent data", step=step, batches=self.batches, reason=self.sentence)
