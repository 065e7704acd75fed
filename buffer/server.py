"""The buffer process: receive all that has arrived, commit it in one transaction, answer, repeat.

    receive ──► decode ──► handle within one transaction ──► commit ──► send the answers

While a transaction commits, ZeroMQ's own thread keeps receiving: that is the next group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tba.buffer.service import Answer, BufferService
from tba.buffer.store import Store
from tba.common.channels import Peer, ServerChannel
from tba.common.clock import Clock
from tba.common.codec import Request, decode_request, encode_reply, request_id_of
from tba.common.errors import Refused, StorageError, WireError
from tba.common.log import get_logger
from tba.common.wire import Failure

log = get_logger(__name__)

_TURN_SECONDS = 0.1
_GROUP_LIMIT = 256  # requests in one transaction


@dataclass(slots=True)
class _Waiting:
    """A request, and until when (monotonic) it may wait for an answer."""

    peer: Peer
    request: Request
    deadline: float


class BufferServer:
    """Joins a channel, a store and a service. Runs in one thread."""

    def __init__(self, channel: ServerChannel, store: Store, service: BufferService, clock: Clock) -> None:
        self._channel = channel
        self._store = store
        self._service = service
        self._clock = clock
        self._parked: list[_Waiting] = []

    def run(self, stop: Callable[[], bool]) -> None:
        """Serve until `stop()`."""
        while not stop():
            self.turn(_TURN_SECONDS)

    def turn(self, timeout_seconds: float) -> None:
        """One group: receive, commit, answer."""
        received = self._receive(timeout_seconds)
        self._service.expire_leases()
        if received:
            self._forget_repeated(received)
            waiting, self._parked = [*received, *self._parked], []
        else:
            # Nothing has changed, so only those whose time is over have anything to hear.
            now = self._clock.monotonic()
            waiting = [parked for parked in self._parked if parked.deadline <= now]
            self._parked = [parked for parked in self._parked if parked.deadline > now]
        if waiting:
            self._answer(waiting)

    def _receive(self, timeout_seconds: float) -> list[_Waiting]:
        received = []
        for peer, frames in self._channel.receive(timeout_seconds, _GROUP_LIMIT):
            try:
                request = decode_request(frames)
            except WireError as error:
                self._reject(peer, request_id_of(frames), error.code, str(error))
                continue
            self._service.hear(request.header)
            wait = getattr(request.message, "wait_seconds", 0.0)
            received.append(_Waiting(peer, request, self._clock.monotonic() + wait))
        return received

    def _forget_repeated(self, received: Sequence[_Waiting]) -> None:
        """A sender waits for one answer of a kind: a newer request replaces the one that waits."""
        again = {(new.request.header.sender, new.request.header.type) for new in received}
        self._parked = [
            old for old in self._parked if (old.request.header.sender, old.request.header.type) not in again
        ]

    def _answer(self, waiting: list[_Waiting]) -> None:
        """Commit a group and answer it. If one request breaks it, the others are done one by one."""
        try:
            with self._store.transaction():
                outcomes = [self._outcome(item) for item in waiting]
        except StorageError as error:
            log.error("commit failed", reason=str(error), requests=len(waiting))
            self._rebuild()
            for item in waiting:
                self._reject(item.peer, item.request.header.id, error.code, str(error))
        except Exception:
            log.exception("a request failed", requests=len(waiting))
            self._rebuild()
            self._answer_one_by_one(waiting)
        else:
            for item, outcome in zip(waiting, outcomes, strict=True):
                self._send(item, outcome)

    def _answer_one_by_one(self, waiting: list[_Waiting]) -> None:
        if len(waiting) == 1:
            item = waiting[0]
            message = f"the buffer failed on {item.request.header.type}: its log has the details"
            self._reject(item.peer, item.request.header.id, "internal", message)
            return
        for item in waiting:
            self._answer([item])

    def _outcome(self, item: _Waiting) -> Answer | Refused | None:
        try:
            answer = self._service.handle(item.request)
        except Refused as refusal:
            return refusal
        if answer is None and item.deadline <= self._clock.monotonic():
            return self._service.waiting_answer(item.request)
        return answer

    def _send(self, item: _Waiting, outcome: Answer | Refused | None) -> None:
        header = item.request.header
        if outcome is None:
            self._parked.append(item)
        elif isinstance(outcome, Refused):
            self._reject(item.peer, header.id, outcome.code, str(outcome))
        else:
            self._reply(item.peer, header.id, outcome)

    def _reject(self, peer: Peer, id_: int, code: str, message: str) -> None:
        self._service.rejected[code] += 1
        self._reply(peer, id_, Answer(Failure(code=code, message=message[:4000])))

    def _reply(self, peer: Peer, id_: int, answer: Answer) -> None:
        run, state = self._service.run.uuid, self._service.state()
        reply = encode_reply(answer.message, id=id_, run=run, state=state, frames=answer.frames)
        if not self._channel.send(peer, reply):
            self._service.rejected["undeliverable"] += 1

    def _rebuild(self) -> None:
        try:
            self._service.rebuild()
        except Exception as error:  # the file is gone or unreadable: going on would be guessing
            raise StorageError(f"the database cannot be read back: {error}") from error
