"""How every tba process behaves towards the system: signals, parents, systemd."""

import contextlib
import ctypes
import os
import signal
import socket
import sys
from types import FrameType

_PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "TBA_PARENT_PID"


class StopSignal:
    """True after SIGTERM or SIGINT: finish what is under way and exit 0. A second signal exits at once."""

    def __init__(self) -> None:
        self._stopped = False
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def __call__(self) -> bool:
        return self._stopped

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._stopped:
            os._exit(128 + number)
        self._stopped = True
        notify_systemd("STOPPING=1")


def die_with_parent() -> None:
    """End this process when the launcher that started it ends, whatever way that happens.

    The launcher passes its pid in the environment. SIGKILL, since a hung child would ignore a request
    and nothing acknowledged can be lost by it. Linux only.
    """
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before the call
        sys.exit(1)


def notify_systemd(state: str) -> None:
    """Tell systemd `READY=1`, `STATUS=...`; nothing happens outside a Type=notify unit."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # abstract namespace
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.sendto(state.encode(), address)
