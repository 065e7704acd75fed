"""The status of a run as a process asks the buffer for it, and why the run stands still.

The buffer finds the stall (`tba.buffer.service.stall`). The asker adds that it does not answer, and what children do.
"""

import contextlib
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tba.common.config import Config
from tba.common.errors import AddressInUse, BufferUnavailable, Refused, format_duration
from tba.common.terminal import printable
from tba.common.wire.channels import ServerChannel
from tba.common.wire.client import BufferClient
from tba.common.wire.keys import buffer_client_keys
from tba.common.wire.messages import ClientStatus, GetStatus, Stall, Status

_LOADING_SECONDS = 600.0
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
    if stall is None or (facts.status is not None and _loads(facts.status, stall.reason, facts.loading)):
        return None
    return Stall(stall.reason, printable(stall.sentence))


def _loads(status: Status, reason: str, loading: Collection[str]) -> bool:
    """Whether what is missing is a process that the buffer does not see yet, for no longer than a model may load."""
    last = last_trainer(status)
    since_trainer = min(status.uptime_seconds, last.activity_seconds) if last else status.uptime_seconds
    since = since_trainer if reason == "no_trainer" else status.trainer_waits_seconds
    return reason in [f"no_{role}" for role in loading] and since < _LOADING_SECONDS


def _without_buffer(facts: Facts) -> Stall | None:
    if facts.failing:
        return Stall("process_fails", f"{'; '.join(facts.failing)}{READ_LOGS}")
    if facts.unanswered_seconds < SILENT_SECONDS:
        return None
    return Stall(
        "buffer_silent",
        f"the buffer at {facts.address} has not answered for {format_duration(facts.unanswered_seconds)}: searchers "
        "write to their spools, the trainer waits; read the buffer's log, and start it again with `tba buffer serve`",
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


def monitor(config: Config, name: str) -> BufferClient:
    """Return a client that watches the buffer of a run. Raises ConfigError for its address or its keys."""
    keys = buffer_client_keys(config.security.keys, config.address)
    return BufferClient(config.address, role="monitor", name=name, keys=keys)


def ask_status(client: BufferClient, deadline_seconds: float = 1.0) -> Status | None:
    """Return the buffer's status, or None if it does not answer in time."""
    try:
        return client.call(GetStatus(), Status, deadline_seconds=deadline_seconds)[0]
    except (BufferUnavailable, Refused):
        return None


def check_address(config: Config) -> None:
    """Raise AddressInUse if the address is taken, ConfigError if no buffer can be served there."""
    address = config.address
    # Before the first start of a run there is neither its directory nor a socket file.
    if address.startswith("ipc://") and not os.path.exists(address.removeprefix("ipc://")):
        return
    with contextlib.closing(monitor(config, "probe")) as client:
        status = ask_status(client, deadline_seconds=0.5)
    if status is not None:
        raise AddressInUse(
            f"buffer.address {address} is in use: a buffer serves run {status.run_name} there; stop it or choose "
            "another address"
        )
    ServerChannel(address).close()
