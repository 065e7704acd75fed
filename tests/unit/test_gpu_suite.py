"""tests/gpu where there is no GPU: it is collected, skips with reasons, and writes its report."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tba.tests.conftest import ROOT
from tba.tests.gpu.report import ReportWriter


def run_suite(report, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-p", "no:cacheprovider", "-q", *arguments]
    env = os.environ | {"GPU_REPORT": str(report)} | environment
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.slow
def test_without_a_gpu_every_test_is_skipped_with_a_reason_and_reported(tmp_path):
    done = run_suite(tmp_path / "out/report", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "out/report.json").read_text())
    reasons = {item["name"].partition("::")[0]: item["reason"] for item in found["items"]}
    files = {path.name for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert {item["outcome"] for item in found["items"]} == {"skipped"}
    assert all("GPU" in reason or "vLLM is not installed" in reason for reason in reasons.values())
    assert reasons["test_training.py"] == "it needs 1 GPU, and this machine has no GPU"
    assert reasons["test_sharding.py"] == "it needs 2 GPUs, and this machine has no GPU"
    # Without vLLM, whole files are skipped at collection.
    assert reasons.keys() <= files
    assert "torch" in found["versions"]
    assert (tmp_path / "out/report.md").read_text().startswith("# Tests on GPUs\n\n0 passed, 0 failed, ")


def result(name: str, when: Any, outcome: Any, longrepr=None, **figures) -> pytest.TestReport:
    nodeid, location = f"tests/gpu/{name}", ("file", 1, name)
    return pytest.TestReport(
        nodeid, location, {}, outcome, longrepr, when, duration=1.5, user_properties=list(figures.items())
    )


def test_a_test_has_the_outcome_of_its_worst_phase_and_keeps_its_figures(tmp_path):
    writer = ReportWriter(tmp_path / "report")
    for name in ("good", "bad"):
        writer.pytest_runtest_logreport(result(name, "setup", "passed"))
    writer.pytest_runtest_logreport(result("good", "call", "passed", mfu=0.4321987))
    writer.pytest_runtest_logreport(result("bad", "call", "failed", "assert 1 | 2", rate=3))
    writer.pytest_runtest_logreport(result("bad", "teardown", "passed"))
    writer.pytest_runtest_logreport(result("none", "setup", "skipped", ("f", 1, "Skipped: it needs 2 GPUs")))
    writer.pytest_sessionfinish()
    items = json.loads((tmp_path / "report.json").read_text())["items"]
    assert [(item["name"], item["outcome"], item["reason"], item["seconds"]) for item in items] == [
        ("good", "passed", "", 3.0), ("bad", "failed", "assert 1 | 2", 4.5),
        ("none", "skipped", "it needs 2 GPUs", 1.5),
    ]  # fmt: skip
    text = (tmp_path / "report.md").read_text()
    assert "1 passed, 1 failed, 1 skipped." in text
    assert "| mfu | 0.4322 |" in text
    assert "| bad | failed | 4 | assert 1 \\| 2 |" in text
