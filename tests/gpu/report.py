"""The report of `make test-gpu`: machine, versions, and what each test found, as JSON and as Markdown."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tba.common.errors import UsageError
from tba.common.system.devices import ask_nvidia_smi, find_driver
from tba.common.system.process import software


@dataclass
class Item:
    """One test: its outcome is passed, failed or skipped; `figures` are what it recorded by `record_property`."""

    name: str
    outcome: str = "passed"
    seconds: float = 0.0
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


class ReportWriter:
    """A plugin of pytest that collects the results of tests/gpu and writes them at the end of the session."""

    def __init__(self, path: Path) -> None:
        """`path` has no suffix: .json and .md are appended."""
        self._path = path
        self._items: dict[str, Item] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a phase of a test: any phase may fail or skip it."""
        if "tests/gpu/" not in report.nodeid:
            return
        name = report.nodeid.rpartition("tests/gpu/")[2]
        item = self._items.setdefault(name, Item(name))
        item.seconds += report.duration
        item.figures |= dict(report.user_properties)
        if report.failed or (report.skipped and item.outcome == "passed"):
            item.outcome, item.reason = report.outcome, _reason(report)

    def pytest_sessionfinish(self) -> None:
        """Write both files. Nothing is written if no test of the folder ran, as under `--collect-only`."""
        if self._items:
            write(self._path, machine(), software(), list(self._items.values()))


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr)[:2000]


def machine() -> dict[str, Any]:
    """Return GPUs, driver, cores and memory; without a driver there are no GPUs."""
    found: dict[str, Any] = {"cores": os.cpu_count(), "memory_gib": round(psutil.virtual_memory().total / 2**30)}
    try:
        driver = find_driver()
        rows = ask_nvidia_smi("--query-gpu=name,memory.total", "--format=csv,noheader") or ""
        topology = ask_nvidia_smi("topo", "-m") if driver else None
    except UsageError as error:
        return found | {"gpus": [], "driver": str(error)}
    if driver is not None:
        found["driver"] = f"{driver.version}, CUDA {driver.release or 'unknown'}"
    return found | {"gpus": rows.splitlines(), "topology": topology or ""}


def write(path: Path, node: dict[str, Any], versions: dict[str, str], items: Sequence[Item]) -> None:
    """Write PATH.json and PATH.md."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": node, "versions": versions, "items": [asdict(item) for item in items]}
    path.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(as_markdown(node, versions, items), encoding="utf-8")


def as_markdown(node: dict[str, Any], versions: dict[str, str], items: Sequence[Item]) -> str:
    """Return the report for people: a table of tests, then the figures of each."""
    counts = ", ".join(
        f"{sum(item.outcome == kind for item in items)} {kind}" for kind in ("passed", "failed", "skipped")
    )
    lines = ["# Tests on GPUs", "", f"{counts}.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in (node | versions).items() if name != "topology"]
    lines += ["", "| test | result | seconds | reason |", "|---|---|---|---|"]
    lines += [f"| {item.name} | {item.outcome} | {item.seconds:.0f} | {_cell(item.reason)} |" for item in items]
    for item in items:
        if item.figures:
            lines += ["", f"## {item.name}", "", "| figure | value |", "|---|---|"]
            lines += [f"| {name} | {_cell(value)} |" for name, value in item.figures.items()]
    if node.get("topology"):
        lines += ["", "## nvidia-smi topo -m", "", "```", node["topology"].rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else "; ".join(value) if isinstance(value, list) else str(value)
    return " ".join(text.split()).replace("|", "\\|")
