"""The trainer's side of the buffer: it waits as long as the buffer is away, and says so now and then.

Who answers is injected: a server over the network, or a recorded file (`tba train --offline`).
"""

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable
from typing import Protocol, TypeVar

from tba import __version__
from tba.common import wire
from tba.common.client import BufferClient
from tba.common.clock import Clock, SystemClock
from tba.common.errors import BufferUnavailable, Refused
from tba.common.log import get_logger

log = get_logger(__name__)
M = TypeVar("M", bound=wire.Message)
_TAKE_OVER_SECONDS = 13.0
_RETRY_SECONDS = 0.5


class Client(Protocol):
    """What the trainer needs of `tba.common.client.BufferClient`, which says what each method does."""

    def ask(self, message: wire.Message, expect: type[M], stop: Callable[[], bool]) -> tuple[M, list[memoryview]]: ...

    def ask_ahead(self, message: wire.Message) -> int: ...

    def collect(self, id_: int, expect: type[M], stop: Callable[[], bool]) -> tuple[M, list[memoryview]]: ...

    def call(
        self,
        message: wire.Message,
        expect: type[M],
        *,
        deadline_seconds: float | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> tuple[M, list[memoryview]]: ...

    def close(self) -> None: ...


Dial = Callable[[wire.Role, str], Client]


def network(address: str) -> Dial:
    """Clients of the server at an address. All are one sender, this start of the trainer: when another one takes the
    run over, the buffer hears none of them any more, the publisher's thread included."""
    sender = f"trainer.{uuid.uuid4().hex[:8]}"
    return lambda role, name: BufferClient(address, role=role, name=name, sender=sender)


class Connection:
    """The trainer's own connection, used by the training thread alone."""

    def __init__(self, dial: Dial, stop: Callable[[], bool], clock: Clock | None = None) -> None:
        self._client = dial("trainer", "trainer")
        self._stop = stop
        self._clock = clock or SystemClock()

    def hello(self) -> wire.Welcome:
        """Introduce the trainer. An earlier one that died a moment ago is given time to be missed.

        Raises Refused if another trainer is at work on the run, BufferUnavailable when `stop()`.
        """
        message = wire.Hello(host=socket.gethostname(), pid=os.getpid(), software=f"tba {__version__}")
        deadline = self._clock.monotonic() + _TAKE_OVER_SECONDS
        is_told = False
        while True:
            try:
                return self.ask(message, wire.Welcome)[0]
            except Refused as refusal:
                if refusal.code != "trainer_exists" or self._clock.monotonic() > deadline:
                    raise
                if self._stop():
                    raise BufferUnavailable(
                        f"stopped while an earlier trainer could still be there: {refusal}"
                    ) from None
                if not is_told:
                    log.info("waiting, in case the earlier trainer has died", reason=str(refusal))
                    is_told = True
                time.sleep(_RETRY_SECONDS)

    def ask(self, message: wire.Message, expect: type[M]) -> tuple[M, list[memoryview]]:
        """Send until it is answered; see `BufferClient.ask`."""
        return self._client.ask(message, expect, self._stop)

    def ask_ahead(self, message: wire.Message) -> int:
        """Send, and go on; the id is for `collect`."""
        return self._client.ask_ahead(message)

    def collect(self, id_: int, expect: type[M]) -> tuple[M, list[memoryview]]:
        """The reply to what was asked ahead; waits for it like `ask`."""
        return self._client.collect(id_, expect, self._stop)

    def close(self) -> None:
        """Say goodbye, so that the next trainer need not wait, and close the connection."""
        with contextlib.suppress(BufferUnavailable, Refused):
            self._client.call(wire.Goodbye(), wire.Done, deadline_seconds=0.5)
        self._client.close()
