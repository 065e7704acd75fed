"""Weights & Biases, online or (WANDB_MODE=offline) as files to send later."""

from pathlib import Path
from typing import Any

from tba.trainer.sinks.sent import Sent


class WandbSink:
    """One run of W&B for one run of tba, over all its starts; `wandb.json` in the run's directory has its id."""

    def __init__(self, directory: Path, project: str, name: str, settings: dict[str, Any]) -> None:
        import wandb

        self._sent = Sent(directory / "wandb.json")
        self._run = wandb.init(
            project=project, name=name, id=self._sent.id, resume="allow", dir=str(directory), config=settings
        )

    def record(self, step: int, time: float, numbers: dict[str, float]) -> None:
        """Send a step, unless an earlier start did: W&B takes none twice."""
        if step < self._sent.next:
            return
        self._run.log({**numbers, "time": time}, step=step, commit=True)
        self._sent.note(step)

    def flush(self) -> None:
        """W&B's own process sends and writes."""

    def close(self) -> None:
        """Wait until W&B has everything."""
        self._run.finish()
