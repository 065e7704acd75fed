"""The clients of the buffer: when each was last seen, what it does, and when it counts as gone."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tba.common.clock import Clock
from tba.common.run_status import SILENT_SECONDS
from tba.common.wire import fields
from tba.common.wire.messages import ClientStatus

_REPLACED_SECONDS = 3.0
# The longest time, after a start of the server, that a trainer needs to reconnect and be seen.
_RETURN_SECONDS = 5.0
# How long a count of the living clients is used.
_CENSUS_SECONDS = 1.0
# Heartbeats of all searchers, unless each of them would send less often than this.
_HEARTBEATS_PER_SECOND = 300
_HEARTBEAT_SECONDS = 3
# With keys the processes of a node have one owner, otherwise each has its own: more names than that are an attack.
_NAMES_PER_OWNER = 128
GONE = "gone"


@dataclass(slots=True)
class Client:
    """What is known of a sender since the server started.

    `seen_at` and `activity_at`, when its activity last changed, are monotonic. `owner`: what a connection must have to
    use its name (`admission`). `replaced`: a later start of the same name has said hello. `held_back`: why its last
    lease request is parked. `serves`: the address at which its node serves snapshots. `has_worked`: it has leased, put
    or the like.
    """

    role: fields.Role
    seen_at: float
    activity_at: float
    owner: bytes = b""
    host: str = ""
    activity: str = "connected"
    reason: str = ""
    replaced: bool = False
    held_back: str = ""
    serves: str = ""
    warning: str = ""
    has_worked: bool = False
    weights_version: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    trajectories: int = 0
    duplicates: int = 0


class Clients(dict[str, Client]):
    """The clients by sender. A sender's leases expire after `patience` seconds of silence."""

    def __init__(self, clock: Clock, patience: float) -> None:
        super().__init__()
        self._clock = clock
        self._patience_seconds = patience
        self._opened = clock.monotonic()
        # The living clients by role, and the addresses of those that serve snapshots, until a monotonic time. Counted
        # again when clients come and go, and now and then, because others fall silent.
        self._living, self._nodes, self._counted_until = Counter[fields.Role](), list[str](), -math.inf
        # Sender and host of the last trainer that was admitted: requests of earlier ones are refused.
        self._trainer = ("", "")
        self._replaced: set[str] = set()

    def open(self) -> None:
        """Start counting the silence of senders now: they could not be received before."""
        self._opened = self._clock.monotonic()

    def at_work(self, sender: str) -> Client | None:
        """Return a client that is neither gone nor silent."""
        client = self.get(sender)
        return None if client is None or client.activity == GONE or self.is_silent(sender) else client

    def mark_seen(self, sender: str, role: fields.Role, at: float | None = None, owner: bytes = b"") -> None:
        """Record that a message of a sender and its owner arrived at this monotonic time, by default now.

        Called once for each message, not when a parked one is tried again. A trainer and its publisher are one
        sender, of role trainer whichever is seen first. At the limit a new sender is remembered only in the place of
        one that fell silent or that holds nothing: those at work are not harmed by a crowd of names, nor kept out.
        """
        at = self._clock.monotonic() if at is None else at
        client = self.get(sender)
        if client is None:
            if len(self) >= fields.MAX_CLIENTS and not self._forget_one():
                return
            client = self[sender] = Client(role, at, at)
            self._living[role] += 1
        if client.role != role and (client.role, role) != ("trainer", "publisher"):
            client.role = role
            self.recount()
        # After a restart of the server a trainer does not say hello again.
        if sender == self._trainer[0]:
            client.host = self._trainer[1]
        client.seen_at, client.owner = max(client.seen_at, at), owner

    def show(self, sender: str, activity: str, reason: str = "") -> None:
        client = self[sender]
        if activity != client.activity:
            client.activity_at = self._clock.monotonic()
        client.activity, client.reason = activity, reason

    def is_silent(self, sender: str) -> bool:
        """Whether the sender's leases expire. After a restart every sender has the full time to come back."""
        client = self.get(sender)
        seen_at = client.seen_at if client else self._opened
        return self._clock.monotonic() - seen_at > self._patience(client)

    def forget_long_gone(self) -> None:
        """Drop clients that have been silent for ten times their patience, and longer than any request is parked."""
        now = self._clock.monotonic()
        for sender, client in list(self.items()):
            if now - client.seen_at > max(10 * self._patience(client), 2 * fields.LONGEST_WAIT_SECONDS):
                del self[sender]

    def _forget_one(self) -> bool:
        """Forget a client that nothing depends on. Returns False if there is none.

        Else the one without work that is heard least, whose next message brings it back, or one of too many names.
        """
        for sender, client in self.items():
            if client.role in ("monitor", "importer") or client.activity == GONE or self.is_silent(sender):
                del self[sender]
                return True
        others = {sender: client for sender, client in self.items() if sender != self._trainer[0]}
        owner, names = Counter(client.owner for client in others.values()).most_common(1)[0]
        chosen = [
            (client.has_worked, client.seen_at, sender)
            for sender, client in others.items()
            if not client.has_worked or (names > _NAMES_PER_OWNER and client.owner == owner)
        ]
        if chosen:
            del self[min(chosen)[2]]
        return bool(chosen)

    def replace_earlier(self, sender: str) -> None:
        """Shorten the patience with earlier starts under this sender's name: they are probably dead.

        If one is alive after all, two processes share a name, and both keep their leases.
        """
        name, role = sender.rpartition(".")[0], self[sender].role
        for earlier, client in self.items():
            if earlier != sender and client.role == role and earlier.rpartition(".")[0] == name:
                client.replaced = True

    def other_trainer(self, sender: str) -> Client | None:
        """Return another trainer that is alive, or that may be because the server itself has just started."""
        last, host = self._trainer
        if last in ("", sender):
            return None
        now = self._clock.monotonic()
        client = self.get(last)
        if client is None:
            unseen = Client("trainer", self._opened, self._opened, host=host)
            return unseen if now - self._opened < _RETURN_SECONDS else None
        return client if client.activity != GONE and now - client.seen_at < SILENT_SECONDS else None

    def admit_trainers(self, trainers: Sequence[tuple[str, str]]) -> None:
        """Take over all trainers, (sender, host), oldest first; only the last is admitted, and others may not go on."""
        if trainers:
            self._trainer = trainers[-1]
            self._replaced = {sender for sender, _ in trainers[:-1]}

    def successor_host(self, sender: str) -> str | None:
        """Return the host of the trainer that took over from this sender; None for every sender still admitted."""
        return self._trainer[1] if sender in self._replaced else None

    def sources_of(self, address: str) -> list[str]:
        """Return the addresses of the nodes that a serving node asks for snapshots before the trainer, nearest first.

        Node i, numbered as they came, has node (i - 1) // 2 before it: none serves more than two, and no two wait for
        each other.
        """
        self._count_living()
        if address not in self._nodes:
            self.recount()
            self._count_living()
        nodes = self._nodes
        # Its heartbeat waited here for longer than a sender may be silent.
        if address not in nodes:
            return []
        number = nodes.index(address)
        sources: list[str] = []
        while number and len(sources) < fields.MAX_SOURCES:
            number = (number - 1) // 2
            sources.append(nodes[number])
        return sources

    def living(self, role: fields.Role) -> int:
        """Return how many clients of a role are neither gone nor silent, as of the last second."""
        self._count_living()
        return self._living[role]

    @property
    def heartbeat_seconds(self) -> int:
        """The time between two heartbeats of a searcher: one second, and in a large fleet up to three."""
        longest = min(_HEARTBEAT_SECONDS, int(self._patience_seconds / 4))
        return max(1, min(self.living("searcher") // _HEARTBEATS_PER_SECOND, longest))

    def recount(self) -> None:
        """Count the living clients again at the next question: one has come or gone."""
        self._counted_until = -math.inf

    def _count_living(self) -> None:
        now = self._clock.monotonic()
        if now < self._counted_until:
            return
        living = [client for sender, client in self.items() if client.activity != GONE and not self.is_silent(sender)]
        self._nodes = list(dict.fromkeys(client.serves for client in living if client.serves))
        self._living, self._counted_until = Counter(client.role for client in living), now + _CENSUS_SECONDS

    def status(self, leases_of: Callable[[str], int]) -> list[ClientStatus]:
        """Return what `tba status` shows. Replaced clients that fell silent are left out."""
        now = self._clock.monotonic()
        return [
            ClientStatus(
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
                activity_seconds=now - client.activity_at,
                warning=client.warning,
            )
            for sender, client in self.items()
            if not (client.replaced and self.is_silent(sender))
        ]

    def _patience(self, client: Client | None) -> float:
        if client is None or not client.replaced:
            return self._patience_seconds
        # One that is alive after all sends heartbeats, in a large fleet less often.
        large = len(self) >= 2 * _HEARTBEATS_PER_SECOND
        return min(3 * _HEARTBEAT_SECONDS, self._patience_seconds) if large else _REPLACED_SECONDS
