"""Find out which buffer answers at an address."""

import contextlib

from tba.common.errors import AddressInUse, BufferUnavailable, Refused
from tba.common.wire.channels import ServerChannel
from tba.common.wire.client import BufferClient
from tba.common.wire.status_messages import GetStatus, Status


def ask_status(client: BufferClient, deadline_seconds: float = 1.0) -> Status | None:
    """Return the buffer's status, or None if it does not answer in time."""
    try:
        return client.call(GetStatus(), Status, deadline_seconds=deadline_seconds)[0]
    except (BufferUnavailable, Refused):
        return None


def check_address(address: str) -> None:
    """Raise AddressInUse if the address is taken, ConfigError if no buffer can be served there."""
    with contextlib.closing(BufferClient(address, role="monitor", name="probe")) as client:
        status = ask_status(client, deadline_seconds=0.5)
    if status is not None:
        raise AddressInUse(
            f"buffer.address {address} is in use: a buffer serves run {status.run_name} there; stop it or choose "
            "another address"
        )
    ServerChannel(address).close()
