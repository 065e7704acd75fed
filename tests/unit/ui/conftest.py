"""A browser of one run."""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def browser(filled: Path) -> Any:
    """A test client of Starlette. A test file that needs it imports Starlette, or is skipped where that is missing."""
    from tba.tests.helpers.browser import client

    return client(filled)
