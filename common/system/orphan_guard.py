"""Kills what children leave behind when the process that supervises them is killed.

Linux can kill a process's children with it (PR_SET_PDEATHSIG), but not their children, such as the workers of an engine
or a program that a reward started. `python -m tba.common.system.orphan_guard` receives the sessions of the children as
arguments, and later changes on standard input as `+PID` and `-PID` lines. That input ends when the supervisor ends,
for any reason. The guard then kills every process of the remaining sessions. `SessionGuard` is the supervisor's side.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_ROUNDS = 100


class SessionGuard:
    """The sessions that must end with this process. The first call starts the guard process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._sessions: set[int] = set()

    @property
    def pid(self) -> int | None:
        """Process id of the guard, None if it was not started."""
        return self._process.pid if self._process else None

    def ensure_running(self) -> None:
        """Start the guard process, also if it was killed. The new one receives all sessions."""
        if self._process is not None and self._process.poll() is None:
            return
        # Known sessions are arguments, so that this process cannot be killed between the start and their transfer.
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "tba.common.system.orphan_guard", *map(str, self._sessions)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, session: int) -> None:
        """Guard the session that a new child leads."""
        self.ensure_running()
        self._sessions.add(session)
        self._send(f"+{session}")

    def discard(self, session: int) -> None:
        """Forget a session without processes. Call it before `wait` lets the kernel reuse the number."""
        self._sessions.discard(session)
        self._send(f"-{session}")

    def close(self) -> None:
        """End the guard process, and with it the sessions that are left."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        # The guard may have been killed. No session is left to guard then.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process = None

    def _send(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            # If the guard was killed, its successor receives all sessions.
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(f"{line}\n".encode())
                self._process.stdin.flush()


def main() -> None:
    """Read sessions until the supervisor ends, then kill those that it has not ended itself."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions = set(map(int, sys.argv[1:]))
    for line in sys.stdin:
        (sessions.add if line[0] == "+" else sessions.discard)(int(line[1:]))
    kill_sessions(sessions)


def kill_sessions(sessions: set[int]) -> None:
    """Send SIGKILL to all processes of some sessions, including those that start meanwhile."""
    kill_all(lambda: [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if session_of(pid) in sessions])


def kill_all(find: Callable[[], list[int]]) -> None:
    """Send SIGKILL to the processes that `find` returns, until it returns none."""
    for _ in range(_ROUNDS):
        if not (found := find()):
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def session_of(pid: int) -> int | None:
    """Return the session of a running process, None if it has ended or is a zombie."""
    with contextlib.suppress(OSError, ValueError):
        # The fields after the command, which is in parentheses and may contain any byte: state, parent, group,
        # session.
        state, _, _, session = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:4]
        return None if state in b"ZX" else int(session)
    return None


if __name__ == "__main__":
    main()
