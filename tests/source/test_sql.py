"""The SQL in the source."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUMBERED = re.compile(r"[=(,\s]\?\d")


def test_no_statement_has_numbered_placeholders():
    """Python 3.12.0 to 3.12.3 warns of `?1` with a sequence of values, and tests treat a warning as an error."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    texts = {name: (ROOT / name).read_text() for name in listed.split()}
    found = {name for name, text in texts.items() if NUMBERED.search(text)}
    assert found <= {"tests/source/test_sql.py"}, "write `?` once for each value, or `:name` with a dictionary"
