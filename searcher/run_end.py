"""When a process that follows a run may leave it."""

from tba.common.clock import Clock
from tba.common.wire.client import BufferClient

# How long a process that joins a finished run waits for a trainer that resumes it.
RESUME_SECONDS = 60.0


class RunEnd:
    """Tells whether a run is over: it has finished, and is not one that a trainer may be about to resume."""

    def __init__(self, client: BufferClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self.joined()

    def joined(self) -> None:
        """Start to wait for a trainer that resumes a finished run."""
        self._joined_at, self._seen_running = self._clock.monotonic(), False

    @property
    def finished(self) -> bool:
        """Whether the run is finished, according to the last reply of the buffer."""
        return self._client.state is not None and self._client.state.finished

    @property
    def is_over(self) -> bool:
        """Whether the run is over. A run that was finished when this process joined may be resumed by a trainer."""
        if not self.finished:
            self._seen_running = True
            return False
        return self._seen_running or self._clock.monotonic() - self._joined_at > RESUME_SECONDS
