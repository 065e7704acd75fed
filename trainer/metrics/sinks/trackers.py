"""The sinks TensorBoard, Weights & Biases and Trackio, and which sinks the configuration names."""

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from tba.common.config import Config
from tba.common.system.durable import write_text
from tba.common.terminal import need
from tba.common.weights.model_files import model_directory
from tba.common.weights.pretrained import load_tokenizer
from tba.trainer.metrics.answers import COLUMNS, Answer, AnswerTexts
from tba.trainer.metrics.sinks.background import BackgroundSink


class TensorBoardSink:
    """Writes events under `directory`. Those that an earlier start wrote for `first_step` and later are hidden."""

    def __init__(self, directory: Path, first_step: int) -> None:
        self._events = SummaryWriter(str(directory), purge_step=first_step)

    def record(self, step: int, time: float, numbers: dict[str, float], _: Sequence[Answer] = ()) -> None:
        """Write one scalar per metric, to disk: after a crash only the steps since the checkpoint are repeated."""
        for name, value in numbers.items():
            self._events.add_scalar(name, value, step, walltime=time)
        self._events.flush()

    def close(self) -> None:
        """Close the file."""
        self._events.close()


class _ResumedSink(ABC):
    """One run of a tracker for one tba run, over all its starts.

    `state` is a file with the tracker's id for this run and the next step to send. A resumed trainer repeats steps, on
    a CPU with the same metrics; they are not sent again, since none may appear twice. `texts` decodes the answers,
    which are sent as a table; without it none are.
    """

    def __init__(self, state: Path, texts: AnswerTexts | None) -> None:
        self._state = state
        self._texts = texts
        saved = json.loads(state.read_text(encoding="utf-8")) if state.exists() else {}
        self._id = str(saved.get("id") or secrets.token_hex(8))
        self._next = int(saved.get("next_step", 0))
        self._run: Any = None

    def record(self, step: int, time: float, numbers: dict[str, float], answers: Sequence[Answer] = ()) -> None:
        """Send a step, unless an earlier start did."""
        if step < self._next:
            return
        rows = self._texts.rows(answers) if self._texts is not None and answers else None
        self._send(step, time, {**numbers, **({"responses": self._table(rows)} if rows else {})})
        self._next = step + 1
        write_text(self._state, json.dumps({"id": self._id, "next_step": self._next}))

    @abstractmethod
    def _send(self, step: int, time: float, values: dict[str, Any]) -> None: ...

    @abstractmethod
    def _table(self, rows: list[list[Any]]) -> Any:
        """Return the tracker's table of these rows of `COLUMNS`."""

    def close(self) -> None:
        """Wait until the tracker has received everything."""
        self._run.finish()


class WandbSink(_ResumedSink):
    """Weights & Biases, online or (WANDB_MODE=offline) as files to send later."""

    def __init__(
        self, project: str, directory: Path, name: str, settings: dict[str, Any], texts: AnswerTexts | None = None
    ) -> None:
        import wandb

        super().__init__(directory / "wandb.json", texts)
        self._run = wandb.init(
            project=project, name=name, id=self._id, resume="allow", dir=str(directory), config=settings
        )

    def _send(self, step: int, time: float, values: dict[str, Any]) -> None:
        self._run.log({**values, "time": time}, step=step, commit=True)

    def _table(self, rows: list[list[Any]]) -> Any:
        import wandb

        return wandb.Table(columns=COLUMNS, data=rows)


class TrackioSink(_ResumedSink):
    """Trackio: a local database of runs, a Hugging Face Space (TRACKIO_SPACE_ID), or a server (TRACKIO_SERVER_URL).

    Trackio identifies runs by name, so the id is a part of it.
    """

    def __init__(
        self, project: str, directory: Path, name: str, settings: dict[str, Any], texts: AnswerTexts | None = None
    ) -> None:
        import trackio

        super().__init__(directory / "trackio.json", texts)
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

    def _send(self, step: int, time: float, values: dict[str, Any]) -> None:
        # Trackio reserves the name `time`.
        self._run.log({**values, "wall_time": time}, step=step)

    def _table(self, rows: list[list[Any]]) -> Any:
        import trackio

        return trackio.Table(columns=COLUMNS, data=rows)


def open_sinks(config: Config, first_step: int) -> list[BackgroundSink]:
    """Open the sinks of [metrics] for steps from `first_step` on.

    Raises MissingExtra, and ConfigError if answers are to be sent and the model has no tokenizer.
    """
    metrics, directory = config.metrics, config.run.dir
    texts = None
    if metrics.trace_answers and (metrics.wandb or metrics.trackio):
        texts = AnswerTexts(load_tokenizer(model_directory(config.model.path)))
    run = directory, config.run.name, config.model_dump(mode="json"), texts
    sinks = []
    if metrics.tensorboard:
        sinks.append(BackgroundSink("tensorboard", partial(TensorBoardSink, directory / "tensorboard", first_step)))
    if metrics.wandb:
        need("wandb", "wandb")
        sinks.append(BackgroundSink("wandb", partial(WandbSink, metrics.wandb, *run)))
    if metrics.trackio:
        need("trackio", "trackio")
        sinks.append(BackgroundSink("trackio", partial(TrackioSink, metrics.trackio, *run)))
    return sinks
