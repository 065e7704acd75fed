"""The trainer's side of the buffer: it waits as long as the buffer is away, and says so now and then."""

import os
import socket
from collections.abc import Callable
from typing import TypeVar

from tba import __version__
from tba.common import wire
from tba.common.client import BufferClient
from tba.common.clock import Clock, SystemClock
from tba.common.errors import BufferUnavailable
from tba.common.log import get_logger

log = get_logger(__name__)

M = TypeVar("M", bound=wire.Message)
_WARN_SECONDS = 15.0
_HEARTBEAT_SECONDS = 1.0
_BACK_OFF_SECONDS = 10.0


def ask(
    client: BufferClient, message: wire.Message, expect: type[M], stop: Callable[[], bool]
) -> tuple[M, list[memoryview]]:
    """Send until it is answered, however long the buffer is away.

    Raises BufferUnavailable only when `stop()`, Refused if the buffer says no.
    """
    while True:
        try:
            return client.call(message, expect, deadline_seconds=_WARN_SECONDS, stop=stop)
        except BufferUnavailable as error:
            if stop():
                raise
            log.warning("waiting for the buffer", request=message.TYPE, reason=str(error))


class Connection:
    """The trainer's own connection, used by the training thread alone."""

    def __init__(self, address: str, stop: Callable[[], bool], clock: Clock | None = None) -> None:
        self._client = BufferClient(address, role="trainer", name="trainer")
        self._stop = stop
        self._clock = clock or SystemClock()
        self._heartbeat_due = 0.0
        self._metrics: dict[str, float] = {}
        self.weights_version: int | None = None

    def hello(self) -> wire.Welcome:
        """Introduce the trainer."""
        message = wire.Hello(host=socket.gethostname(), pid=os.getpid(), software=f"tba {__version__}")
        return self.ask(message, wire.Welcome)[0]

    def ask(self, message: wire.Message, expect: type[M]) -> tuple[M, list[memoryview]]:
        """See the function of this name."""
        return ask(self._client, message, expect, self._stop)

    def heartbeat(self, activity: str, reason: str = "", metrics: dict[str, float] | None = None) -> None:
        """Tell `tba status` what the trainer does, at most once a second. `metrics` are kept for later ones."""
        self._metrics = metrics or self._metrics
        now = self._clock.monotonic()
        if now < self._heartbeat_due:
            return
        self._heartbeat_due = now + _HEARTBEAT_SECONDS
        message = wire.Heartbeat(
            activity=activity, reason=reason, weights_version=self.weights_version, metrics=self._metrics
        )
        try:
            self._client.call(message, wire.Done, deadline_seconds=0.5)
        except BufferUnavailable:
            # Requests that matter wait, and warn, by themselves; training must not be slowed by this one.
            self._heartbeat_due = now + _BACK_OFF_SECONDS

    def close(self) -> None:
        """Close the connection."""
        self._client.close()
