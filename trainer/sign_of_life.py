"""The trainer's sign of life, which does not depend on how long a step, a checkpoint or a publication takes.

    training thread    show ──► what is to be said from now on
    its own thread     every second ──► heartbeat to the buffer, on a connection of its own

The buffer takes a trainer that it has not heard for 10 seconds for dead, and lets another one have the run
(docs/decisions/0018). A process that was killed, stopped or cut off is silent. One that hangs is not: to tell whether a
step is only long is left to people, who see in `tba status` that the number of steps stands still.
"""

import threading

from tba.common import wire
from tba.common.errors import EXIT_CONFIG, BufferUnavailable, TbaError
from tba.common.log import get_logger
from tba.trainer.connection import Dial

log = get_logger(__name__)

_PAUSE_SECONDS = 1.0
_ANSWER_SECONDS = 3.0  # with the pause well below what the buffer takes for the end of a trainer
_END_SECONDS = 10.0


class SignOfLife:
    """Says every second what was shown last, from `start` to `close`, or until the run belongs to another trainer."""

    def __init__(self, dial: Dial) -> None:
        self.weights_version: int | None = None  # said from the next `show` on
        self._dial = dial
        self._metrics: dict[str, float] = {}
        self._said = wire.Heartbeat(activity="connected", reason="", weights_version=None, metrics={})
        self._closing = threading.Event()
        self._logged: set[type[Exception]] = set()
        self._thread = threading.Thread(target=self._work, name="sign-of-life", daemon=True)

    def start(self) -> None:
        """Begin. Only a trainer that was let in may: from then on the buffer takes it to be at work."""
        self._thread.start()

    def show(self, activity: str, reason: str = "", metrics: dict[str, float] | None = None) -> None:
        """What `tba status` is to say of the trainer; does not wait. `metrics` stay the same if none are given."""
        self._metrics = metrics or self._metrics
        self._said = wire.Heartbeat(
            activity=activity, reason=reason, weights_version=self.weights_version, metrics=self._metrics
        )

    def close(self) -> None:
        """Say nothing from now on."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)

    def _work(self) -> None:
        """Go on whatever goes wrong: a trainer that falls silent in a long step may be followed, healthy as it is."""
        while not self._closing.is_set():
            try:
                self._say_on()
                return
            except Exception as error:  # such as too many open files: it may pass, and a new connection can be had
                if type(error) not in self._logged:
                    self._logged.add(type(error))
                    log.exception("the sign of life failed, and goes on on a new connection")
            self._closing.wait(_PAUSE_SECONDS)

    def _say_on(self) -> None:
        """Say it on one connection, until `close`, or until the run belongs to another trainer."""
        client = self._dial("trainer", "trainer")
        try:
            while not self._closing.is_set():
                try:
                    client.call(self._said, wire.Done, deadline_seconds=_ANSWER_SECONDS, stop=self._closing.is_set)
                except BufferUnavailable:
                    pass  # the requests that matter wait, and warn, by themselves
                except TbaError as error:
                    log.warning("heartbeat refused", reason=str(error))
                    if error.exit_code == EXIT_CONFIG:
                        return  # the training thread hears the same when it asks next, and ends
                self._closing.wait(_PAUSE_SECONDS)
        finally:
            client.close()
