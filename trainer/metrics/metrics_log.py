"""Metrics of each step: `metrics.jsonl`, one line per step, and the sinks of the configuration.

Invariant: every step has one line. A resumed run drops the lines of the steps that it repeats.

A full disk does not end training: lines wait in memory until there is space. No checkpoint is written before them, so a
run that dies meanwhile repeats their steps. The buffer has the metrics too.

Sinks, TensorBoard and trackers, get them in addition. Each is in a thread of its own: it can neither stop training nor
slow it down.
"""

import importlib
import json
import os
import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from tba.common import run_files
from tba.common.config import Config
from tba.common.data_files import json_lines
from tba.common.errors import CheckpointError, TbaError, named, quantity
from tba.common.log import get_logger
from tba.common.system.background import Background
from tba.common.system.durable import open_regular, write_text
from tba.common.terminal import need
from tba.common.weights.model_files import model_directory, read_json
from tba.common.weights.pretrained import load_tokenizer
from tba.common.wire.trajectory import Int32
from tba.trainer.batch.batch import TrainBatch

log = get_logger(__name__)

COLUMNS = ["trajectory", "prompt", "response", "reward", "staleness"]
# An endless answer must not fill a tracker.
_MAX_CHARACTERS = 10_000
# Records queued for a slow sink; newer ones are dropped.
_MAX_QUEUED = 1000
_CLOSE_SECONDS = 10.0


class Answer(NamedTuple):
    """A trajectory that was trained on. `staleness` is in optimiser steps."""

    trajectory: int
    prompt_ids: Int32
    response_ids: Int32
    reward: float
    staleness: int


