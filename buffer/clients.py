"""Who talks to the buffer: when each was heard last, what it does, and when it counts as gone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tba.common import wire
from tba.common.clock import Clock

_REPLACED_SECONDS = 3.0
# A trainer's heartbeats are a second apart, however long its steps are. One that stays unanswered is given up after
# three, and the next follows a second later.
_TRAINER_SECONDS = 10.0
# As long after a start of the server as a trainer takes at most to find it again and be heard.
_RETURN_SECONDS = 5.0
GONE = "gone"


@dataclass(slots=True)
class Client:
    """What is known of a sender since the server started."""

    role: wire.Role
    seen_at: float  # monotonic
    host: str = ""
    activity: str = "connected"
    reason: str = ""
    replaced: bool = False  # another start of the same name has said hello
    held_back: str = ""  # why its last lease request waits
    weights_version: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    trajectories: int = 0
    duplicates: int = 0


class Clients:
    """The clients by sender. `patience` is the silence, in seconds, after which a sender's leases go to others."""

    def __init__(self, clock: Clock, patience: float) -> None:
        self._clock = clock
        self._patience_seconds = patience
        self._opened = clock.monotonic()
        self._by_sender: dict[str, Client] = {}
        self._trainer = ("", "")  # sender and host of the last that was let in: no other is heard
        self._replaced: set[str] = set()

    def open(self) -> None:
        """Senders can be heard from now on, and have from now on to come back."""
        self._opened = self._clock.monotonic()

    def __getitem__(self, sender: str) -> Client:
        return self._by_sender[sender]

    def hear(self, sender: str, role: wire.Role, at: float) -> None:
        """A message of a sender arrived at this monotonic time.

        A trainer and the publisher beside it are one sender: whichever is heard first, it is a trainer.
        """
        client = self._by_sender.setdefault(sender, Client(role, at))
        if role == "trainer":
            client.role = role
        if sender == self._trainer[0]:  # after a restart of the server it does not say hello again
            client.host = self._trainer[1]
        client.seen_at = max(client.seen_at, at)

    def is_silent(self, sender: str) -> bool:
        """Whether it is time to give its leases to others. After a restart everybody has as long to come back."""
        client = self._by_sender.get(sender)
        seen_at = client.seen_at if client else self._opened
        return self._clock.monotonic() - seen_at > self._patience(client)

    def forget_long_gone(self) -> None:
        """Drop clients that have been silent for ten times as long, and longer than any request may wait."""
        now = self._clock.monotonic()
        for sender, client in list(self._by_sender.items()):
            if now - client.seen_at > max(10 * self._patience(client), 2 * wire.LONGEST_WAIT_SECONDS):
                del self._by_sender[sender]

    def replace_earlier(self, sender: str) -> None:
        """An earlier start under this name is probably dead, so it gets little time to prove the contrary.

        If it does, two processes have one name: both keep what they have.
        """
        name = sender.rpartition(".")[0]
        for earlier, client in self._by_sender.items():
            if earlier != sender and earlier.rpartition(".")[0] == name:
                client.replaced = True

    def other_trainer(self, sender: str) -> Client | None:
        """A trainer other than this one that is at work, or may be, if the server itself was away until just now."""
        last, host = self._trainer
        if last in ("", sender):
            return None
        now = self._clock.monotonic()
        client = self._by_sender.get(last)
        if client is None:
            return Client("trainer", self._opened, host) if now - self._opened < _RETURN_SECONDS else None
        return client if client.activity != GONE and now - client.seen_at < _TRAINER_SECONDS else None

    def admit_trainers(self, trainers: Sequence[tuple[str, str]]) -> None:
        """All trainers that the run has had, (sender, host), oldest first: only the last one is heard any more.

        One that was only cut off would go on with steps of its own, and announce weights that nobody has asked for.
        """
        if trainers:
            self._trainer = trainers[-1]
            self._replaced = {sender for sender, _ in trainers[:-1]}

    def successor_host(self, sender: str) -> str | None:
        """Where the trainer is that has taken over from this one; None for all who are still heard."""
        return self._trainer[1] if sender in self._replaced else None

    def living(self, role: wire.Role) -> int:
        """How many of a role are at work, as far as is known."""
        return sum(
            client.role == role and client.activity != GONE and not self.is_silent(sender)
            for sender, client in self._by_sender.items()
        )

    def status(self, leases_of: Callable[[str], int]) -> list[wire.ClientStatus]:
        """What `tba status` shows; earlier starts that fell silent are left out."""
        now = self._clock.monotonic()
        return [
            wire.ClientStatus(
                role=client.role,
                sender=sender,
                host=client.host,
                silent_seconds=now - client.seen_at,
                activity=client.activity,
                reason=client.reason,
                weights_version=client.weights_version,
                metrics=client.metrics,
                trajectories=client.trajectories,
                duplicates=client.duplicates,
                leases=leases_of(sender),
            )
            for sender, client in self._by_sender.items()
            if not (client.replaced and self.is_silent(sender))
        ]

    def _patience(self, client: Client | None) -> float:
        return _REPLACED_SECONDS if client is not None and client.replaced else self._patience_seconds
