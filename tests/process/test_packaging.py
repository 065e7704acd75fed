"""The package, from a clean copy of the repository in a folder of another name."""

import os
import subprocess
import sys
import zipfile

import pytest

from tba.tests.helpers.source_files import copy_sources


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Return a wheel built from a copy of the sources."""
    copy = copy_sources(tmp_path_factory.mktemp("build") / "a folder of any name")
    options = ["--quiet", "--no-deps", "--wheel-dir", str(copy / "dist")]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(copy)], check=True, capture_output=True)
    return next((copy / "dist").glob("tba-*.whl"))


def test_the_wheel_contains_only_the_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top_levels = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top_levels == {"tba"}
    assert {"tba/py.typed", "tba/cli/roles.py", "tba/deploy/systemd/tba-buffer.service"} <= set(names)
    assert {"tba/ui/templates/base.html", "tba/ui/static/pages.js", "tba/ui/static/vendor/uPlot.LICENSE"} <= set(names)
    assert not [name for name in names if {"tests", "benchmarks"} & set(name.split("/"))]


def test_the_wheel_runs_outside_the_repository(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    arguments = ["doctor", "--only", "python", "--set", "model.path=m"]
    code = f"import tba, sys; print(tba.__file__); sys.argv[1:] = {arguments}; from tba.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert str(tmp_path / "site") in result.stdout
    assert "python" in result.stdout
