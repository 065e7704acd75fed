"""Directories that were made to hurt: no code of theirs runs, nothing hangs, crashes, deletes or shows a traceback."""

import json
import subprocess
import sys

import pytest

from tba.tests.helpers.hostile_directories import KINDS
from tba.tests.process.conftest import clean_environment


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_directories_are_read_or_refused_with_a_sentence(tmp_path, kind):
    command = [sys.executable, "-m", "tba.tests.helpers.hostile_directories", kind, str(tmp_path)]
    # Standard input says "y" to each question.
    done = subprocess.run(
        command, input="y\n" * 99, env=clean_environment(), capture_output=True, text=True, timeout=580
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line for line in lines if line[2]] == []
    assert done.returncode == 0, (lines[-1:], done.stderr[-2000:])
    cases, commands, _ = KINDS[kind]
    assert {(case, name) for case, name, _ in lines} == {(case, name) for case in cases for name in commands}
