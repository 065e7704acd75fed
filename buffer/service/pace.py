"""What the status of the run shows: when it last moved, the errors of its rows, and the work of the server."""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any

from tba.buffer.sampling.sampler import Draw
from tba.common.clock import Clock
from tba.common.errors import quantity
from tba.common.log import get_logger

log = get_logger(__name__)

# Steps that the usual duration is a mean over, and errors that the most frequent one is chosen from.
_STEPS = 20
_ERRORS = 1000
_ERROR_CHARACTERS = 300
# The window that `puts_per_second` is a mean over.
_RATE_SECONDS = 10.0
# Transactions that `commit_seconds` is a mean over.
_COMMITS = 100
# The least time between two warnings that a batch found no recent data.
_WARN_SECONDS = 300.0


class StepMetrics:
    """The metrics of the last reported step, and sums of `tokens`, `skipped` and phases since the server's start."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}
        self.totals: defaultdict[str, float] = defaultdict(float)
        self._step = -1

    def note(self, step: int, metrics: dict[str, float]) -> None:
        """Take the metrics of a step. A report that comes again counts once."""
        self.last = metrics
        if step == self._step:
            return
        self._step = step
        for name, value in metrics.items():
            if name in ("tokens", "skipped") or (name.startswith("seconds_") and name != "seconds_step"):
                self.totals[name] += value


class Pace:
    """Seconds since the last step and the last row, and of the trainer's wait, from the start of the server.

    `waits_for` is why the trainer waits for a batch, or "". `rows_since_step` arrived since the last step.
    """

    def __init__(self, clock: Clock) -> None:
        self.waits_for = ""
        self.steps = StepMetrics()
        self.rows_since_step = 0
        self._errors_since_step = 0
        self._clock = clock
        self._waits_at = self._step_at = self._row_at = clock.monotonic()
        self._durations: deque[float] = deque(maxlen=_STEPS)
        self._has_step = False
        self._errors: deque[str] = deque(maxlen=_ERRORS)
        self._most, self._grew_at, self._rows_then = (0, 0), self._waits_at, 0
        self._left: Counter[str] = Counter()
        self._left_then: Counter[str] = Counter()

    def wait_for(self, reason: str, have: tuple[int, int] = (0, 0), left: Counter[str] | None = None) -> None:
        """Record why the trainer waits ("": not), what its batch and sampling have, and what left sampling."""
        now, self._left = self._clock.monotonic(), Counter(left)
        if begins := bool(reason and not self.waits_for):
            self._waits_at = now
        if begins or have[0] > self._most[0] or have[1] > self._most[1]:
            self._most = have if begins else (max(have[0], self._most[0]), max(have[1], self._most[1]))
            self._grew_at, self._rows_then, self._left_then = now, self.rows_since_step, self._left
        self.waits_for = reason

    def note_step(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.note(step, metrics)
        now = self._clock.monotonic()
        # The time before the first one is not that of a step.
        if self._has_step:
            self._durations.append(now - self._step_at)
        self._has_step, self._step_at = True, now
        self.rows_since_step = self._errors_since_step = 0

    def note_rows(self, count: int, errors: Sequence[str]) -> None:
        if not count:
            return
        self._row_at = self._clock.monotonic()
        self.rows_since_step += count
        self._errors_since_step += len(errors)
        self._errors.extend(error.partition("\n")[0][:_ERROR_CHARACTERS] for error in errors)

    def fields(self) -> dict[str, Any]:
        """Return what `Status` shows of it; `fruitless` counts since there was last more for the batch."""
        now, waits = self._clock.monotonic(), bool(self.waits_for)
        return {
            "trainer_waits_for": self.waits_for,
            "trainer_waits_seconds": now - self._waits_at if waits else 0.0,
            "last_step_seconds": now - self._step_at,
            "usual_step_seconds": sum(self._durations) / max(1, len(self._durations)),
            "last_put_seconds": now - self._row_at,
            "rows_since_step": self.rows_since_step,
            "errors_since_step": self._errors_since_step,
            "common_error": Counter(self._errors).most_common(1)[0][0] if self._errors else "",
            "fruitless_seconds": now - self._grew_at if waits else 0.0,
            "fruitless_rows": max(0, self.rows_since_step - self._rows_then) if waits else 0,
            "left_sampling": dict(self._left - self._left_then) if waits else {},
        }


class Counters:
    """Counts of committed puts and of rejections by code, and the duration of commits.

    The writer sets `queued_bytes`, `stalled_seconds`, and `storage_error`: why the last transaction failed, until one
    succeeds.
    """

    def __init__(self, clock: Clock) -> None:
        self.rejected: Counter[str] = Counter()
        self.queued_bytes = 0
        self.stalled_seconds = 0.0
        self.storage_error = ""
        self.duplicates = 0
        self._clock = clock
        self._started = clock.monotonic()
        # (monotonic time, stored rows) of recent puts.
        self._puts: deque[tuple[float, int]] = deque()
        self._commit_seconds: deque[float] = deque(maxlen=_COMMITS)

    def note_commit(self, seconds: float) -> None:
        """Count a transaction of this duration, including the work of its handlers."""
        self._commit_seconds.append(seconds)
        self.storage_error = ""

    def note_put(self, *, stored: int, duplicates: int) -> None:
        """Count a committed put, in rows."""
        self.duplicates += duplicates
        self._puts.append((self._clock.monotonic(), stored))
        self._forget_old_puts()

    def fields(self) -> dict[str, Any]:
        """Return what `Status` shows of it: puts as a mean over ten seconds, commits over the last transactions."""
        self._forget_old_puts()
        return {
            "uptime_seconds": self._clock.monotonic() - self._started,
            "puts_per_second": sum(rows for _, rows in self._puts) / _RATE_SECONDS,
            "commit_seconds": sum(self._commit_seconds) / max(1, len(self._commit_seconds)),
            "duplicates": self.duplicates,
            "queued_bytes": self.queued_bytes,
            "stalled_seconds": self.stalled_seconds,
            "rejected": dict(self.rejected),
        }

    def _forget_old_puts(self) -> None:
        while self._puts and self._clock.monotonic() - self._puts[0][0] >= _RATE_SECONDS:
            self._puts.popleft()


class DataLag:
    """Counts batches that recency found no data for; `sentence` describes the last batch if it was one, else ""."""

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
