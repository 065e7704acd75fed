"""How a process introduces itself to the buffer, and what it checks in the reply."""

import os
import socket

from tba.common.errors import ConfigError
from tba.common.wire.messages import Hello, Welcome


def own_hello() -> Hello:
    """Return the introduction of this process."""
    return Hello(host=socket.gethostname(), pid=os.getpid())


def check_run(welcome: Welcome, run: str, address: str) -> None:
    """Raise ConfigError if the buffer at an address serves another run than the configured one."""
    if welcome.run_name != run:
        raise ConfigError(f"the buffer at {address} serves run {welcome.run_name}, this configuration is of run {run}")
