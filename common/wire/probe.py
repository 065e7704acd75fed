"""Find out which buffer answers at an address."""

import contextlib
import os

from tba.common.config import Config
from tba.common.errors import AddressInUse, BufferUnavailable, Refused
from tba.common.wire.channels import ServerChannel
from tba.common.wire.client import BufferClient
from tba.common.wire.keys import buffer_client_keys
from tba.common.wire.status_messages import GetStatus, Status


def monitor(config: Config, name: str) -> BufferClient:
    """Return a client that watches the buffer of a run. Raises ConfigError for its address or its keys."""
    keys = buffer_client_keys(config.security, config.address)
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
