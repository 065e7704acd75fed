"""The gauge `tba_stalled{run, reason}` for Prometheus: whether the run stands still, and why."""

from collections.abc import Iterable
from contextlib import closing
from typing import TYPE_CHECKING

from tba.common.clock import Clock, SystemClock
from tba.common.stall.explain import find_stall
from tba.common.stall.facts import REASONS, Facts
from tba.common.wire.client import BufferClient
from tba.common.wire.keys import ClientKeys
from tba.common.wire.probe import ask_status

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

_DEADLINE_SECONDS = 2.0


class StallGauge:
    """Asks the buffer at each scrape, on a connection of its own: 1 for the reason of a stall, 0 for all others."""

    def __init__(self, address: str, run: str, clock: Clock | None = None, keys: ClientKeys | None = None) -> None:
        self._keys = keys
        self._address = address
        self._run = run
        self._clock = clock or SystemClock()
        # Monotonic time of the first question without an answer.
        self._silent_since: float | None = None

    def collect(self) -> Iterable["GaugeMetricFamily"]:
        """Return the gauge. Called for every scrape, from a thread of the HTTP server."""
        from prometheus_client.core import GaugeMetricFamily

        stall = find_stall(self._facts())
        family = GaugeMetricFamily("tba_stalled", "docs/operations.md#why-a-run-stands-still", labels=["run", "reason"])
        for reason in REASONS:
            family.add_metric([self._run, reason], float(stall is not None and stall.reason == reason))
        return [family]

    def _facts(self) -> Facts:
        with closing(BufferClient(self._address, role="monitor", name="prometheus", keys=self._keys)) as client:
            status = ask_status(client, _DEADLINE_SECONDS)
        now = self._clock.monotonic()
        self._silent_since = None if status is not None else self._silent_since or now
        return Facts(status, self._address, now - (self._silent_since or now))
