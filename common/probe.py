"""Who answers at the buffer's address."""

from tba.common.channels import ServerChannel
from tba.common.client import BufferClient
from tba.common.errors import AddressInUse, BufferUnavailable, Refused
from tba.common.wire import GetStatus, Status


def ask_status(client: BufferClient, deadline_seconds: float = 1.0) -> Status | None:
    """The buffer's status, None if it does not answer in time."""
    try:
        return client.call(GetStatus(), Status, deadline_seconds=deadline_seconds)[0]
    except (BufferUnavailable, Refused):
        return None


def check_address(address: str) -> None:
    """Raise AddressInUse unless our buffer can be served there, ConfigError if none can."""
    client = BufferClient(address, role="monitor", name="probe")
    try:
        status = ask_status(client, deadline_seconds=0.5)
    finally:
        client.close()
    if status is not None:
        raise AddressInUse(
            f"buffer.address {address} is in use: a buffer serves run {status.run_name} there; stop it or choose "
            "another address"
        )
    ServerChannel(address).close()
