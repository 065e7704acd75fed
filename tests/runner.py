"""Hooks of the test run, loaded by `-p tba.tests.runner` in pyproject.toml.

Sizes: tests whose full form takes minutes run at a smaller size, and in full where TEST_FULL_SIZE is set
(`make test-all`). Order: files with the longest tests first, so that workers end together. Ctrl-C: the run prints what
has failed so far, ends within seconds and leaves no process behind. A crash of a worker fails one test.
"""

import functools
import gc
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import psutil
import pytest

FULL_SIZE = bool(os.environ.get("TEST_FULL_SIZE"))
TESTS = Path(__file__).resolve().parent
_GRACE_SECONDS = 5.0
# Folders by the length of their tests; those that are not named come last.
_LONGEST_FIRST = ("process", "vllm", "unit/trainer", "unit/searcher")

T = TypeVar("T")
_failed: list[str] = []

# Container images often set PYTHONDONTWRITEBYTECODE. Each of the hundreds of processes that tests start would then
# compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Servers refuse keys that a group may write to, which is what 002 permits, the mask of users on many distributions.
# `tba` sets a mask of its own; the functions that tests call do not.
os.umask(0o022)
# Tests bind sockets in directories of their own, and the path of a socket has at most 107 bytes (unix(7)), of which
# pytest's folders and the name take up to 85.
if len(os.fsencode(tempfile.gettempdir())) > 22:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/tmp")
# A shell script starts background commands with SIGINT ignored, and nohup ignores SIGHUP. Processes that tests start
# would inherit that; a signal with a handler they get as usual.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


def size(small: T, full: T) -> T:
    """`full` under `make test-all`, else `small`."""
    return full if FULL_SIZE else small


def slow(*values: object) -> list[Any]:
    """Return values of a parameter that `make quick` leaves out."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what tests import out of garbage collections: with torch, a full one takes 0.3 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order tests; mark them by folder and by what their module imports, so that no test has to repeat it."""
    items.sort(key=lambda item: _place(item.path))
    for item in items:
        folder = _folder(item.path)
        if folder in {"vllm", "gpu"}:
            item.add_marker(folder)
            # vLLM and its libraries warn of each other; of ours every warning stays an error.
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.filterwarnings(r"error:::tba\b"))
        if folder in {"vllm", "gpu", "process", "fleet"}:
            item.add_marker("slow")
        if isinstance(module := getattr(item, "module", None), ModuleType) and hasattr(module, "torch"):
            item.add_marker("torch")


@functools.cache
def _folder(path: Path) -> str:
    return path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""


@functools.cache
def _place(path: Path) -> int:
    folders = [n for n, folder in enumerate(_LONGEST_FIRST) if path.is_relative_to(TESTS / folder)]
    return folders[0] if folders else len(_LONGEST_FIRST)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember failures for `pytest_keyboard_interrupt`, where the results of all workers arrive."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        _failed.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the exit status, which make replaces by its own, to pytest's cache: .ci/run reads it."""
    cache = getattr(session.config, "cache", None)
    if "PYTEST_XDIST_WORKER" not in os.environ and cache is not None:
        cache.set("tba/status", int(exitstatus))


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, sched: Any) -> None:
    """Count the test of a crashed worker as failed, and hand out what that worker had left.

    xdist's loadfile would repeat that test on each new worker, and hand out the files that the worker had finished as
    empty lists, after which the others wait for a next test without end.
    """
    for unit in sched.workqueue.values():
        unit.update(dict.fromkeys(unit.keys() & {crashitem}, True))
    for scope in [scope for scope, unit in sched.workqueue.items() if all(unit.values())]:
        del sched.workqueue[scope]
    if not hasattr(sched, "tba_reschedule"):
        sched.tba_reschedule, sched._reschedule = sched._reschedule, functools.partial(_reschedule, sched)
    for node in sched.assigned_work:
        sched._reschedule(node)


def _reschedule(sched: Any, node: Any) -> None:
    """Give a worker files until it has two tests: it runs one when it knows the next, or that there is none."""
    while sched.workqueue and not node.shutting_down and sched._pending_of(sched.assigned_work[node]) < 2:
        sched._assign_work_unit(node)
    sched.tba_reschedule(node)


def pytest_keyboard_interrupt() -> None:
    """Print what has failed so far, and end the run after a grace period, even if something blocks the way out.

    Fixtures get the grace period to end what they started. A daemon thread, because the main thread may be the one
    that hangs, in a fixture or in a library.
    """
    # pytest has replaced sys.stderr, and its own summary may come after the grace period.
    print(*(f"\nfailed so far: {name}" for name in _failed), file=sys.__stderr__, flush=True)
    threading.Thread(target=_end_soon, name="interrupted", daemon=True).start()


def _end_soon() -> None:
    threading.Event().wait(_GRACE_SECONDS)
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    os._exit(130)
