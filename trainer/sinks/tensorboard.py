"""TensorBoard events on the local disk."""

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink:
    """Events under `directory`; those of `first_step` and later that an earlier start wrote are hidden."""

    def __init__(self, directory: Path, first_step: int) -> None:
        self._events = SummaryWriter(str(directory), purge_step=first_step)

    def record(self, step: int, time: float, numbers: dict[str, float]) -> None:
        """One scalar per number."""
        for name, value in numbers.items():
            self._events.add_scalar(name, value, step, walltime=time)

    def flush(self) -> None:
        """Have the events on disk."""
        self._events.flush()

    def close(self) -> None:
        """Close the file."""
        self._events.close()
