"""Weights & Biases, online or (WANDB_MODE=offline) as files to send later."""

import json
import secrets
from pathlib import Path
from typing import Any

from tba.common.durable import write_text


class WandbSink:
    """One run of W&B for one run of tba, over all its starts.

    `wandb.json` in the run's directory has its id and the next step to send: a resumed trainer repeats steps, and W&B
    takes no step twice. What was sent stays, since a repeated step has the same numbers.
    """

    def __init__(self, directory: Path, project: str, name: str, settings: dict[str, Any]) -> None:
        import wandb

        self._state = directory / "wandb.json"
        self._id, self._next = _read(self._state)
        self._run = wandb.init(
            project=project, name=name, id=self._id, resume="allow", dir=str(directory), config=settings
        )

    def record(self, step: int, time: float, numbers: dict[str, float]) -> None:
        """Send a step, unless an earlier start did."""
        if step < self._next:
            return
        self._run.log({**numbers, "time": time}, step=step, commit=True)
        self._next = step + 1
        write_text(self._state, json.dumps({"id": self._id, "next_step": self._next}))

    def flush(self) -> None:
        """W&B's own process sends and writes."""

    def close(self) -> None:
        """Wait until W&B has everything."""
        self._run.finish()


def _read(path: Path) -> tuple[str, int]:
    if not path.exists():
        return secrets.token_hex(8), 0
    state = json.loads(path.read_text(encoding="utf-8"))
    return str(state["id"]), int(state["next_step"])