def choose_answers(batch: TrainBatch, count: int) -> list[Answer]:
    """Return `count` answers spread evenly over the batch, or all of a smaller batch.

    Their arrays are copies: those of the batch are views of whole messages.
    """
    rewards, staleness = batch.reward_BK.flatten().tolist(), batch.staleness_BK.flatten().tolist()
    count = min(count, len(batch.rows))
    slots = [number * len(batch.rows) // count for number in range(count)]
    chosen = [(batch.rows[slot], rewards[slot], int(staleness[slot])) for slot in slots]
    return [Answer(row.id, row.prompt_ids.copy(), row.response_ids.copy(), reward, age) for row, reward, age in chosen]


def answer_rows(tokenizer: Any, answers: Sequence[Answer]) -> list[list[Any]]:
    """Return one row of `COLUMNS` for each answer. Long texts are cut."""

    def text(ids: Int32) -> str:
        decoded: str = tokenizer.decode(ids.tolist())
        return decoded if len(decoded) <= _MAX_CHARACTERS else f"{decoded[:_MAX_CHARACTERS]}..."

    return [[id_, text(prompt), text(response), *numbers] for id_, prompt, response, *numbers in answers]


T = TypeVar("T")
_Record = tuple[int, float, dict[str, float], Sequence[Answer]]


class Sink(Protocol):
    """Receives the metrics of one step after another, and some of its answers. May raise anything."""

    def record(self, step: int, time: float, numbers: dict[str, float], answers: Sequence[Answer]) -> None: ...

    def close(self) -> None: ...


class BackgroundSink:
    """Runs a sink in a thread. Its first failure is logged, all are counted in `lost`.

    A sink that cannot be opened receives nothing. One that failed on a record receives the next one. Records that do
    not fit into the queue are lost.
    """

    def __init__(self, name: str, open_sink: Callable[[], Sink]) -> None:
        self.name = name
        self.lost = 0
        self._open = open_sink
        self._queue: queue.Queue[_Record | None] = queue.Queue(_MAX_QUEUED)
        self._thread = Background(f"metrics-{name}", self._work)
        self._thread.start()

    def record(self, step: int, time: float, numbers: dict[str, float], answers: Sequence[Answer] = ()) -> None:
        """Queue the metrics of a step, without waiting."""
        self._put((step, time, numbers, answers))

    def close(self) -> None:
        """Let the sink process its queue, within ten seconds."""
        if self._put(None):
            self._thread.join(_CLOSE_SECONDS)
        if self.lost or self._thread.running:
            log.warning("a metrics sink lost steps or did not end in time", sink=self.name, lost=self.lost)

    def _put(self, record: _Record | None) -> bool:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._failed("its queue is full")
            return False
        return True

    def _work(self) -> None:
        sink = self._attempt(self._open)
        while (record := self._queue.get()) is not None:
            if sink is None:
                self.lost += 1
            else:
                self._attempt(sink.record, *record)
        if sink is not None:
            self._attempt(sink.close)

    def _attempt(self, action: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return action(*arguments)
        # A sink's library may raise anything. It is logged and counted.
        except Exception as error:  # noqa: BLE001
            self._failed(named(error))
        return None

    def _failed(self, reason: str) -> None:
        if not self.lost:
            event = "a metrics sink failed; training continues, metrics.jsonl has all"
            log.warning(event, sink=self.name, reason=reason)
        self.lost += 1


@dataclass(slots=True)
class TensorBoardSink:
    """Writes events under `directory`. What earlier files have for the first step of a new one, and later, is hidden.

    Each start begins a file, and so does the step after an error, such as a full disk: the last file's end may be torn.
    """

    directory: Path
    _path: Path | None = None

    def record(self, step: int, time: float, numbers: dict[str, float], _: Sequence[Answer] = ()) -> None:
        """Write one scalar per metric, not buffered: after a crash only the steps since the checkpoint are repeated."""
        event = partial(Event, wall_time=time, step=step)
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        events = [event(summary=Summary(value=values))]
        path, is_new = self._path or self._next_path(time), self._path is None
        if is_new:
            start = SessionLog(status=SessionLog.START)
            events = [event(file_version="brain.Event:2"), event(session_log=start), *events]
        self._path = None
        try:
            with open(path, "ab") as file:
                for one in events:
                    RecordWriter(file).write(one.SerializeToString())
        except OSError:
            if is_new:
                path.unlink(missing_ok=True)
            raise
        self._path = path

    def _next_path(self, time: float) -> Path:
        """Return a path after all others: TensorBoard reads them in the order of their names. The clock may go back."""
        self.directory.mkdir(parents=True, exist_ok=True)
        later = [int(path.name.split(".")[3]) + 1 for path in self.directory.glob("events.*.tba")]
        return self.directory / f"events.out.tfevents.{max([int(time), *later]):010d}.tba"

    def close(self) -> None: ...


class TrackerSink:
    """One run of a tracker, "wandb" or "trackio", for one tba run, over all its starts.

    Weights & Biases is online, or (WANDB_MODE=offline) writes files to send later. Trackio has a local database of
    runs, a Hugging Face Space (TRACKIO_SPACE_ID), or a server (TRACKIO_SERVER_URL).

    A file `NAME.json` has the tracker's id for this run and the next step to send. A resumed trainer repeats steps, on
    a CPU with the same metrics; they are not sent again, since none may appear twice. `tokenizer` decodes the answers,
    which are sent as a table; without it none are.
    """

    def __init__(
        self, tracker: str, project: str, directory: Path, name: str, settings: dict[str, Any], tokenizer: Any = None
    ) -> None:
        self._tracker, self._tokenizer = importlib.import_module(tracker), tokenizer
        self._state = directory / f"{tracker}.json"
        saved = read_json(self._state)
        self._id = str(saved.get("id") or secrets.token_hex(8))
        self._next = int(saved.get("next_step", 0))
        init = partial(self._tracker.init, project=project, resume="allow", config=settings)
        if tracker == "wandb":
            self._run, self._time = init(name=name, id=self._id, dir=str(directory)), "time"
            self._log = partial(self._run.log, commit=True)
        else:
            # It identifies runs by name and reserves the name `time`. No metrics of the machine: only of the steps.
            quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
            self._run, self._time = init(name=f"{name}-{self._id}", **quiet), "wall_time"
            self._log = self._run.log

    def record(self, step: int, time: float, numbers: dict[str, float], answers: Sequence[Answer] = ()) -> None:
        """Send a step, unless an earlier start did."""
        if step < self._next:
            return
        values: dict[str, Any] = {**numbers, self._time: time}
        if self._tokenizer is not None and answers:
            rows = answer_rows(self._tokenizer, answers)
            values["responses"] = self._tracker.Table(columns=COLUMNS, data=rows)
        self._log(values, step=step)
        self._next = step + 1
        write_text(self._state, json.dumps({"id": self._id, "next_step": self._next}))

    def close(self) -> None:
        """Wait until the tracker has received everything."""
        self._run.finish()


def open_sinks(config: Config) -> list[BackgroundSink]:
    """Open the sinks of [metrics].

    Raises MissingExtra, and ConfigError if answers are to be sent and the model has no tokenizer.
    """
    metrics, directory = config.metrics, config.run.dir
    tokenizer = None
    if metrics.trace_answers and (metrics.wandb or metrics.trackio):
        tokenizer = load_tokenizer(model_directory(config.model.path))
    run = directory, config.run.name, config.model_dump(mode="json"), tokenizer
    sinks = []
    if metrics.tensorboard:
        sinks.append(BackgroundSink("tensorboard", partial(TensorBoardSink, directory / "tensorboard")))
    for tracker, project in (("wandb", metrics.wandb), ("trackio", metrics.trackio)):
        if project:
            need(tracker, tracker)
            sinks.append(BackgroundSink(tracker, partial(TrackerSink, tracker, project, *run)))
    return sinks


class MetricsLog:
    """Appends each step to `metrics.jsonl`, which loses nothing, and passes it to sinks, which may lose steps.

    A full disk cannot corrupt the file: each line is written whole and in order, or waits in memory, and is tried again
    with the next step. `first_step` is the first step that will be recorded. `sync` is called by the thread that writes
    checkpoints. Raises TbaError if the file cannot be written.
    """

    def __init__(self, directory: Path, *, first_step: int, sinks: Sequence[BackgroundSink] = ()) -> None:
        path = directory / run_files.METRICS
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # Without lines that a crash has damaged.
            lines = json_lines(path, malformed=None) if path.is_file() else ()
            rows = [row for _, row in lines if isinstance(row, dict)]
            kept = [row for row in rows if isinstance(row.get("step"), int) and row["step"] < first_step]
            write_text(path, "".join(f"{json.dumps(row)}\n" for row in kept))
            # Unbuffered: after an error it would be unknown how much of a buffer had been written.
            self._file = open_regular(path, "ab", buffering=0)
        except OSError as error:
            raise TbaError(f"{path} cannot be written: {error.strerror}; see to it, and start again") from error
        self._sinks = sinks
        # Guards everything below.
        self._lock = threading.Lock()
        # End of the last complete line, in bytes, and whether there is a part of a line after it.
        self._end, self._torn = self._file.tell(), False
        self._waiting: deque[bytes] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def record(
        self,
        step: int,
        time: float,
        numbers: dict[str, float],
        blamed: Sequence[int] = (),
        answers: Sequence[Answer] = (),
    ) -> None:
        """Record a step; `time` is Unix time. Returns after the write to the operating system, unless the disk is full.

        `blamed` are the ids of the trajectories that caused the step to be skipped. `answers` go to the sinks alone.
        """
        trajectories = {"skipped_trajectories": list(blamed)} if blamed else {}
        line = json.dumps({"step": step, "time": time, **numbers, **trajectories})
        with self._lock:
            self._waiting.append(line.encode() + b"\n")
            try:
                self._write(new=1)
            except OSError as error:
                if self.waiting == 1:
                    log.warning("lines of metrics wait in memory", reason=str(error))
        for sink in self._sinks:
            sink.record(step, time, numbers, answers)

    def sync(self) -> None:
        """Fsync the file before a checkpoint, whose steps will not be repeated. Raises CheckpointError."""
        try:
            with self._lock:
                self._write()
            # Outside the lock: `record` must not wait for the disk.
            os.fsync(self._file.fileno())
        except OSError as error:
            waiting = quantity(self.waiting, "line of metrics is", "lines of metrics are")
            raise CheckpointError(f"{waiting} not on disk: {error}") from error

    def close(self) -> None:
        """Try the waiting lines once more, and close the file and the sinks."""
        with self._lock:
            try:
                self._write()
            except OSError as error:
                log.warning("lines of metrics were never written", lines=self.waiting, reason=str(error))
            self._file.close()
        for sink in self._sinks:
            sink.close()

    def _write(self, new: int = 0) -> None:
        waited = self.waiting - new
        if self._torn:
            self._file.truncate(self._end)
            self._torn = False
        while self._waiting:
            rest = memoryview(self._waiting[0])
            while rest:
                self._torn = True
                rest = rest[self._file.write(rest) or 0 :]
            self._torn = False
            self._end += len(self._waiting.popleft())
        if waited:
            log.info("lines of metrics that waited in memory are written", lines=waited)
