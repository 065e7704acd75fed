"""`tba doctor` on this machine: what it says of a run on all GPUs."""

import json
import subprocess
import sys


def test_the_doctor_finds_the_gpus_of_this_machine(tmp_path, gpus, pytestconfig, record_property):
    settings = {
        "run.dir": tmp_path / "run", "model.path": "examples/arithmetic/model", "search.gpus": "all",
        "train.gpu": gpus[-1].index, "buffer.address": f"ipc://{tmp_path}/buffer",
    }  # fmt: skip
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "tba", "doctor", "examples/arithmetic/demo.toml", "--json", *options]
    done = subprocess.run(command, cwd=pytestconfig.rootpath, capture_output=True, text=True, timeout=300, check=False)
    findings = {row["check"]: row for row in json.loads(done.stdout)}
    for name, row in findings.items():
        record_property(name, f"{row['result']}: {row['detail']}")
    for name in ("gpus", "cuda", "compiler"):
        assert findings[name]["result"] == "ok", findings[name]["detail"]
