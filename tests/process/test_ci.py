"""`.ci/run` gives failed tests a second chance, and nothing else; a worker that crashes fails one test."""

import shutil
import subprocess
import sys

import pytest

from tba.tests.helpers.source_files import ROOT
from tba.tests.process.conftest import clean_environment

MAKEFILE = f"""
PYTEST := "{sys.executable}" -m pytest -p tba.tests.runner
check:
test:
\t$(PYTEST) -n 1 test_one.py
test-failed:
\t$(PYTEST) --last-failed --last-failed-no-failures none
"""
RETRIED = """
from pathlib import Path
def test_passes(): pass
def test_passes_later(tries=Path("tries")):
    tries.write_text("x" * (tries.exists() + 1))
    assert len(tries.read_text()) == 2
"""
ALWAYS = "def test_fails_again(): assert 0\n"


@pytest.fixture
def ci(tmp_path):
    """Runs .ci/run on tests of its own. Returns the exit code and the last lines."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def run(tests):
        (tmp_path / "test_one.py").write_text(tests)
        (tmp_path / "Makefile").write_text(MAKEFILE)
        # This test may be one of a parallel run itself, and of a recipe of make, which then names its directories.
        inherited = ("PYTEST_", "MAKE", "MFLAGS")
        environment = {key: value for key, value in clean_environment().items() if not key.startswith(inherited)}
        done = subprocess.run(["bash", tmp_path / ".ci/run"], env=environment, stdout=subprocess.PIPE, text=True)
        return done.returncode, done.stdout.splitlines()[-3:]

    return run


@pytest.mark.parametrize("always", ["", ALWAYS])
def test_a_test_that_passes_alone_is_rescued_and_named_and_one_that_fails_again_is_not(ci, always):
    code, lines = ci(RETRIED + always)
    assert lines[2] == "test_one.py::test_passes_later"
    assert bool(code) == bool(always)


@pytest.mark.parametrize(("tests", "code"), [("def test_passes(): pass\n", 0), (ALWAYS, 2)])
def test_nothing_is_rescued_where_all_pass_or_all_fail_again(ci, tests, code):
    found, lines = ci(tests)
    assert (found, lines[-1]) == (code, "rescued: none")


def test_a_worker_that_crashes_fails_its_test_alone_and_the_run_ends(tmp_path):
    done_before = "import pytest\n@pytest.mark.parametrize('n', range(4))\ndef test_before(n): pass\n"
    for number in range(8):
        (tmp_path / f"test_{number}.py").write_text(done_before)
    crashing = "import os\ndef test_it(): pass\ndef test_crash(): os.abort()\ndef test_after(): pass\n"
    (tmp_path / "test_8.py").write_text(crashing)
    (tmp_path / "test_9.py").write_text(done_before)
    options = ("-p", "tba.tests.runner", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile")
    environment = {key: value for key, value in clean_environment().items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--no-loadscope-reorder", tmp_path],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "1 failed, 38 passed" in done.stdout.splitlines()[-1]
    assert "crashed while running" in done.stdout
