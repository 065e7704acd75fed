"""The tiny form of `make gpu-check`, as it runs on a bare machine: a checkout without an installation."""

import json
import os
import shutil
import subprocess
import sys

import pytest


@pytest.mark.timeout(900)
def test_each_stage_compares_something_on_a_cpu(tmp_path, pytestconfig):
    root, copy = pytestconfig.rootpath, tmp_path / "a checkout"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, copy / name)
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
