"""Why a run stands still, for a process that asks the buffer, and what the status says of the clients.

The buffer finds the stall (`tba.buffer.service.stall`). What only the asker knows is added here: that the buffer does
not answer, and what its own child processes do.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tba.common.quantity import lasting
from tba.common.terminal import printable
from tba.common.wire.status_messages import ClientStatus, Stall, Status

# A heartbeat is due every second, however long a step is. A client gives up on an unanswered one after three seconds
# and sends the next a second later. After this time the buffer counts a trainer as dead.
SILENT_SECONDS = 10.0
_MOST = 1e15
READ_LOGS = "; correct what the error names, and read the logs in run.dir/logs for more"


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


def find_stall(facts: Facts) -> Stall | None:
    """Return why the run stands still, None if it does not, has finished, or has only begun to wait."""
    stall = _without_buffer(facts) if facts.status is None else facts.status.stall
    # The buffer does not see a process that has not connected yet.
    if stall is None or stall.reason in [f"no_{role}" for role in facts.loading]:
        return None
    return Stall(stall.reason, printable(stall.sentence))


def _without_buffer(facts: Facts) -> Stall | None:
    if facts.failing:
        return Stall("process_fails", f"{'; '.join(facts.failing)}{READ_LOGS}")
    if facts.unanswered_seconds < SILENT_SECONDS:
        return None
    return Stall(
        "buffer_silent",
        f"the buffer at {facts.address} has not answered for {lasting(facts.unanswered_seconds)}: searchers write to "
        "their spools and the trainer waits; read the buffer's log, and start it again with `tba buffer serve`",
    )


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


def is_silent(client: ClientStatus) -> bool:
    """Whether heartbeats of a client are missing."""
    return client.silent_seconds > SILENT_SECONDS


def total(clients: Sequence[ClientStatus], metric: str) -> float:
    """Return the sum of a metric, limited: each value from the network is finite, but their sum need not be."""
    return max(-_MOST, min(_MOST, sum(client.metrics.get(metric, 0.0) for client in clients)))
