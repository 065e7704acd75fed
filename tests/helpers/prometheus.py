"""What deploy/prometheus asks for, and promtool."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "deploy/prometheus"


def alerts() -> list[tuple[str, str]]:
    """Return (name, PromQL) of each alert; an expression is one line."""
    return re.findall(r"- alert: (\w+)\n +expr: (.+)\n", (FOLDER / "alerts.yml").read_text())


def expressions() -> dict[str, str]:
    """Return the PromQL of all panels and alerts by title."""
    return {**dict(alerts()), **panels()}


def panels() -> dict[str, str]:
    """Return the PromQL of the panels by title and query."""
    found = {}
    for panel in json.loads((FOLDER / "dashboard.json").read_text())["panels"]:
        for target in panel.get("targets", []):
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    return found


def names_in(text: str) -> set[str]:
    """Return the names of metrics of tba, and of its processes, in a text."""
    return set(re.findall(r"\b(?:tba|process)_[a-z0-9_]+", text))


def promtool(*arguments: object, stdin: str = "") -> str:
    """Run promtool and return its output; it must succeed. Skips the test where it is not installed."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian: apt install prometheus)")
    done = subprocess.run([program, *map(str, arguments)], input=stdin, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output
