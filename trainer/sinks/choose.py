"""From the configuration to the sinks of a run."""

from functools import partial
from importlib.util import find_spec

from tba.common.config import Config
from tba.common.errors import MissingExtra
from tba.trainer.sinks.guarded import Guarded
from tba.trainer.sinks.prometheus import PrometheusSink
from tba.trainer.sinks.tensorboard import TensorBoardSink
from tba.trainer.sinks.trackio import TrackioSink
from tba.trainer.sinks.weights_and_biases import WandbSink


def open_sinks(config: Config, first_step: int) -> list[Guarded]:
    """The sinks that [metrics] asks for, for steps from `first_step` on. Raises MissingExtra."""
    metrics, directory = config.metrics, config.run.dir
    settings = config.model_dump(mode="json")
    sinks = []
    if metrics.tensorboard:
        sinks.append(Guarded("tensorboard", partial(TensorBoardSink, directory / "tensorboard", first_step)))
    if metrics.wandb:
        _need("wandb", "wandb")
        sinks.append(Guarded("wandb", partial(WandbSink, directory, metrics.wandb, config.run.name, settings)))
    if metrics.trackio:
        _need("trackio", "trackio")
        sinks.append(Guarded("trackio", partial(TrackioSink, directory, metrics.trackio, config.run.name, settings)))
    if metrics.prometheus:
        _need("prometheus_client", "prometheus")
        sinks.append(Guarded("prometheus", partial(PrometheusSink, metrics.prometheus, config.run.name)))
    return sinks


def _need(module: str, extra: str) -> None:
    if find_spec(module) is None:
        raise MissingExtra(module, extra)
