"""A file of lines that a full disk does not tear: each line is there whole and in its turn, or waits in memory."""

import os
import threading
from collections import deque
from pathlib import Path

from tba.common.log import get_logger

log = get_logger(__name__)

# Of about 2 KB each. A disk that has refused so many steps has refused their checkpoints too.
_MOST_WAITING = 10_000


class LineFile:
    """Appends; may be used from several threads. `waiting` lines are not written yet, `lost` ones never will be.

    The first refusal of a row is logged, and the next `append` or `sync` tries all again. Beyond a limit the oldest
    lines are lost, and counted.
    """

    def __init__(self, path: Path) -> None:
        self.lost = 0
        self._path = path
        # Unbuffered: what a buffer still held after an error, and how much of it was written, would be anybody's guess.
        self._file = path.open("ab", buffering=0)
        self._end = self._file.tell()  # of the last whole line
        self._torn = False
        self._waiting: deque[bytes] = deque()
        self._refused = False
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Lines that are not written yet."""
        return len(self._waiting)

    def append(self, line: str) -> None:
        """Add a line, without its newline. It is with the system when this returns, unless the system refuses."""
        with self._lock:
            self._waiting.append(line.encode() + b"\n")
            try:
                self._write()
            except OSError as error:
                self._refuse(error)

    def sync(self) -> None:
        """Have all lines on disk that were added before. Raises OSError."""
        with self._lock:
            self._write()
        # Not under the lock: `append` must not wait for the disk.
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Try once more what waits, and close the file. No `sync` may be under way."""
        with self._lock:
            try:
                self._write()
            except OSError as error:
                self.lost += len(self._waiting)
                log.warning("lines were never written", path=self._path, lines=self.lost, reason=str(error))
            self._file.close()

    def _write(self) -> None:
        if self._torn:
            self._file.truncate(self._end)
            self._torn = False
        while self._waiting:
            rest = memoryview(self._waiting[0])
            while rest:
                self._torn = True
                rest = rest[self._file.write(rest) or 0 :]
            self._torn = False
            self._end += len(self._waiting.popleft())
        if self._refused:
            log.info("all lines are written that had to wait", path=self._path, lost=self.lost)
            self._refused = False

    def _refuse(self, error: OSError) -> None:
        if not self._refused:
            log.warning("lines wait in memory", path=self._path, reason=str(error))
        self._refused = True
        if len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft()
            self.lost += 1
