"""Every error that tba raises on purpose.

    TbaError                 exit 1
    ├── ConfigError          exit 78  a value, a file or an address in the configuration is wrong
    │   ├── MissingExtra     exit 78  an optional dependency is not installed
    │   └── LockTaken        exit 78  another process has what can be had once
    ├── UsageError           exit 2   the command line asks for something that cannot be
    ├── DeviceBusy                    a GPU has not enough free memory
    ├── AddressInUse                  another program listens at an address
    ├── RunTaken                      another `tba run` has the directory of the run
    ├── WireError                     a message is malformed
    │   ├── VersionMismatch           the peer speaks another protocol version
    │   └── Oversize                  a frame or a field is over its limit
    ├── BufferFault                   the buffer answered with an error
    │   ├── BufferUnavailable         no answer within the deadline
    │   └── Refused                   the buffer understood and said no; `code` says why
    ├── StorageError                  the database could not be written or read
    │   ├── SyncFailed                the disk may have lost what it was given: nothing may go on
    │   └── RecordLost                a record of a spool is damaged or gone
    ├── SnapshotError                 a snapshot is missing, torn or of the wrong shape
    │   ├── SnapshotCorrupt           a hash does not match its manifest
    │   │   └── DamagedInUse          and it cannot be replaced yet, since a searcher serves it
    │   ├── SnapshotOutdated          a newer one is wanted by now
    │   └── CanaryMismatch            the engine does not give the trainer's log-probabilities
    ├── CheckpointError               no usable checkpoint
    │   └── CheckpointMismatch  78    it is of other settings than those of the configuration
    ├── RankLost             exit 69  another process of the same trainer has ended
    ├── TrainingBroken       exit 70  too many steps in a row with a loss or gradient that is not finite
    ├── EngineError                   the generation engine failed
    │   └── EngineFaulty              it cannot be trusted any more: the process has to start again
    ├── MemoryShort                   there was not enough memory to load a model, or for a step of training
    ├── WorkerLost                    a worker process ended before it was ready, as where memory is short
    └── TaskError            exit 78  a task's data is missing or malformed

Exit codes follow sysexits where one fits: systemd is told not to restart on 70 and 78. A run that Ctrl-C has stopped
before its end is 130, as shells have it, so that what is chained to it does not go on; the roles drain and exit 0.
"""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_LOST = 69
EXIT_BROKEN = 70
EXIT_CONFIG = 78
EXIT_INTERRUPTED = 130


class TbaError(Exception):
    """Root of the tree. The message is one sentence: what was wrong, where, and what to do."""

    exit_code = EXIT_FAILED


def first_line(error: BaseException) -> str:
    """What an error of another library says, short enough for a sentence of ours."""
    return (str(error) or type(error).__name__).splitlines()[0]


class ConfigError(TbaError):
    """A value, a file or an address in the configuration is wrong."""

    exit_code = EXIT_CONFIG


class MissingExtra(ConfigError):
    """An optional dependency is not installed."""

    def __init__(self, module: str, extra: str) -> None:
        # Where tba is installed, pip takes this for its extra alone, and fetches no other package of that name.
        command = f"pip install 'tba[{extra}]'"
        super().__init__(
            f"{module} is not installed: install tba with the extra {extra}, by {command}; see docs/install.md"
        )


class LockTaken(ConfigError):
    """Another process holds the lock of a database or a directory."""


class UsageError(TbaError):
    """The command line asks for something that cannot be done."""

    exit_code = EXIT_USAGE


class DeviceBusy(TbaError):
    """A GPU has not enough free memory for an engine. Passes by itself, so that systemd tries again."""


class AddressInUse(TbaError):
    """Another program listens at an address. Passes by itself, as when an old process ends, so systemd tries again."""


class RunTaken(TbaError):
    """Another `tba run` has the directory of the run. Passes by itself, when that one ends, so systemd tries again."""


class WireError(TbaError):
    """A message is malformed."""

    code = "malformed"


class VersionMismatch(WireError):
    """The peer speaks another protocol version."""

    code = "version"


class Oversize(WireError):
    """A frame or a field is over its limit."""

    code = "oversize"


class BufferFault(TbaError):
    """The buffer did not do what it was asked."""


class BufferUnavailable(BufferFault):
    """No answer from the buffer within the deadline."""


class Refused(BufferFault):
    """The buffer understood the request and refused it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        if code in ("wrong_run", "other_prompts", "too_few_prompts", "trainer_exists"):
            self.exit_code = EXIT_CONFIG


class StorageError(TbaError):
    """The database could not be written or read."""

    code = "storage"


class SyncFailed(StorageError):
    """The disk may have lost what it was given before. To sync again would not help, and would say that it is there."""


class RecordLost(StorageError):
    """A record of a spool is damaged or gone: to read it again would not help."""


class SnapshotError(TbaError):
    """A snapshot is missing, torn or of the wrong shape."""


class SnapshotCorrupt(SnapshotError):
    """A file does not hash to what its manifest says."""


class DamagedInUse(SnapshotCorrupt):
    """A damaged snapshot of a node cannot be replaced yet, since a searcher serves it."""


class SnapshotOutdated(SnapshotError):
    """There was nothing to do for a snapshot but wait, and meanwhile a newer one is wanted."""


class CanaryMismatch(SnapshotError):
    """After loading a snapshot, the engine's log-probabilities differ from the trainer's."""


class CheckpointError(TbaError):
    """No usable checkpoint."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint of other settings than those of the configuration."""

    exit_code = EXIT_CONFIG


class RankLost(TbaError):
    """Another process of the same trainer has ended: this one is not the culprit."""

    exit_code = EXIT_LOST


class TrainingBroken(TbaError):
    """Too many steps in a row gave a loss or a gradient that is not finite. A checkpoint is saved."""

    exit_code = EXIT_BROKEN


class EngineError(TbaError):
    """The generation engine failed."""


class EngineFaulty(EngineError):
    """The generation engine cannot be trusted any more: the process has to end and start again."""


class MemoryShort(TbaError):
    """There was not enough memory to load a model, or for a step. May pass by itself: others give theirs back."""


class WorkerLost(TbaError):
    """A worker process ended before it was ready. It may pass by itself, as a lack of memory does."""


class TaskError(TbaError):
    """The data of a task is missing or malformed."""

    exit_code = EXIT_CONFIG
