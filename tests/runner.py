"""Hooks of the test run, loaded by `-p tba.tests.runner` in pyproject.toml.

Sizes: tests whose full form takes minutes run at a smaller size, and in full where TEST_FULL_SIZE is set
(`make test-all`). Ctrl-C: the run ends within seconds and leaves no process behind.
"""

import os
import threading
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import psutil
import pytest

FULL_SIZE = bool(os.environ.get("TEST_FULL_SIZE"))
TESTS = Path(__file__).resolve().parent
_GRACE_SECONDS = 5.0

T = TypeVar("T")


def size(small: T, full: T) -> T:
    """`full` under `make test-all`, else `small`."""
    return full if FULL_SIZE else small


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by folder and by what their module imports, so that no test has to repeat it."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if folder in {"vllm", "gpu"}:
            item.add_marker(folder)
            # vLLM and its libraries warn of each other; of ours every warning stays an error.
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.filterwarnings(r"error:::tba\b"))
        if folder in {"vllm", "gpu", "process"}:
            item.add_marker("slow")
        if isinstance(module := getattr(item, "module", None), ModuleType) and hasattr(module, "torch"):
            item.add_marker("torch")


def pytest_keyboard_interrupt() -> None:
    """End the run after a grace period, even if a fixture or a thread of a library blocks the way out.

    Fixtures get the grace period to end what they started. A daemon thread, because the main thread may be the one
    that hangs.
    """
    threading.Thread(target=_end_soon, name="interrupted", daemon=True).start()


def _end_soon() -> None:
    threading.Event().wait(_GRACE_SECONDS)
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    os._exit(130)
