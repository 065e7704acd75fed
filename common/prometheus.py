"""The endpoint of a process that Prometheus scrapes: http://HOST:PORT/metrics.

A role sets all of its samples at once (`show`), as often as it likes; a scrape sees those that were set last.
"""

import contextlib
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from tba.common.config import Config
from tba.common.config.train import PrometheusRole
from tba.common.log import get_logger
from tba.common.system.background import Background
from tba.common.terminal import need

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = get_logger(__name__)

_REQUEST_SECONDS = 0.5
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric. `name` is without the prefix `tba_`; it ends in `_total` if the metric is a counter."""

    name: str
    value: float
    help: str
    labels: Mapping[str, str] = field(default_factory=dict)


class MetricsEndpoint:
    """Serves samples, each with the label `run`, and the CPU and memory use of this process.

    One thread answers one request after another, so that many clients cannot start many threads. Raises OSError if the
    port is taken.
    """

    def __init__(self, host: str, port: int, run: str) -> None:
        from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

        self._run = run
        self._samples: Sequence[Sample] = ()
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        self._server = make_server(host, port, make_wsgi_app(registry), _Server, _Handler)
        self.port: int = self._server.server_port
        self._thread = Background("prometheus", lambda: self._server.serve_forever(_POLL_SECONDS))
        self._thread.start()

    def show(self, samples: Sequence[Sample]) -> None:
        """Replace all samples. Samples of one metric are adjacent."""
        self._samples = samples

    def collect(self) -> Iterable["Metric"]:
        """Return the metrics of the samples. Called for every scrape, from the thread of the server."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for sample in self._samples:
            kind = CounterMetricFamily if sample.name.endswith("_total") else GaugeMetricFamily
            labels = {"run": self._run, **sample.labels}
            family = families.setdefault(sample.name, kind(f"tba_{sample.name}", sample.help, labels=list(labels)))
            family.add_metric(list(labels.values()), sample.value)
        return families.values()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(WSGIServer):
    """Neither asks DNS for the name of this machine, which may take minutes, nor prints to the terminal."""

    def server_bind(self) -> None:
        """Bind the socket, with its address in the place of that name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.socket.getsockname()
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no traceback of a connection that its client or the limit has ended."""


class _Handler(WSGIRequestHandler):
    """Ends a request that takes too long: a client keeps others and `close` waiting for half a second at most."""

    timeout = _REQUEST_SECONDS

    def setup(self) -> None:
        """Limit the whole request: `timeout` is that of one read, and a client may send a byte at a time."""
        super().setup()
        self._limit = threading.Timer(self.timeout, self._end)
        self._limit.daemon = True
        self._limit.start()

    def finish(self) -> None:
        """Give the connection back."""
        self._limit.cancel()
        super().finish()

    def _end(self) -> None:
        # The client may still be told that its request was none.
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def open_endpoint(config: Config, role: PrometheusRole, number: int = 0) -> MetricsEndpoint | None:
    """Open the endpoint of this process; `number` counts the searchers of a machine.

    None without `metrics.prometheus`, or if the port is taken: the run goes on without it. Raises MissingExtra.
    """
    if not config.metrics.prometheus:
        return None
    need("prometheus_client", "prometheus")
    host, port = config.metrics.endpoint(role, number)
    try:
        return MetricsEndpoint(host, port, config.run.name)
    # OverflowError: no port has that number.
    except (OSError, OverflowError) as error:
        log.warning("no endpoint for Prometheus", host=host, port=port, reason=str(error))
        return None
