"""Ends what children leave behind when the process that watches them is killed.

Linux ends a process's children with it (PR_SET_PDEATHSIG), but not their children, such as the workers of an engine
or what a reward started. `python -m tba.common.guard` hears the sessions of the children on standard input, as `+PID`
and `-PID` lines. The end of that input is the end of the watcher, in whatever way it came: then every process of
those sessions is killed. `SessionGuard` is the watcher's side.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

_ROUNDS = 100


class SessionGuard:
    """The sessions that are to end with this process. Nothing is started before `keep` or `add`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._sessions: set[int] = set()

    @property
    def pid(self) -> int | None:
        """Of the guarding process."""
        return self._process.pid if self._process else None

    def keep(self) -> None:
        """Start the guarding process, again if somebody has killed it."""
        if self._process is not None and self._process.poll() is None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tba.common.guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        for session in self._sessions:
            self._tell(f"+{session}")

    def add(self, session: int) -> None:
        """A child was started as the leader of this session."""
        self.keep()
        self._sessions.add(session)
        self._tell(f"+{session}")

    def discard(self, session: int) -> None:
        """All of a session has ended. Call it before its number can be given to another."""
        self._sessions.discard(session)
        self._tell(f"-{session}")

    def close(self) -> None:
        """End the guarding process, and with it the sessions that are left."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed; there is nothing left to guard
            self._process.stdin.close()
        self._process.wait()
        self._process = None

    def _tell(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # the next one is told all
                self._process.stdin.write(f"{line}\n".encode())
                self._process.stdin.flush()


def main() -> None:
    """Listen until the watcher is gone, then end the sessions that it has not ended itself."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin:
        (sessions.add if line[0] == "+" else sessions.discard)(int(line[1:]))
    kill_sessions(sessions)


def kill_sessions(sessions: set[int]) -> None:
    """SIGKILL to all processes of some sessions, also to those that are started meanwhile."""
    for _ in range(_ROUNDS):
        members = [pid for pid in _processes() if session_of(pid) in sessions]
        if not members:
            return
        for pid in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def session_of(pid: int) -> int | None:
    """The session of a process that runs; None if it has ended, or is a zombie."""
    with contextlib.suppress(OSError, ValueError):
        # After the command in parentheses, which may hold anything: state, parent, group, session.
        state, _, _, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
        return None if state in "ZX" else int(session)
    return None


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


if __name__ == "__main__":
    main()
