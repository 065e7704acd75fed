"""The trainer's clients of the buffer, and how a trainer introduces itself and signs off.

The buffer is a server over the network, or a recorded file (`tba train --offline`): the factory of clients, `Dial`, is
injected.
"""

import contextlib
import time
import uuid
from collections.abc import Callable
from typing import Protocol, TypeVar

from tba.common.clock import Clock
from tba.common.errors import BufferUnavailable, Refused
from tba.common.log import get_logger
from tba.common.wire import fields, messages
from tba.common.wire.channels import new_secret
from tba.common.wire.client import BufferClient, own_hello
from tba.common.wire.keys import ClientKeys

log = get_logger(__name__)
M = TypeVar("M", bound=messages.Message)
_TAKE_OVER_SECONDS = 13.0
_RETRY_SECONDS = 0.5


class Client(Protocol):
    """The methods of `tba.common.wire.client.BufferClient` that the trainer uses; they are documented there."""

    def ask_ahead(self, message: messages.Message) -> int: ...

    def collect(self, id_: int, expect: type[M], stop: Callable[[], bool]) -> tuple[M, list[memoryview]]: ...

    def call(
        self,
        message: messages.Message,
        expect: type[M],
        *,
        deadline_seconds: float | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> tuple[M, list[memoryview]]: ...

    def close(self) -> None: ...


Dial = Callable[[fields.Role, str], Client]


def network(address: str, keys: ClientKeys | None = None) -> Dial:
    """Return a factory of clients of the server at an address.

    All of them are one sender, this start of the trainer. When another trainer takes over the run, the buffer refuses
    all of them, the publisher's client included.
    """
    sender, secret = f"trainer.{uuid.uuid4().hex[:8]}", new_secret()
    return lambda role, name: BufferClient(address, role=role, name=name, sender=sender, secret=secret, keys=keys)


def hello(client: Client, stop: Callable[[], bool], clock: Clock) -> messages.Welcome:
    """Introduce the trainer. While an earlier trainer counts as alive, retry for longer than its timeout.

    Raises Refused if another trainer works on the run, BufferUnavailable when `stop()`.
    """
    deadline = clock.monotonic() + _TAKE_OVER_SECONDS
    logged = False
    while True:
        try:
            return client.call(own_hello(), messages.Welcome, stop=stop)[0]
        except Refused as refusal:
            if refusal.code != "trainer_exists" or clock.monotonic() > deadline:
                raise
            if stop():
                raise BufferUnavailable(f"stopped while an earlier trainer could still be there: {refusal}") from None
            if not logged:
                log.info("waiting, in case the earlier trainer has died", reason=str(refusal))
                logged = True
            time.sleep(_RETRY_SECONDS)


def goodbye(client: Client) -> None:
    """Sign off, so that the next trainer need not wait, and close the client."""
    with contextlib.suppress(BufferUnavailable, Refused):
        client.call(messages.Goodbye(), messages.Done, deadline_seconds=0.5)
    client.close()
