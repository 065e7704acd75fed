"""Structured logs: text for people on a terminal, JSON lines for machines and journals.

A call has a stable event name and fields: `log.info("snapshot loaded", version=7, seconds=0.2)`.
"""

import json
import logging
import math
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

_LEVEL_COLOURS = {"WARNING": "\033[33m", "ERROR": "\033[31m", "CRITICAL": "\033[31m"}
# Within this time an equal warning is counted. The number of different ones that are remembered is limited.
_EQUAL_SECONDS = 60.0
_EQUAL_KEPT = 1000
# They differ from one response to the next.
_NOT_COMPARED = ("prompt", "error")


class FieldLogger:
    """A logger whose calls accept fields as keywords."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, **fields: Any) -> None:
        self._logger.debug(event, extra={"fields": fields})

    def info(self, event: str, **fields: Any) -> None:
        self._logger.info(event, extra={"fields": fields})

    def warning(self, event: str, **fields: Any) -> None:
        self._logger.warning(event, extra={"fields": fields})

    def error(self, event: str, **fields: Any) -> None:
        self._logger.error(event, extra={"fields": fields})

    def exception(self, event: str, **fields: Any) -> None:
        """Log an error with the traceback of the exception being handled."""
        self._logger.error(event, extra={"fields": fields}, exc_info=True)


def get_logger(name: str) -> FieldLogger:
    return FieldLogger(logging.getLogger(name))


def json_wanted() -> bool:
    """Return whether logs are JSON lines: under systemd, or with TBA_LOG=json."""
    return "JOURNAL_STREAM" in os.environ or os.environ.get("TBA_LOG") == "json"


def configure(role: str, *, level: str = "INFO", gpu: str = "") -> None:
    """Send the logs of this process to standard error, as text or as JSON lines.

    `gpu` is the device of a searcher, a field of each JSON line. In text the role includes it.
    """
    handler = _StderrHandler()
    handler.setFormatter(
        JsonFormatter(role, gpu=gpu) if json_wanted() else TextFormatter(role, colour=sys.stderr.isatty())
    )
    root = logging.getLogger("tba")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False
    if json_wanted():
        threading.excepthook = _log_failed_thread


def _log_failed_thread(failed: threading.ExceptHookArgs) -> None:
    """Log that a thread of a library has ended, as one line: a traceback is 30 lines of a journal."""
    if failed.exc_type is SystemExit:
        return
    thread, error = failed.thread.name if failed.thread else "", f"{failed.exc_type.__name__}: {failed.exc_value}"
    fields = {"thread": thread, "error": error}
    logging.getLogger(__name__).error("a thread has failed", extra={"fields": fields}, exc_info=failed.exc_value)


class DuplicateFilter:
    """Counts equal warnings of any logger instead of repeating them: within a minute only the first one is written.

    Warnings are equal if their event and all their fields are, except numbers, `prompt` and `error`; of those with a
    field `by`, which a peer causes, if that is. The first one after the minute has their number as `repeated`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # A filter runs before the lock of its handler is taken.
        self._lock = threading.Lock()
        # When each was last written, and how many were left out since. The oldest first.
        self._written: OrderedDict[tuple[object, ...], tuple[float, int]] = OrderedDict()

    def keep(self, record: logging.LogRecord) -> bool:
        """Return whether a record is to be written; adds `repeated` to its fields."""
        if record.levelno != logging.WARNING:
            return True
        fields = _fields(record)
        texts = [(name, str(value)) for name, value in fields.items() if not isinstance(value, int | float)]
        compared = [("by", fields["by"])] if "by" in fields else [one for one in texts if one[0] not in _NOT_COMPARED]
        key, now = (record.name, record.getMessage(), *compared), self._clock()
        with self._lock:
            written_at, left_out = self._written.get(key, (-math.inf, 0))
            if now - written_at < _EQUAL_SECONDS:
                self._written[key] = written_at, left_out + 1
                return False
            self._written[key] = now, 0
            self._written.move_to_end(key)
            if len(self._written) > _EQUAL_KEPT:
                self._written.popitem(last=False)
        if left_out:
            record.__dict__["fields"] = {**fields, "repeated": left_out}
        return True


class _StderrHandler(logging.Handler):
    """Writes to the current `sys.stderr`, which a live display replaces while it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(DuplicateFilter().keep)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except OSError:
            self.handleError(record)


class TextFormatter(logging.Formatter):
    """Formats a record as `12:30:01 search0 snapshot loaded version=7 seconds=0.2`."""

    def __init__(self, role: str, *, colour: bool) -> None:
        super().__init__()
        self._role = role
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{key}={_short(value)}" for key, value in _fields(record).items())
        event = record.getMessage() if record.levelno < logging.WARNING else f"{record.levelname} {record.getMessage()}"
        if self._colour and record.levelname in _LEVEL_COLOURS:
            event = f"{_LEVEL_COLOURS[record.levelname]}{event}\033[0m"
        line = " ".join(filter(None, (self.formatTime(record, "%H:%M:%S"), self._role, event, fields)))
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    def __init__(self, role: str, *, gpu: str) -> None:
        super().__init__()
        self._role = role
        self._gpu = {"gpu": gpu} if gpu else {}

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "role": self._role,
            "pid": record.process,
            **self._gpu,
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


def _short(value: Any) -> str:
    """Format the value of a field.

    A name from the network must not send escape sequences to the terminal of a reader of the log, nor forge a line.
    """
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text)
    return f'"{text}"' if " " in text else text
