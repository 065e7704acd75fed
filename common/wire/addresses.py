"""Who can reach a ZeroMQ endpoint, judged by its address."""

import re

_LOOPBACK = re.compile(r"tcp://(127\.|localhost:|\[::1\]:)")


def is_local(address: str) -> bool:
    """Whether an endpoint can be reached only from this machine."""
    return address.startswith("ipc://") or _LOOPBACK.match(address) is not None


def is_private(address: str) -> bool:
    """Whether an endpoint can be reached only from this machine, and a socket only by the users whom its file admits.

    An abstract socket (`ipc://@name`) has no file: every user of the machine may connect.
    """
    return is_local(address) and not address.startswith("ipc://@")
