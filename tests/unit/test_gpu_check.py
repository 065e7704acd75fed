"""`make gpu-check` without its stages, and tests/gpu where there is no GPU."""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tba.tests.conftest import ROOT
from tba.tests.gpu.report import ReportWriter

PAGE = ROOT / "docs/gpu.md"


@pytest.fixture
def gpu_check(monkeypatch) -> Any:
    """The modules of the benchmark, which is no part of the installed package."""
    monkeypatch.syspath_prepend(str(ROOT))
    names = ("__main__", "findings")
    found = {name.strip("_"): importlib.import_module(f"benchmarks.gpu_check.{name}") for name in names}
    return SimpleNamespace(**found, package=importlib.import_module("benchmarks.gpu_check"))


@pytest.fixture
def run(gpu_check, tmp_path, monkeypatch):
    """A function that runs stages of these functions. Returns the report."""

    def run_all(**functions: Any) -> Any:
        monkeypatch.setitem(sys.modules, "benchmarks.gpu_check.stages_of_a_test", SimpleNamespace(**functions))
        options = argparse.Namespace(work=tmp_path, tiny=False, device="cpu", method="fork")
        report = gpu_check.findings.Report(tmp_path / "out", {"card": "none"})
        for name in functions:
            stage = gpu_check.package.Stage(name, "stages_of_a_test", 1.0 if name == "hangs" else 60.0, 0.5)
            gpu_check.main.run(stage, options, report, time.monotonic() + 100)
        return report

    return run_all


def agrees(findings: Any, _: object) -> None:
    findings.relative("sum", 100.4, 100.0, 0.01)


def differs(findings: Any, _: object) -> None:
    findings.check("equal", 1, 1)
    findings.check("near", 1.0, 1.2, 0.1)
    findings.check("not a number", float("nan"), float("nan"), 0.1)
    findings.at_most("peak", 5.0, 4.0)


def test_a_stage_passes_if_it_compared_something_and_all_of_it_is_within_its_limit(run, gpu_check):
    def skips(*_: object) -> None:
        raise gpu_check.findings.Skip("no room")

    report = run(agrees=agrees, differs=differs, notes=lambda findings, _: findings.note("speed", 3), skips=skips)
    assert {name: stage.result for name, stage in report.stages.items()} == {
        "agrees": "passed", "differs": "FAILED: 3 of 4 comparisons", "notes": "FAILED: nothing compared",
        "skips": "skipped: no room",
    }  # fmt: skip
    lines = (report.folder / "report.md").read_text().splitlines()
    assert "| sum | 100.4 | 100.0 | 1.0 |  |" in lines
    assert [line.split("|")[1].strip() for line in lines if "**FAILED**" in line] == [
        "near", "not a number", "peak, beyond 4",
    ]  # fmt: skip


def hangs(findings: Any, _: object) -> None:
    findings.check("before it", 1, 1)
    time.sleep(1000)


def raises(findings: Any, _: object) -> None:
    agrees(findings, _)
    raise ValueError("a wrong\nvalue")


@pytest.mark.slow
def test_a_stage_that_hangs_or_raises_is_ended_and_the_rest_go_on(run):
    report = run(hangs=hangs, raises=raises, dies=lambda *_: sys.exit(7), agrees=agrees)
    assert {name: stage.result for name, stage in report.stages.items()} == {
        "hangs": "FAILED: time limit",
        "raises": "FAILED: ValueError: a wrong value",
        "dies": "FAILED: exit code 7",
        "agrees": "passed",
    }
    assert [name for name, _ in report.stages["hangs"].checks] == ["before it"]
    assert "ValueError: a wrong" in (report.folder / "log.txt").read_text()


def checks_of_the_page() -> set[str]:
    """What the page names as the check of a claim: `gpu-check STAGE`, or a test of tests/gpu."""
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {name for cells in rows if len(cells) == 7 for name in re.findall(r"`([^`]+)`", cells[3])}


def test_the_page_of_gpus_has_each_stage_and_each_test_and_no_other_check(gpu_check):
    tests = {
        f"tests/gpu/{path.name}::{test}"
        for path in (ROOT / "tests/gpu").glob("test_*.py")
        for test in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }
    assert checks_of_the_page() == tests | {f"gpu-check {stage.name}" for stage in gpu_check.package.STAGES}


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
