"""Ends what searchers leave behind when the process that supervises them is killed. Run by the supervisor.

Linux ends a supervisor's children with it (PR_SET_PDEATHSIG), but not their children, such as the workers of an
engine. This process hears the sessions of the children on standard input, as `+PID` and `-PID` lines. The end of
that input is the end of the supervisor, in whatever way it came: then every process of those sessions is killed.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

_ROUNDS = 100


def main() -> None:
    """Listen until the supervisor is gone, then end the sessions that it has not ended itself."""
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
