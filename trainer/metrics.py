"""What each step measured: `metrics.jsonl`, one line per step, and the same for the sinks of the configuration.

Invariant: every step stands there once. A resumed run drops the lines of the steps it repeats.

A disk that takes no more does not end training: lines wait in memory until it does. No checkpoint is behind a line that
waits, so a run that dies with the disk full repeats the steps of these lines. The buffer has the numbers too.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from tba.common.durable import write_text
from tba.common.errors import CheckpointError, TbaError
from tba.common.quantity import quantity
from tba.trainer.line_file import LineFile
from tba.trainer.sinks.guarded import Guarded


class MetricsLog:
    """Appends to `metrics.jsonl`, which loses nothing, and hands on to sinks, which may.

    `first_step` is the first step that will be recorded. Raises TbaError if the file cannot be written to.
    """

    def __init__(self, directory: Path, *, first_step: int, sinks: Sequence[Guarded] = ()) -> None:
        path = directory / "metrics.jsonl"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            kept = [line for line in _lines(path) if _step_of(line) < first_step]
            write_text(path, "".join(f"{line}\n" for line in kept))
            self._file = LineFile(path)
        except OSError as error:
            raise TbaError(f"{path} cannot be written: {error.strerror}; see to it, and start again") from error
        self._sinks = sinks

    def record(self, step: int, time: float, numbers: dict[str, float], blamed: Sequence[int] = ()) -> None:
        """Add a step; `time` is Unix time. The line is with the system when this returns, unless the disk is full.

        `blamed` are the trajectories because of which the step was skipped.
        """
        trajectories = {"skipped_trajectories": list(blamed)} if blamed else {}
        self._file.append(json.dumps({"step": step, "time": time, **numbers, **trajectories}))
        for sink in self._sinks:
            sink.record(step, time, numbers)

    def sync(self) -> None:
        """Have everything on disk: before a checkpoint, whose steps will not be repeated. Raises CheckpointError."""
        try:
            self._file.sync()
        except OSError as error:
            waiting = quantity(self._file.waiting, "line of metrics is", "lines of metrics are")
            raise CheckpointError(f"{waiting} not on disk: {error}") from error
        for sink in self._sinks:
            sink.flush()

    def close(self) -> None:
        """Close the file and the sinks."""
        self._file.close()
        for sink in self._sinks:
            sink.close()


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def _step_of(line: str) -> float:
    """The step of a line; infinite for a line that a crash tore, which is thereby dropped."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
