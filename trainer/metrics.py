"""What each step measured: `metrics.jsonl`, one line per step, and the same as TensorBoard events.

Invariant: every step stands there once. A resumed run drops the lines of the steps it repeats.
"""

import json
import math
import os
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from tba.common.durable import write_text


class MetricsLog:
    """Appends to the files under a run's directory. `first_step` is the first step that will be recorded."""

    def __init__(self, directory: Path, *, first_step: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "metrics.jsonl"
        kept = [line for line in _lines(path) if _step_of(line) < first_step]
        write_text(path, "".join(f"{line}\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(directory / "tensorboard"), purge_step=first_step)

    def record(self, step: int, time: float, numbers: dict[str, float]) -> None:
        """Add a step; `time` is Unix time. The line is with the system when this returns."""
        self._file.write(json.dumps({"step": step, "time": time, **numbers}) + "\n")
        self._file.flush()
        for name, value in numbers.items():
            self._events.add_scalar(name, value, step, walltime=time)

    def sync(self) -> None:
        """Have everything on disk: before a checkpoint, whose steps will not be repeated."""
        os.fsync(self._file.fileno())
        self._events.flush()

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        self._events.close()


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def _step_of(line: str) -> float:
    """The step of a line; infinite for a line that a crash tore, which is thereby dropped."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
