"""What each step measured: `metrics.jsonl`, one line per step, and the same for the sinks of the configuration.

Invariant: every step stands there once. A resumed run drops the lines of the steps it repeats.
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

from tba.common.durable import write_text
from tba.trainer.sinks.guarded import Guarded


class MetricsLog:
    """Appends to `metrics.jsonl`, which must not fail, and hands on to sinks, which may.

    `first_step` is the first step that will be recorded.
    """

    def __init__(self, directory: Path, *, first_step: int, sinks: Sequence[Guarded] = ()) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "metrics.jsonl"
        kept = [line for line in _lines(path) if _step_of(line) < first_step]
        write_text(path, "".join(f"{line}\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")
        self._sinks = sinks

    def record(self, step: int, time: float, numbers: dict[str, float], blamed: Sequence[int] = ()) -> None:
        """Add a step; `time` is Unix time. The line is with the system when this returns.

        `blamed` are the trajectories because of which the step was skipped.
        """
        trajectories = {"skipped_trajectories": list(blamed)} if blamed else {}
        self._file.write(json.dumps({"step": step, "time": time, **numbers, **trajectories}) + "\n")
        self._file.flush()
        for sink in self._sinks:
            sink.record(step, time, numbers)

    def sync(self) -> None:
        """Have everything on disk: before a checkpoint, whose steps will not be repeated."""
        os.fsync(self._file.fileno())
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
