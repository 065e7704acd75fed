"""Copies the output of children to standard error in whole lines, each marked with the name of its child."""

import contextlib
import json
import os
import sys
import threading
from collections import deque
from typing import IO

from tba.common.log import json_wanted
from tba.common.system.background import Background

# ANSI codes of the name's colour.
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
# Longer lines are cut into pieces of this size, so that memory stays bounded.
_MAX_LINE_BYTES = 64 << 10
TAIL_LINES = 15
# Held while a line is written, so that lines of several children never mix.
_writing = threading.Lock()


class Relay:
    """Reads one child's output on a thread until every process that can write to it has ended.

    It has a thread of its own because a terminal that is paused (Ctrl-S) blocks the process that writes to it: the
    supervisor's loop must keep running.
    """

    def __init__(self, pipe: IO[bytes], name: str, number: int) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._pipe = pipe
        self._name = name
        self._json = json_wanted()
        colour = _COLOURS[number % len(_COLOURS)] if sys.stderr.isatty() else None
        self._prefix = f"\033[{colour}m{name} |\033[0m " if colour else f"{name} | "
        self._thread = Background(f"relay-{name}", self._copy)
        self._thread.start()

    def finish(self, timeout_seconds: float) -> None:
        """Wait for the last lines of a child that has ended."""
        self._thread.join(timeout_seconds)

    def _copy(self) -> None:
        with self._pipe:
            while line := self._pipe.readline(_MAX_LINE_BYTES):
                text = line.decode(errors="replace").rstrip("\r\n")
                self.tail.append(text)
                _write(self._as_json(text) if self._json else self._prefix + text)

    def _as_json(self, text: str) -> str:
        """Return a JSON line of tba unchanged, since it names its GPU; other output becomes the field `line`."""
        if text.startswith("{"):
            with contextlib.suppress(ValueError):
                json.loads(text)
                return text
        return json.dumps({"level": "info", "gpu": self._name, "event": "output", "line": text})


def _write(line: str) -> None:
    data = f"{line}\n".encode(errors="replace")
    with _writing:
        try:
            # A pipe may accept only a part.
            while data:
                data = data[os.write(sys.stderr.fileno(), data) :]
        except OSError:
            # The reader is gone. Lines are dropped, so that children never block on their output.
            return
