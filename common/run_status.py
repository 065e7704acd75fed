"""The status of a run as a process asks the buffer for it, and the state of the run in words.

The buffer finds the stall (`tba.buffer.service.stall`). The asker adds that it does not answer, and what children do.
`describe` alone puts this into words; of a run that no buffer serves, `tba.deploy.run_directory` has the state.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tba.common.config import Config
from tba.common.errors import AddressInUse, BufferUnavailable, Refused, TbaError, format_duration, quantity
from tba.common.terminal import printable
from tba.common.wire.channels import ServerChannel
from tba.common.wire.client import BufferClient
from tba.common.wire.keys import buffer_client_keys
from tba.common.wire.messages import ClientStatus, GetStatus, Stall, Status

# A heartbeat is due every second, in a fleet of hundreds every third, however long a step is. A client gives up on an
# unanswered one after three seconds and sends the next a second later. After this time the buffer counts a trainer as
# dead.
SILENT_SECONDS = 10.0
# A supervisor that has been silent for longer is gone, and its report with it.
REPORT_SECONDS = 60.0
_MOST = 1e15
READ_LOGS = "; correct the error if one is named, and read the logs in run.dir/logs for more"


class State(NamedTuple):
    """The state of a run (`tba.deploy.run_directory` lists them), and what it does, waits for, or came to."""

    name: str
    sentence: str


# Before the buffer of a `tba run` is ready.
STARTING = State("starting", "`tba run` is starting the buffer")


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a run at one moment: the buffer's status, and what the process that asks knows by itself.

    `status` is None if the buffer at `address` has not answered for `unanswered_seconds`, or is `starting`. `failing`
    are sentences about children of this supervisor that do not run, such as "trainer failed 3 times: out of memory".
    """

    status: Status | None
    address: str = ""
    unanswered_seconds: float = 0.0
    failing: Sequence[str] = ()
    starting: bool = False


def describe(facts: Facts) -> State:
    """Return the state of a run that is served."""
    stall, status = stall_of(facts), facts.status
    if status is None:
        if stall is not None:
            return State("stalled", stall.sentence)
        return STARTING if facts.starting else State("running", "the buffer does not answer")
    name, doing = ("stalled", stall.sentence) if stall is not None else _doing(status)
    trainer = live_trainer(status)
    warning = trainer.warning if trainer is not None and name != "finished" else ""
    # Names and reasons come from the network.
    return State(name, printable("; ".join(filter(None, [doing, warning]))))


def _doing(status: Status) -> State:
    trainer, roles = last_trainer(status), loading(status)
    if "trainer" in roles:
        return State("starting", "the trainer is loading the model")
    # A finished run that is resumed is so until its trainer has connected.
    if status.finished:
        served_again = "" if trainer is not None else "; the buffer serves it again"
        return State("finished", f"finished after {quantity(status.step, 'step')}{served_again}")
    if trainer is None:
        first = "the searchers are loading the model" if "search" in roles else "it loads its model first"
        return State("starting", "no trainer is connected" if status.step else f"no trainer has connected yet: {first}")
    if trainer.activity == "gone":
        return State("running", f"the trainer left after step {status.step}")
    if status.trainer_waits_for:
        waiting = [f"{client.sender}: {client.reason}" for client in living(status) if client.activity == "waiting"]
        meanwhile = "; ".join(waiting) or connected(status)
        return State("running", f"the trainer waits for data ({status.trainer_waits_for}); {meanwhile}")
    doing = f"the trainer is {trainer.activity}" + (f": {trainer.reason}" if trainer.reason else "")
    return State("running", "; ".join(filter(None, [doing, status.no_recent_data])))


def connected(status: Status) -> str:
    """Return how many searchers are connected, or why none is."""
    if clients := living(status):
        return f"{quantity(len(clients), 'searcher')} connected"
    return "the searchers are loading the model" if "search" in loading(status) else "no searcher is connected"


def loading(status: Status) -> set[str]:
    """Return the kinds of processes, `trainer` and `search`, that load their model, as their supervisors say."""
    monitors = [client for client in status.clients if client.role == "monitor" and client.activity != "gone"]
    return {kind for client in monitors if client.silent_seconds < REPORT_SECONDS for kind in client.metrics}


def stall_of(facts: Facts) -> Stall | None:
    """Return why the run stands still, None if it does not, has finished, or has only begun to wait."""
    stall = _without_buffer(facts) if facts.status is None else facts.status.stall
    return None if stall is None else Stall(stall.reason, printable(stall.sentence))


def _without_buffer(facts: Facts) -> Stall | None:
    if facts.failing:
        return Stall("process_fails", f"{'; '.join(facts.failing)}{READ_LOGS}")
    if facts.starting or facts.unanswered_seconds < SILENT_SECONDS:
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


def status_of(name: str, address: str, directory: str | None) -> Status | None:
    """Return the status of the server at an address, with keys of a directory, if it serves the run of this name."""
    try:
        keys = buffer_client_keys(Path(directory) if directory else None, address)
        with contextlib.closing(BufferClient(address, role="monitor", name="status", keys=keys)) as client:
            status = ask_status(client)
    except TbaError:
        return None
    return status if status is not None and status.run_name == name else None


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
