"""The sinks: TensorBoard, Weights & Biases, Trackio, and an endpoint that Prometheus scrapes."""

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.tensorboard import SummaryWriter

from tba.common.config import Config
from tba.common.system.durable import write_text
from tba.common.terminal import need
from tba.common.wire.keys import ClientKeys, buffer_client_keys
from tba.trainer.metrics.sinks.background import BackgroundSink
from tba.trainer.metrics.sinks.stalled import StallGauge

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")


class TensorBoardSink:
    """Writes events under `directory`. Those that an earlier start wrote for `first_step` and later are hidden."""

    def __init__(self, directory: Path, first_step: int) -> None:
        self._events = SummaryWriter(str(directory), purge_step=first_step)

    def record(self, step: int, time: float, numbers: dict[str, float]) -> None:
        """Write one scalar per metric, to disk: after a crash only the steps since the checkpoint are repeated."""
        for name, value in numbers.items():
            self._events.add_scalar(name, value, step, walltime=time)
        self._events.flush()

    def close(self) -> None:
        """Close the file."""
        self._events.close()


class _ResumedSink(ABC):
    """One run of a tracker for one tba run, over all its starts.

    `state` is a file with the tracker's id for this run and the next step to send. A resumed trainer repeats steps,
    with the same metrics; they are not sent again, since none may appear twice.
    """

    def __init__(self, state: Path) -> None:
        self._state = state
        saved = json.loads(state.read_text(encoding="utf-8")) if state.exists() else {}
        self._id = str(saved.get("id") or secrets.token_hex(8))
        self._next = int(saved.get("next_step", 0))
        self._run: Any = None

    def record(self, step: int, time: float, numbers: dict[str, float]) -> None:
        """Send a step, unless an earlier start did."""
        if step < self._next:
            return
        self._send(step, time, numbers)
        self._next = step + 1
        write_text(self._state, json.dumps({"id": self._id, "next_step": self._next}))

    @abstractmethod
    def _send(self, step: int, time: float, numbers: dict[str, float]) -> None: ...

    def close(self) -> None:
        """Wait until the tracker has received everything."""
        self._run.finish()


class WandbSink(_ResumedSink):
    """Weights & Biases, online or (WANDB_MODE=offline) as files to send later."""

    def __init__(self, directory: Path, project: str, name: str, settings: dict[str, Any]) -> None:
        import wandb

        super().__init__(directory / "wandb.json")
        self._run = wandb.init(
            project=project, name=name, id=self._id, resume="allow", dir=str(directory), config=settings
        )

    def _send(self, step: int, time: float, numbers: dict[str, float]) -> None:
        self._run.log({**numbers, "time": time}, step=step, commit=True)


class TrackioSink(_ResumedSink):
    """Trackio: a local database of runs, a Hugging Face Space (TRACKIO_SPACE_ID), or a server (TRACKIO_SERVER_URL).

    Trackio identifies runs by name, so the id is a part of it.
    """

    def __init__(self, directory: Path, project: str, name: str, settings: dict[str, Any]) -> None:
        import trackio

        super().__init__(directory / "trackio.json")
        # No metrics of the machine: only those of the steps.
        self._run = trackio.init(
            project=project,
            name=f"{name}-{self._id}",
            resume="allow",
            config=settings,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def _send(self, step: int, time: float, numbers: dict[str, float]) -> None:
        # Trackio reserves the name `time`.
        self._run.log({**numbers, "wall_time": time}, step=step)


class PrometheusSink:
    """Serves http://HOST:PORT/metrics: one gauge `tba_trainer_NAME{run="..."}` per metric of the last step.

    A metric that the last step does not have is absent. `tba_stalled` says whether the run of the buffer at
    `buffer_address` stands still. Raises OSError if the port is taken.
    """

    def __init__(self, address: str, run: str, buffer_address: str, keys: ClientKeys | None = None) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry, self._run = CollectorRegistry(), run
        self._numbers: dict[str, float] = {}
        self._registry.register(self)
        self._registry.register(StallGauge(buffer_address, run, keys=keys))
        host, _, port = address.rpartition(":")
        self._server, self._thread = start_http_server(int(port), addr=host, registry=self._registry)
        self.port: int = self._server.server_port

    def collect(self) -> Iterable["GaugeMetricFamily"]:
        """Return the gauges. Called for every scrape, from a thread of the HTTP server."""
        from prometheus_client.core import GaugeMetricFamily

        families = []
        for name, value in self._numbers.items():
            family = GaugeMetricFamily(f"tba_trainer_{_NOT_IN_NAMES.sub('_', name)}", "docs/metrics.md", labels=["run"])
            family.add_metric([self._run], value)
            families.append(family)
        return families

    def record(self, step: int, time: float, numbers: dict[str, float]) -> None:
        """Replace the metrics; a scrape sees those of one step."""
        self._numbers = {"step": float(step), "step_time_seconds": time, **numbers}

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def open_sinks(config: Config, first_step: int) -> list[BackgroundSink]:
    """Open the sinks of [metrics] for steps from `first_step` on. Raises MissingExtra."""
    metrics, directory = config.metrics, config.run.dir
    names = config.run.name, config.model_dump(mode="json")
    sinks = []
    if metrics.tensorboard:
        sinks.append(BackgroundSink("tensorboard", partial(TensorBoardSink, directory / "tensorboard", first_step)))
    if metrics.wandb:
        need("wandb", "wandb")
        sinks.append(BackgroundSink("wandb", partial(WandbSink, directory, metrics.wandb, *names)))
    if metrics.trackio:
        need("trackio", "trackio")
        sinks.append(BackgroundSink("trackio", partial(TrackioSink, directory, metrics.trackio, *names)))
    if metrics.prometheus:
        need("prometheus_client", "prometheus")
        keys = buffer_client_keys(config.security, config.address)
        endpoint = partial(PrometheusSink, metrics.prometheus, config.run.name, config.address, keys)
        sinks.append(BackgroundSink("prometheus", endpoint))
    return sinks
