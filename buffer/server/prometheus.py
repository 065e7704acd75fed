"""The endpoint of a run for Prometheus, http://HOST:PORT/metrics: what the buffer knows of itself and of all roles.

The status of the run has the heartbeats of the searchers, and reports of steps have the metrics of the trainer. Samples
are replaced twice a second. Names end in `_total` for counters; docs/metrics.md describes them.
"""

import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from socketserver import TCPServer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tba.buffer.service.pace import StepMetrics
from tba.common.log import get_logger
from tba.common.run_status import is_silent, live_trainer, name_of
from tba.common.wire.fields import STALL_REASONS, Role
from tba.common.wire.messages import ClientStatus, Status

log = get_logger(__name__)

_ROLE_STATES = ("present", "silent", "gone")
# Roles whose absence stops a run have a sample even if none has ever connected.
_ROLES: tuple[Role, ...] = ("searcher", "trainer")
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")
# Metrics of a step with a varying part in their names: that part is a label.
_FAMILIES = (
    ("reward_part_", "reward_part", "part", "Mean of a part of the reward over the last batch."),
    ("staleness_share_", "staleness_share_ratio", "steps", "Share of the last batch with a staleness in this bin."),
)
_PHASE = "seconds_"
# Each metric of a searcher's heartbeat, with its name at Prometheus and a description. Rates are left out: Prometheus
# computes them.
SEARCHER_NAMES = {
    "trajectories": ("trajectories_total", "Responses generated and scored since the start."),
    "tokens": ("response_tokens_total", "Tokens of the responses generated and scored since the start."),
    "in_flight": ("requests_in_flight", "Responses that the engine generates or has queued."),
    "max_in_flight": ("max_requests_in_flight", "Responses that the engine generates at a time."),
    "kv_cache_tokens": ("kv_cache_tokens", "Tokens that fit the KV cache."),
    "preemptions": ("preemptions_total", "Responses that vLLM interrupted because the KV cache was full."),
    "unacknowledged_groups": ("unacknowledged_groups", "Puts that the buffer has not acknowledged."),
    "spool_bytes": ("spool_bytes", "Disk space of the puts in the spool that the buffer has not acknowledged."),
    "spool_damaged": ("spool_damaged_files_total", "Files of spools that could not be read."),
    "spool_undeleted": ("spool_undeleted_files", "Acknowledged files of the spool that could not be deleted."),
    "paused": ("paused", "1 if generation pauses because the spool is full or the disk refuses it."),
    "errors": ("failed_responses_total", "Responses with an error."),
    "rewards_waiting": ("rewards_waiting", "Responses that wait for a reward."),
    "reward_seconds": ("reward_seconds", "Time that the last scored response waited for its reward, scoring included."),
    "reward_errors": ("reward_errors_total", "Rewards that failed."),
    "reward_timeouts": ("reward_timeouts_total", "Rewards that took longer than task.reward_seconds."),
    "weights_load_seconds": ("weights_load_seconds", "Duration of the last swap of weights."),
    "weights_prepare_seconds": ("weights_prepare_seconds", "Duration of the last preparation of weights."),
    "weights_refusals": ("weights_refusals_total", "Snapshots refused, each attempt counted."),
    "refused_version": ("refused_version", "Version of the snapshot that is refused."),
    "mismatch_max": ("mismatch_max", "Largest difference of a log-probability of the canary from the trainer's."),
    "mismatch_mean": ("mismatch_mean", "Mean difference of a log-probability of the canary from the trainer's."),
    "mismatch_kl": ("mismatch_kl", "Estimated KL divergence from the trainer on the canary."),
    "swap_read_seconds": ("swap_read_seconds", "Last swap: reading the weights, alongside generation."),
    "swap_exchange_seconds": ("swap_exchange_seconds", "Last swap: exchanging the weights."),
    "swap_canary_seconds": ("swap_canary_seconds", "Last swap: scoring the canary."),
    "swap_pause_seconds": ("swap_pause_seconds", "Last swap: pause of generation."),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric. `name` is without the prefix `tba_`; it ends in `_total` if the metric is a counter."""

    name: str
    value: float
    help: str
    labels: Mapping[str, str] = field(default_factory=dict)


class MetricsEndpoint(Collector):
    """Serves samples, each with the label `run`, and the CPU and memory use of this process, one request after another.

    Raises OSError if the port is taken, OverflowError if no port has that number.
    """

    def __init__(self, host: str, port: int, run: str) -> None:
        self._run = run
        self._samples: Sequence[Sample] = ()
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        self._server = make_server(host, port, make_wsgi_app(registry), _Server, _Handler)
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    def show(self, samples: Sequence[Sample]) -> None:
        """Replace all samples."""
        self._samples = samples

    def show_run(self, status: Status, steps: StepMetrics, now: float) -> None:
        """Show a status, taken `now` seconds after 1970, and the metrics of the reported steps."""
        self.show(samples_of(status, steps, now))

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of the samples. Called for every scrape, from the thread of the server."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for sample in self._samples:
            kind = CounterMetricFamily if sample.name.endswith("_total") else GaugeMetricFamily
            labels = {"run": self._run, **sample.labels}
            family = families.setdefault(sample.name, kind(f"tba_{sample.name}", sample.help, labels=list(labels)))
            family.add_metric(list(labels.values()), sample.value)
        return families.values()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(WSGIServer):
    def server_bind(self) -> None:
        """Bind the socket without asking DNS for the name of this machine, which may take minutes."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.socket.getsockname()
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no traceback of a connection that its client or the time limit has ended."""


class _Handler(WSGIRequestHandler):
    # Seconds that one client may keep the others waiting.
    timeout = 0.5

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def open_endpoint(address: str, run: str) -> MetricsEndpoint | None:
    """Open the endpoint at PORT or HOST:PORT. None if the port is taken: the run continues without it."""
    host, _, port = address.rpartition(":")
    host = host or "127.0.0.1"
    try:
        return MetricsEndpoint(host, int(port), run)
    except (OSError, OverflowError) as error:
        log.warning("no endpoint for Prometheus", host=host, port=port, reason=str(error))
        return None


def samples_of(status: Status, steps: StepMetrics, now: float) -> list[Sample]:
    """Return the samples of a status and of the reported steps; `now` is the time of the status, since 1970."""
    return [
        *_of_data(status, now),
        *_of_server(status),
        *_of_clients(status),
        *_of_stall(status),
        *_of_searchers(status),
        # What a trainer that has ended reported last is no measurement of now.
        *(_of_steps(status, steps) if steps.last and live_trainer(status) else ()),
    ]


def _of_data(status: Status, now: float) -> Iterator[Sample]:
    if status.newest_version is not None:
        yield Sample("buffer_newest_version", status.newest_version, "Version of the newest announced weights.")
    lacking, without = status.batches_without_recent_data, "Batches that found no data within the recency window."
    yield from (
        Sample("buffer_steps_total", status.step, "Optimiser steps that the trainer reported."),
        Sample("buffer_finished", status.finished, "1 if the run is finished."),
        Sample("buffer_epoch", status.epoch, "Epoch of the prompts that are handed out."),
        Sample("buffer_prompts", status.prompts, "Prompts of the task."),
        Sample("buffer_skipped_prompts", status.skipped_prompts, "Prompts that the curriculum skips in this epoch."),
        Sample("buffer_postponed_prompts", status.postponed_prompts, "Prompts that it puts at the end of this epoch."),
        Sample("buffer_trajectories_total", status.trajectories, "Trajectories of the run."),
        Sample("buffer_failed_trajectories_total", status.errors, "Trajectories of the run with an error."),
        Sample("buffer_duplicate_trajectories_total", status.duplicates, "Trajectories that were sent again."),
        Sample("buffer_sampleable_trajectories", status.sampleable, "Trajectories that a batch may draw."),
        Sample("buffer_batches_without_recent_data_total", lacking, without),
        Sample("buffer_last_step_timestamp_seconds", now - status.last_step_seconds, "Last step reported, or start."),
        Sample("buffer_last_put_timestamp_seconds", now - status.last_put_seconds, "Last trajectory stored, or start."),
        Sample("buffer_trainer_wait_seconds", status.trainer_waits_seconds, "Wait of the trainer for a batch so far."),
    )


def _of_server(status: Status) -> Iterator[Sample]:
    for code, count in status.rejected.items():
        yield Sample("buffer_rejected_requests_total", count, "Requests that got an error reply.", {"code": code})
    yield from (
        Sample("buffer_refuses_puts", bool(status.refuses_puts), "1 if trajectories cannot be stored."),
        Sample("buffer_queued_bytes", status.queued_bytes, "Size of the requests that wait for a transaction."),
        Sample("buffer_commit_seconds", status.commit_seconds, "Mean duration of the last 100 transactions."),
        Sample("buffer_database_bytes", status.database_bytes, "Size of the database."),
        Sample("buffer_disk_bytes", status.disk_bytes, "Size of the disk of the database."),
        Sample("buffer_disk_free_bytes", status.free_bytes, "Free space on the disk of the database."),
    )


def _of_clients(status: Status) -> Iterator[Sample]:
    counts = Counter((client.role, _state(client)) for client in status.clients)
    description = "Clients by role; silent: no message for 10 s; gone: it has left."
    for role in dict.fromkeys((*_ROLES, *(client.role for client in status.clients))):
        for state in _ROLE_STATES:
            yield Sample("buffer_clients", counts[role, state], description, {"role": role, "state": state})


def _state(client: ClientStatus) -> str:
    if client.activity == "gone":
        return "gone"
    return "silent" if is_silent(client) else "present"


def _of_stall(status: Status) -> Iterator[Sample]:
    found = status.stall.reason if status.stall is not None else ""
    for reason in STALL_REASONS:
        yield Sample(
            "stalled", found == reason, "1 for the reason of a stall (docs/operations.md).", {"reason": reason}
        )
    yield Sample("stalled_seconds", status.stalled_seconds, "How long the run has stood still.")


def _of_searchers(status: Status) -> Iterator[Sample]:
    """Yield the samples of the living searchers. One whose name is shared is labelled with the number of its start."""
    searchers = [client for client in status.clients if client.role == "searcher" and _state(client) == "present"]
    names = Counter(map(name_of, searchers))
    for client in searchers:
        labels = {"searcher": name_of(client) if names[name_of(client)] == 1 else client.sender}
        is_generating = client.activity == "generating"
        yield Sample("searcher_generating", is_generating, "1 if responses are being generated.", labels)
        if (version := client.weights_version) is not None:
            yield Sample("searcher_weights_version", version, "Version of the weights in use.", labels)
        for name, (shown, description) in SEARCHER_NAMES.items():
            if name in client.metrics:
                yield Sample(f"searcher_{shown}", client.metrics[name], description, labels)


def _of_steps(status: Status, steps: StepMetrics) -> Iterator[Sample]:
    """Yield totals since the server's start, and the metrics of the last step that the totals do not have."""
    yield Sample("trainer_steps_total", status.step, "Steps of the run, skipped ones included.")
    yield Sample("trainer_skipped_steps_total", steps.totals["skipped"], "Steps without an update.")
    yield Sample("trainer_tokens_total", steps.totals["tokens"], "Tokens of all batches.")
    for name, seconds in steps.totals.items():
        if name.startswith(_PHASE):
            phase = {"phase": name.removeprefix(_PHASE)}
            yield Sample("trainer_phase_seconds_total", seconds, "Time in a phase.", phase)
    yield from (_gauge(name, value) for name, value in sorted(steps.last.items()) if name not in steps.totals)


def _gauge(name: str, value: float) -> Sample:
    if name == "seconds_step":
        return Sample("trainer_step_seconds", value, "Duration of the last step.")
    for prefix, family, label, description in _FAMILIES:
        if name.startswith(prefix):
            return Sample(f"trainer_{family}", value, description, {label: name.removeprefix(prefix)})
    return Sample(f"trainer_{_NOT_IN_NAMES.sub('_', name)}", value, f"{name} of the last step (docs/metrics.md).")
