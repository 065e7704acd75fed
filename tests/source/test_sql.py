"""How the source uses sqlite3."""

import re

from tba.tests.helpers.source_files import ROOT, source_files

NUMBERED = re.compile(r"[=(,\s]\?\d")
OPENED = re.compile(r"sqlite3\.connect\((?:[^()]|\([^()]*\))*\) as ")


def files_with(pattern: "re.Pattern[str]") -> set[str]:
    found = {str(path.relative_to(ROOT)) for path in source_files("*.py") if pattern.search(path.read_text())}
    return found - {"tests/source/test_sql.py"}


def test_no_statement_has_numbered_placeholders():
    """Python 3.12.0 to 3.12.3 warns of `?1` with a sequence of values, and tests treat a warning as an error."""
    assert not files_with(NUMBERED), "write `?` once for each value, or `:name` with a dictionary"


def test_every_connection_is_closed():
    """`with sqlite3.connect(...)` commits and does not close; Python 3.13 warns when such a connection is collected."""
    assert not files_with(OPENED), "write `with closing(sqlite3.connect(...)) as connection, connection:`"
