"""The directory of a run belongs to one `tba run` at a time.

Who holds it says in the lock file who it is, and when it begins to end: the next one then waits for it.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tba.common.config import Config
from tba.common.durable import exclusive_lock
from tba.common.errors import AddressInUse, ConfigError, LockTaken, RunTaken
from tba.common.log import get_logger
from tba.common.probe import check_address
from tba.deploy.picture import METRICS_FILE

log = get_logger(__name__)

_LOCK_FILE = "launcher.lock"
_ENDING = "ending"
# What a launcher needs beside the time of its children, which it ends in three groups, one after another.
_MARGIN_SECONDS = 10.0
_POLL_SECONDS = 0.1


def holds_run(config: Config) -> bool:
    """Whether steps were trained there. The trainer makes the file: an attempt that failed before is no run."""
    metrics = config.run.dir / METRICS_FILE
    return metrics.exists() and metrics.stat().st_size > 0


@contextlib.contextmanager
def sole_launcher(config: Config) -> Iterator[None]:
    """Hold the run's directory while the block runs, after a look at the buffer's address.

    Raises RunTaken if another `tba run` has it; AddressInUse, and then leaves no directory that was not there.
    """
    directory = config.run.dir
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    lock_file = directory / _LOCK_FILE
    with _lock(lock_file):
        _tell(lock_file, "w", f"pid {os.getpid()} on {socket.gethostname()}")
        try:
            check_address(config.buffer.address)
        except (AddressInUse, ConfigError):
            if made:
                _remove_unused(lock_file, made)
            raise
        yield


def tell_ending(config: Config) -> None:
    """Let whoever wants the directory know that its holder, this process, is about to end."""
    _tell(config.run.dir / _LOCK_FILE, "a", _ENDING)


def await_former(config: Config, stop: Callable[[], bool], say: Callable[[str], None]) -> None:
    """Return when no `tba run` has the directory, or `stop()`; one that is about to end is waited for, and told once.

    Raises RunTaken if there is one that goes on, or that has not ended after the time that all its
    children may take, and some more.
    """
    path = config.run.dir / _LOCK_FILE
    patience = 3 * config.launch.drain_seconds + _MARGIN_SECONDS
    deadline = 0.0
    while os.path.exists(path) and not stop():  # Path's raises where this user may not look; that is told later
        try:
            with _lock(path):
                return
        except RunTaken:
            holder, ending = _holder(path)
            if not ending:
                raise
        if not deadline:
            deadline = time.monotonic() + patience
            say(f"the former `tba run` ({holder}) is still ending: waiting for it, {patience:.0f} s at most")
        elif time.monotonic() > deadline:
            raise RunTaken(
                f"the former `tba run` of {config.run.dir} ({holder}) has not ended within {patience:.0f} s: "
                "try again later, or end it"
            )
        time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(exclusive_lock(path, ""))
        except LockTaken:
            raise RunTaken(
                f"{path.parent} is being run already by another `tba run` ({_holder(path)[0]}): stop it first, or wait "
                "for its end"
            ) from None
        yield


def _tell(path: Path, mode: str, line: str) -> None:
    """For whoever comes next. A full disk must not keep this process from its work, least of all from its end."""
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(f"{line}\n")
    except OSError as error:
        log.warning("the lock file cannot be written", path=path, reason=str(error))


def _holder(path: Path) -> tuple[str, bool]:
    """Who holds the lock, for people, and whether it is about to end."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        lines = []
    return (lines[0] if lines else "one that has just started"), _ENDING in lines


def _remove_unused(lock_file: Path, made: Sequence[Path]) -> None:
    """Remove the lock file and the directories that were made for it, the innermost first."""
    lock_file.unlink()
    with contextlib.suppress(OSError):  # something else has come into it
        for folder in made:
            folder.rmdir()
