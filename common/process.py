"""How every tba process behaves towards the system: signals, parents, systemd."""

import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from tba.common.guard import session_of

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Of glibc's mallopt. It takes no larger size for the second.
_M_TRIM_THRESHOLD, _KEPT_BYTES = -1, 256 << 20
_M_MMAP_THRESHOLD, _LARGEST_KEPT_BLOCK = -3, 32 << 20
_SAME_REQUEST_SECONDS = 1.0
_ROUNDS = 100
PARENT_VARIABLE = "TBA_PARENT_PID"
# The file by which the processes of one trainer find each other.
RENDEZVOUS_VARIABLE = "TBA_RENDEZVOUS"


def keep_freed_memory() -> None:
    """Ask glibc to keep blocks of up to 32 MiB that are freed at the end of a heap, 256 MiB there, for what comes next.

    It gives a block back that is larger than all that were freed before, and the next batch of a trainer, or answer of
    the buffer, begins with a page fault for each 4 KiB: on a virtual machine that returns pages to its host, most of
    the time of some batches. Where there is no glibc, or it refuses, all stays as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BLOCK)


@contextlib.contextmanager
def objects_frozen() -> Iterator[None]:
    """Meanwhile Python's collector passes over all objects that are there now: they will stay.

    With torch and transformers they are 350,000, and a full collection takes 0.2 s. Each rank of a trainer makes it at
    another step, and all wait for it.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class StopSignal:
    """True after SIGTERM or SIGINT: finish what is under way and exit 0. A second signal exits at once.

    A second one within a second is the same request: systemd and a supervisor both send theirs. One that does not
    `listen` leaves the signals as they are and is never true.
    """

    def __init__(self, *, listens: bool = True) -> None:
        self._stopped_at: float | None = None
        self._at_once = False
        self.interrupted = False  # the first signal was that of Ctrl-C
        if listens:
            signal.signal(signal.SIGTERM, self._on_signal)
            signal.signal(signal.SIGINT, self._on_signal)

    def __call__(self) -> bool:
        return self._stopped_at is not None

    @contextlib.contextmanager
    def ends_at_once(self) -> Iterator[None]:
        """Meanwhile nothing is under way that could be lost: a signal ends this process, and what it has started.

        Not by an exception, which the libraries that run meanwhile may hold back, or wait for their children at.
        """
        self._at_once = True
        try:
            if self():
                self._end()
            yield
        finally:
            self._at_once = False

    def _end(self) -> None:
        kill_descendants()
        os._exit(0)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self._stopped_at is None:
            self._stopped_at = now
            self.interrupted = number == signal.SIGINT
        elif now - self._stopped_at > _SAME_REQUEST_SECONDS:
            os._exit(128 + number)
        notify_systemd("STOPPING=1")
        if self._at_once:
            self._end()


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


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends, so that none is lost sight of. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def child_pids(pid: int | None = None) -> set[int]:
    """The children of a process, by default this one, adopted ones and zombies included.

    Empty where the kernel does not list them.
    """
    found: set[int] = set()
    with contextlib.suppress(OSError):  # not Linux, or a process that has just ended
        for thread in list(Path(f"/proc/{pid or 'self'}/task").iterdir()):
            with contextlib.suppress(OSError):  # a thread that has just ended
                found.update(map(int, (thread / "children").read_text().split()))
    return found


def kill_descendants() -> None:
    """SIGKILL to all processes below this one in its own session, also to those that are started meanwhile.

    But for Python's resource tracker: as the last one it gives back the memory that they shared, and ends by itself.
    """
    session = os.getsid(0)
    for _ in range(_ROUNDS):
        running = [pid for pid in _descendants(os.getpid()) if session_of(pid) == session and not _is_tracker(pid)]
        if not running:
            return
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> Iterator[int]:
    for child in child_pids(pid):
        yield from _descendants(child)
        yield child


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False


def signal_name(number: int) -> str:
    """`SIGKILL`, or `signal 35` for one without a name, as most real-time signals are."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class NotifySocket:
    """What a child tells by `notify_systemd`, heard by the process that started it."""

    def __init__(self) -> None:
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        # The kernel chooses a free abstract name: no file that a killed process would leave behind.
        self._channel.bind("")
        self.address = "@" + self._channel.getsockname()[1:].decode()

    def receive(self) -> list[str]:
        """The lines that came since the last call, such as `READY=1`."""
        lines = []
        with contextlib.suppress(BlockingIOError):
            while True:
                lines += self._channel.recv(4096).decode(errors="replace").splitlines()
        return lines

    def close(self) -> None:
        """Hear no more."""
        self._channel.close()


def notify_systemd(state: str) -> None:
    """Tell systemd `READY=1`, `STATUS=...`; nothing happens outside a Type=notify unit."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # abstract namespace
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.sendto(state.encode(), address)
