"""The last step for Prometheus to scrape."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")


class PrometheusSink:
    """Serves http://HOST:PORT/metrics: a gauge `tba_trainer_NAME{run="..."}` per number of the last step.

    A number that the last step does not have is not served. Raises OSError if the port is taken.
    """

    def __init__(self, address: str, run: str) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry, self._run = CollectorRegistry(), run
        self._numbers: dict[str, float] = {}
        self._registry.register(self)
        host, _, port = address.rpartition(":")
        self._server, self._thread = start_http_server(int(port), addr=host, registry=self._registry)
        self.port: int = self._server.server_port

    def collect(self) -> Iterable["GaugeMetricFamily"]:
        """Called for every scrape, from a thread of the HTTP server."""
        from prometheus_client.core import GaugeMetricFamily

        families = []
        for name, value in self._numbers.items():
            family = GaugeMetricFamily(f"tba_trainer_{_NOT_IN_NAMES.sub('_', name)}", "docs/metrics.md", labels=["run"])
            family.add_metric([self._run], value)
            families.append(family)
        return families

    def record(self, step: int, time: float, numbers: dict[str, float]) -> None:
        """Replace the numbers; a scrape sees those of one step."""
        self._numbers = {"step": float(step), "step_time_seconds": time, **numbers}

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
