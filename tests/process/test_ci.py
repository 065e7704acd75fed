"""`.ci/run` gives failed tests a second chance, and nothing else; a run works for any user and temporary directory."""

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

    def run(tests, makefile=MAKEFILE):
        (tmp_path / "test_one.py").write_text(tests)
        (tmp_path / "Makefile").write_text(makefile)
        # This test may be one of a parallel run itself, and of a recipe of make, which then names its directories.
        inherited = ("PYTEST_", "MAKE", "MFLAGS")
        environment = {key: value for key, value in clean_environment().items() if not key.startswith(inherited)}
        done = subprocess.run(["bash", tmp_path / ".ci/run"], env=environment, stdout=subprocess.PIPE, text=True)
        return done.returncode, done.stdout.splitlines()[-3:]

    return run


def test_tests_that_pass(ci):
    code, lines = ci("def test_passes(): pass")
    assert (code, lines[-1]) == (0, "rescued: none")
    assert "1 passed" in lines[-2]


def test_a_test_that_passes_alone_is_rescued_and_named(ci):
    code, lines = ci(RETRIED)
    assert "1 passed" in lines[0]
    assert (code, lines[2]) == (0, "test_one.py::test_passes_later")


def test_a_test_that_fails_again_is_not_rescued(ci):
    code, lines = ci(RETRIED + ALWAYS)
    assert code
    assert lines[2] == "test_one.py::test_passes_later"


def test_an_installation_that_fails_gets_no_second_chance_from_failures_of_an_earlier_run(ci):
    assert ci(ALWAYS)[0]
    code, lines = ci("def test_fails_again(): pass", MAKEFILE.replace("test:\n", "test:\n\tfalse\n", 1))
    assert code
    assert lines[-1] == "the tests did not run to their end: no second chance"


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


def test_a_temporary_directory_with_a_long_path_leaves_room_for_sockets(tmp_path):
    long = tmp_path / "a temporary directory of jobs"
    long.mkdir()
    environment = clean_environment() | {"TMPDIR": str(long)}
    environment.pop("PYTEST_DEBUG_TEMPROOT", None)
    assert after_the_runner("os.environ.get('PYTEST_DEBUG_TEMPROOT')", env=environment) == "/tmp"


def test_files_of_tests_have_the_same_modes_for_every_user():
    assert after_the_runner("os.umask(0)", env=clean_environment(), umask=0o002) == str(0o022)


def after_the_runner(expression, **settings):
    code = f"import os, tba.tests.runner; print({expression})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, **settings)
    return done.stdout.strip()
