"""Brings the output of children to ours, whole lines only, each marked with the child it came from."""

import json
import os
import sys
import threading
from collections import deque
from typing import IO

from tba.common.log import json_wanted

_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_LONGEST_LINE = 64 << 10  # bytes; a longer one is cut in pieces, so that memory stays bounded
_TAIL_LINES = 15
_writing = threading.Lock()


class Relay:
    """Reads one child's output on a thread of its own until all who can write to it are gone.

    A thread and not the supervisor's loop: a terminal that is stopped (Ctrl-S) blocks who writes to it.
    """

    def __init__(self, pipe: IO[bytes], name: str, number: int) -> None:
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._pipe = pipe
        self._name = name
        self._json = json_wanted()
        colour = _COLOURS[number % len(_COLOURS)] if sys.stderr.isatty() else None
        self._prefix = f"\033[{colour}m{name} |\033[0m " if colour else f"{name} | "
        self._thread = threading.Thread(target=self._copy, name=f"relay-{name}", daemon=True)
        self._thread.start()

    def finish(self, timeout_seconds: float) -> None:
        """Wait for the last lines of a child that has ended."""
        self._thread.join(timeout_seconds)

    def _copy(self) -> None:
        with self._pipe:
            while line := self._pipe.readline(_LONGEST_LINE):
                text = line.decode(errors="replace").rstrip("\r\n")
                self.tail.append(text)
                _write(self._as_json(text) if self._json else self._prefix + text)

    def _as_json(self, text: str) -> str:
        """A line of tba itself as it is, for it names its GPU; any other becomes the field `line`."""
        if text.startswith("{"):
            try:
                if isinstance(json.loads(text), dict):
                    return text
            except ValueError:
                pass
        return json.dumps({"level": "info", "gpu": self._name, "event": "output", "line": text})


def _write(line: str) -> None:
    data = f"{line}\n".encode(errors="replace")
    with _writing:
        try:
            while data:  # a pipe may take a part of it
                data = data[os.write(sys.stderr.fileno(), data) :]
        except OSError:
            return  # nobody reads any more; the child must not block on its output for that
