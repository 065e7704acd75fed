"""The tiny form of `make gpu-check`, as it runs on a bare machine: a checkout without an installation."""

import json
import os
import subprocess
import sys

import pytest

from tba.tests.helpers.source_files import copy_sources


@pytest.mark.timeout(900)
def test_each_stage_compares_something_on_a_cpu(tmp_path):
    copy = copy_sources(tmp_path / "a checkout")
    # A machine with a GPU need not have it.
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent/pytest.py").write_text("raise ImportError('pytest is absent')\n")
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--tiny", "--device", "cpu", "--seconds", "850"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "absent"), "OMP_NUM_THREADS": "1"}
    out = ["--out", str(tmp_path / "out"), "--commit", "abc123"]
    done = subprocess.run(command + out, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "out/log.txt").read_text()
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert {name: stage["result"] for name, stage in report["stages"].items()} == dict.fromkeys(
        report["stages"], "passed"
    )
    assert all(stage["comparisons"] > 0 for stage in report["stages"].values())
    assert len(report["stages"]) == 12
    about = report["about"]
    assert (about["commit"], about["card"], about["driver"], about["models"]) == ("abc123", "none", "none", "tiny")
    assert {"date", "torch"} <= about.keys()
