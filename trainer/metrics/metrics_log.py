"""Metrics of each step: `metrics.jsonl`, one line per step, and the sinks of the configuration.

Invariant: every step has one line. A resumed run drops the lines of the steps that it repeats.

A full disk does not end training: lines wait in memory until there is space. No checkpoint is written before them, so a
run that dies meanwhile repeats their steps. The buffer has the metrics too.
"""

import json
import os
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tba.common import jsonl, run_files
from tba.common.errors import CheckpointError, TbaError, quantity
from tba.common.log import get_logger
from tba.common.system.durable import open_regular, write_text
from tba.trainer.metrics.sinks import Answer, BackgroundSink

log = get_logger(__name__)


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
            kept = [row for row in _rows(path) if row["step"] < first_step]
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
        """The number of lines that are not written yet."""
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


def _rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of the file, without lines that a crash has damaged."""
    rows = [row for _, row in jsonl.read(path, skip_malformed=True)] if path.is_file() else []
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("step"), int)]
