"""Tests on GPUs: `make test-gpu`, about one hour, on a machine with one, two or eight of them.

A test that needs more GPUs than there are is skipped, and says so. With GPU_REPORT=PATH the results, with all figures
that tests recorded, are in PATH.json and PATH.md (`tba.tests.gpu.report`).
"""

import os
from pathlib import Path

import pytest

from tba.common.errors import UsageError, quantity
from tba.common.system.devices import Gpu, list_gpus
from tba.tests.gpu.report import ReportWriter

FOLDER = Path(__file__).parent


def _present() -> tuple[list[Gpu], str]:
    """Return the GPUs, and in words what this machine has."""
    try:
        gpus = list_gpus()
    except UsageError as error:
        return [], str(error)
    return gpus, f"this machine has {quantity(len(gpus), 'GPU') if gpus else 'no GPU'}"


def pytest_configure(config: pytest.Config) -> None:
    """Write a report if one is wanted."""
    if path := os.environ.get("GPU_REPORT"):
        config.pluginmanager.register(ReportWriter(Path(path)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs more GPUs than there are: `@pytest.mark.gpus(2)`; without the marker, one."""
    gpus, words = _present()
    for item in items:
        if item.path.is_relative_to(FOLDER):
            marker = item.get_closest_marker("gpus")
            needed = marker.args[0] if marker else 1
            if len(gpus) < needed:
                item.add_marker(pytest.mark.skip(reason=f"it needs {quantity(needed, 'GPU')}, and {words}"))


@pytest.fixture(scope="session")
def gpus() -> list[Gpu]:
    """The GPUs of this machine."""
    return _present()[0]
