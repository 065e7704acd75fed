"""The trainer's heartbeat, sent by a thread that no step, checkpoint or publication can delay.

    training thread     show ──► the state to report from now on
    heartbeat thread    every second ──► a heartbeat to the buffer, on a connection of its own

The buffer counts a trainer as dead after 10 seconds without one and then admits another trainer to the run
(docs/decisions/0023). A trainer that was killed, suspended or cut off sends none. One that hangs still does: only a
person can tell a hang from a long step, by the number of steps in `tba status`.
"""

from contextlib import closing

from tba.common.errors import EXIT_CONFIG, BufferUnavailable, TbaError
from tba.common.log import get_logger
from tba.common.system.background import Background
from tba.common.wire import fields, messages
from tba.trainer.buffer_link.connection import Client, Dial

log = get_logger(__name__)

_PAUSE_SECONDS = 1.0
# Together with the pause well below the buffer's timeout for a trainer.
_REPLY_SECONDS = 3.0
_JOIN_SECONDS = 10.0


class HeartbeatThread:
    """Sends the shown state every second, from `start` to `close` or until another trainer owns the run."""

    def __init__(self, dial: Dial) -> None:
        # Reported from the next `show` on.
        self.weights_version: int | None = None
        self.warning = ""
        # What is sent next.
        self.shown = messages.Heartbeat(activity="connected", reason="", weights_version=None, metrics={})
        self._dial = dial
        self._metrics: dict[str, float] = {}
        self._logged: set[type[Exception]] = set()
        self._thread = Background("heartbeat", self._run)

    def start(self) -> None:
        """Start. Only after the buffer has admitted this trainer: from the first heartbeat on it counts as active."""
        self._thread.start()

    def show(self, activity: str, reason: str = "", metrics: dict[str, float] | None = None) -> None:
        """Set what `tba status` shows of the trainer, without waiting. Without `metrics` the last ones stay."""
        self._metrics = metrics or self._metrics
        self.shown = messages.Heartbeat(
            activity=activity,
            reason=reason[: fields.MAX_REASON],
            weights_version=self.weights_version,
            metrics=self._metrics,
            warning=self.warning[: fields.MAX_REASON],
        )

    def close(self) -> None:
        """Send no more heartbeats."""
        self._thread.stop(_JOIN_SECONDS)

    def _run(self) -> None:
        """Reconnect after any error: without heartbeats a healthy trainer in a long step would be replaced."""
        while not self._thread.stopping.is_set():
            try:
                self._send_until_closed()
                return
            # Such as too many open files: it may pass, and a new connection may work. Each kind is logged once.
            except Exception as error:
                if type(error) not in self._logged:
                    self._logged.add(type(error))
                    log.exception("heartbeat failed, reconnecting")
            self._thread.stopping.wait(_PAUSE_SECONDS)

    def _send_until_closed(self) -> None:
        """Send on one connection until `close`, or until another trainer owns the run."""
        with closing(self._dial("trainer", "trainer")) as client:
            while not self._thread.stopping.is_set() and self._send(client):
                self._thread.stopping.wait(_PAUSE_SECONDS)

    def _send(self, client: Client) -> bool:
        """Send one heartbeat. Returns False if the buffer will never accept another one."""
        try:
            client.call(self.shown, messages.Done, deadline_seconds=_REPLY_SECONDS, stop=self._thread.stopping.is_set)
        except BufferUnavailable:
            # The requests of the training thread wait and warn by themselves.
            pass
        except TbaError as error:
            log.warning("heartbeat refused", reason=str(error))
            # The training thread gets the same refusal with its next request, and ends.
            return error.exit_code != EXIT_CONFIG
        return True
