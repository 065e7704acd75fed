"""What is known of a run, and what is said of it: the input and the output of `find_stall`."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tba.common.wire.status_messages import ClientStatus, Status

Reason = Literal[
    "buffer_silent",
    "buffer_refuses",
    "process_fails",
    "no_trainer",
    "trainer_silent",
    "trainer_hangs",
    "publication",
    "checkpoint",
    "no_searcher",
    "searcher_silent",
    "weights_refused",
    "weights_missing",
    "weights_old",
    "only_errors",
    "spool",
    "rewards",
    "references",
    "unacknowledged",
    "limits",
    "no_growth",
    "no_data",
]
REASONS: tuple[Reason, ...] = get_args(Reason)

# Shorter waits are normal.
WAIT_SECONDS = 10.0
# A heartbeat is due every second, however long a step is. A client gives up on an unanswered one after three seconds
# and sends the next a second later. After this time the buffer counts a trainer as dead.
SILENT_SECONDS = 10.0
# Names in a sentence.
_NAMED = 3
# Loading a large model, and restarting a process, may take so long.
LOADING_SECONDS = 600.0
RESTART_SECONDS = 60.0
_MOST = 1e15


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a run at one moment: the buffer's status, and what the process that asks knows by itself.

    `status` is None if the buffer at `address` has not answered for `unanswered_seconds`. `loading` are the roles with
    a process of this machine that loads its model. `failing` are sentences about children of this supervisor that do
    not run, such as "trainer failed 3 times: out of memory".
    """

    status: Status | None
    address: str = ""
    unanswered_seconds: float = 0.0
    loading: Collection[str] = ()
    failing: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Stall:
    """Why a run stands still: a code of `REASONS` for machines and a sentence for people, printable on a terminal."""

    reason: Reason
    sentence: str


def living(status: Status) -> list[ClientStatus]:
    """Return the searchers that have not left, those that are silent too."""
    return [client for client in status.clients if client.role == "searcher" and client.activity != "gone"]


def name_of(client: ClientStatus) -> str:
    """Return a client's name without the number of its start."""
    return client.sender.rpartition(".")[0] or client.sender


def last_trainer(status: Status, *, but: str = "") -> ClientStatus | None:
    """Return the trainer that sent the most recent message, of those whose activity is not `but`."""
    trainers = [client for client in status.clients if client.role == "trainer" and client.activity != but]
    return min(trainers, key=lambda client: client.silent_seconds, default=None)


def live_trainer(status: Status) -> ClientStatus | None:
    """Return the living trainer."""
    last = last_trainer(status, but="gone")
    return last if last is not None and last.silent_seconds <= SILENT_SECONDS else None


def waits(status: Status) -> bool:
    """Whether the trainer has waited for a batch for longer than is normal."""
    return bool(status.trainer_waits_for) and status.trainer_waits_seconds >= WAIT_SECONDS


def is_silent(client: ClientStatus) -> bool:
    """Whether heartbeats of a client are missing."""
    return client.silent_seconds > SILENT_SECONDS


def idle(client: ClientStatus) -> bool:
    """Whether a searcher has waited for longer than is normal."""
    return client.activity == "waiting" and client.activity_seconds >= WAIT_SECONDS


def at_work(client: ClientStatus) -> bool:
    """Whether a client has neither left nor fallen silent."""
    return not is_silent(client) and client.activity != "gone"


def all_idle(searchers: Sequence[ClientStatus]) -> bool:
    """Whether there are searchers, and every one waits."""
    return bool(searchers) and all(map(idle, searchers))


def total(clients: Sequence[ClientStatus], metric: str) -> float:
    """Return the sum of a metric, limited: each value from the network is finite, but their sum need not be."""
    return max(-_MOST, min(_MOST, sum(client.metrics.get(metric, 0.0) for client in clients)))


def every_searcher(count: int) -> str:
    """Return `the only searcher`, `both searchers`, or `all 7 searchers`."""
    return {1: "the only searcher", 2: "both searchers"}.get(count, f"all {count} searchers")


def who(clients: Sequence[ClientStatus], status: Status) -> str:
    """Return `searcher gpu3`, `searchers gpu0 and gpu3`, `both searchers`, or `all 7 searchers`."""
    if len(clients) > 1 and len(clients) == len(living(status)):
        return every_searcher(len(clients))
    return f"searcher{'s' if len(clients) > 1 else ''} {enumerated([name_of(client) for client in clients], ' and ')}"


def are(clients: Sequence[ClientStatus], status: Status) -> str:
    """Return `searcher gpu3 is`, or `searchers gpu0 and gpu3 are`."""
    return f"{who(clients, status)} {'is' if len(clients) == 1 else 'are'}"


def enumerated(parts: Sequence[str], last: str = "; ") -> str:
    """Join the first few, and count the others. `last` is the separator of the last two."""
    separator = ", " if last != "; " else last
    if len(parts) > _NAMED:
        return f"{separator.join(parts[:_NAMED])} and {len(parts) - _NAMED} more"
    return last.join(filter(None, [separator.join(parts[:-1]), parts[-1]]))
