"""A browser of one run."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tba.tests.helpers.browser import client


@pytest.fixture
def browser(filled: Path) -> TestClient:
    return client(filled)
