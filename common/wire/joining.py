"""How a process introduces itself to the buffer."""

import os
import socket

from tba.common.wire.messages import Hello


def own_hello() -> Hello:
    """Return the introduction of this process."""
    return Hello(host=socket.gethostname(), pid=os.getpid())
