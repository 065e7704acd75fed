"""Trackio: a local database of runs, a Hugging Face Space (TRACKIO_SPACE_ID), or a server (TRACKIO_SERVER_URL)."""

from pathlib import Path
from typing import Any

from tba.trainer.sinks.sent import Sent


class TrackioSink:
    """One run of Trackio for one run of tba, over all its starts.

    Trackio knows runs by name: it is the name of the run with an id, which `trackio.json` in the run's directory has.
    """

    def __init__(self, directory: Path, project: str, name: str, settings: dict[str, Any]) -> None:
        import trackio

        self._sent = Sent(directory / "trackio.json")
        # Machine metrics beside the steps are not asked for.
        self._run = trackio.init(
            project=project,
            name=f"{name}-{self._sent.id}",
            resume="allow",
            config=settings,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def record(self, step: int, time: float, numbers: dict[str, float]) -> None:
        """Send a step, unless an earlier start did: Trackio would show both."""
        if step < self._sent.next:
            return
        # Trackio keeps `time` for itself.
        self._run.log({**numbers, "wall_time": time}, step=step)
        self._sent.note(step)

    def flush(self) -> None:
        """A thread of Trackio's own sends and writes."""

    def close(self) -> None:
        """Wait until Trackio has everything."""
        self._run.finish()
