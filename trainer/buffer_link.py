"""The trainer's connection to the buffer: its clients, the next batch, and heartbeats.

The buffer is a server over the network, or a recorded file (`tba train --offline`): the factory of clients, `Dial`, is
injected.
"""

import contextlib
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from tba.common.clock import Clock
from tba.common.config import TrainSection
from tba.common.errors import EXIT_CONFIG, BufferUnavailable, Refused, TbaError
from tba.common.log import get_logger
from tba.common.system.background import Background
from tba.common.wire import fields, messages
from tba.common.wire.channels import new_secret
from tba.common.wire.client import BufferClient, make_hello
from tba.common.wire.keys import ClientKeys
from tba.trainer.batch.batch import TrainBatch, decode
from tba.trainer.metrics.stopwatch import Stopwatch

log = get_logger(__name__)
M = TypeVar("M", bound=messages.Message)
_TAKE_OVER_SECONDS = 13.0
_RETRY_SECONDS = 0.5
_WAIT_SECONDS = 1.0
# The time between two heartbeats, and until a reply to one is given up: together well below the buffer's timeout for a
# trainer.
_PAUSE_SECONDS = 1.0
_REPLY_SECONDS = 3.0
_JOIN_SECONDS = 10.0


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


def hello(client: Client, run_name: str, stop: Callable[[], bool], clock: Clock) -> messages.Welcome:
    """Introduce the trainer. While an earlier trainer counts as alive, retry for longer than its timeout.

    Raises Refused if another trainer works on the run, BufferUnavailable when `stop()`.
    """
    deadline = clock.monotonic() + _TAKE_OVER_SECONDS
    logged = False
    while True:
        # A refusal counts from the time of its request: the reply may take longer than the difference of the timeouts.
        asked = clock.monotonic()
        try:
            return client.call(make_hello(run_name), messages.Welcome, stop=stop)[0]
        except Refused as refusal:
            if refusal.code != "trainer_exists" or asked > deadline:
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


@dataclass(slots=True)
class BatchFetcher:
    """Fetches the batch of a step, and prefetches the next one during the update.

        step s      fetch(s) ──► prefetch(s + 1) ──► update ──► report(s)
        step s + 1  fetch(s + 1): returns the prefetched reply, or waits for it

    The request for s + 1 always goes out before the report of s, so the data that a batch is drawn from does not depend
    on the speed of either side, as long as there is enough of it. A prefetched batch is recorded like any other: a
    trainer that is killed meanwhile trains on it after its resume. `last` is the step after the last one. `ahead` says
    whether to prefetch: at staleness 0 the data of a step exists only after the previous step was published.
    """

    client: Client
    train: TrainSection
    stop: Callable[[], bool]
    last: int
    watch: Stopwatch
    ahead: bool
    # Step and request id of the prefetch in progress.
    _prefetched: tuple[int, int] | None = None

    def prefetch(self, step: int, reference: str) -> None:
        """Request the batch of the next step without waiting; `reference` names the reference policy of that step."""
        if self.ahead and step < self.last:
            self._prefetched = step, self.client.ask_ahead(self._request(step, reference))

    def fetch(self, step: int, reference: str) -> TrainBatch | str:
        """Return the batch of a step, or after about a second the reason why there is none yet."""
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and prefetched[0] == step:
            reply, frames = self.client.collect(prefetched[1], messages.Message, self.stop)
        else:
            reply, frames = self.client.call(self._request(step, reference), messages.Message, stop=self.stop)
        if isinstance(reply, messages.Batch):
            with self.watch.phase("data"):
                return decode(reply, frames, prompts=self.train.prompts_per_step, samples=self.train.samples_per_prompt)
        return getattr(reply, "reason", "")

    def _request(self, step: int, reference: str) -> messages.SampleBatch:
        return messages.SampleBatch(
            step=step,
            prompts=self.train.prompts_per_step,
            samples=self.train.samples_per_prompt,
            reference=reference,
            wait_seconds=_WAIT_SECONDS,
        )


class HeartbeatThread:
    """Sends the shown state every second, from `start` to `close` or until another trainer owns the run.

        training thread     show ──► the state to report from now on
        heartbeat thread    every second ──► a heartbeat to the buffer, on a connection of its own

    No step, checkpoint or publication can delay it. The buffer counts a trainer as dead after 10 seconds without a
    heartbeat and then admits another trainer to the run (docs/decisions/0023). A trainer that was killed, suspended or
    cut off sends none. One that hangs still does: only a person can tell a hang from a long step, by the number of
    steps in `tba status`.
    """

    def __init__(self, dial: Dial) -> None:
        # What is sent next.
        self.shown = messages.Heartbeat(activity="connected", reason="", weights_version=None, metrics={})
        self._dial = dial
        self._logged: set[type[Exception]] = set()
        self._thread = Background("heartbeat", self._run)

    def start(self) -> None:
        """Start. Only after the buffer has admitted this trainer: from the first heartbeat on it counts as active."""
        self._thread.start()

    def show(self, activity: str, reason: str = "", **changes: Any) -> None:
        """Set what `tba status` shows of the trainer, without waiting.

        Of `metrics`, `weights_version` and `warning`, those that are not in `changes` stay.
        """
        if "warning" in changes:
            changes["warning"] = changes["warning"][: fields.MAX_REASON]
        self.shown = replace(self.shown, activity=activity, reason=reason[: fields.MAX_REASON], **changes)

    def close(self) -> None:
        self._thread.stop(_JOIN_SECONDS)

    def _run(self) -> None:
        """Reconnect after any error: without heartbeats a healthy trainer in a long step would be replaced."""
        while not self._thread.stopping.is_set():
            try:
                self._send_until_closed()
                return
            # For example, too many open files: it may pass, and a new connection may work. Each kind is logged once.
            except Exception as error:
                if type(error) not in self._logged:
                    self._logged.add(type(error))
                    log.exception("heartbeat failed, reconnecting")
            self._thread.stopping.wait(_PAUSE_SECONDS)

    def _send_until_closed(self) -> None:
        """Send on one connection until `close`, or until another trainer owns the run."""
        stopping = self._thread.stopping
        with closing(self._dial("trainer", "trainer")) as client:
            while not stopping.is_set():
                try:
                    client.call(self.shown, messages.Done, deadline_seconds=_REPLY_SECONDS, stop=stopping.is_set)
                except BufferUnavailable:
                    # The requests of the training thread wait and warn by themselves.
                    pass
                except TbaError as error:
                    log.warning("heartbeat refused", reason=str(error))
                    # The training thread gets the same refusal with its next request, and ends.
                    if error.exit_code == EXIT_CONFIG:
                        return
                stopping.wait(_PAUSE_SECONDS)
