"""A browser of `tba ui`, and queries of the database behind it."""

import html
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from tba.ui.app import make_app


def client(*paths: Path, **options: Any) -> TestClient:
    """Return a browser of the interface over these directories and database files."""
    return TestClient(make_app(paths, **options), base_url="http://127.0.0.1:5780", follow_redirects=True)


def copies(database: Path, folder: Path, *names: str) -> list[Path]:
    """Copy a database into directories of runs of these names; return its copies."""
    for name in names:
        (folder / name).mkdir(parents=True)
        shutil.copyfile(database, folder / name / "buffer.sqlite")
    return [folder / name / "buffer.sqlite" for name in names]


def select(path: Path, sql: str) -> list[sqlite3.Row]:
    """Return what a query finds."""
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        return connection.execute(sql).fetchall()


def pages(browser: TestClient, address: str) -> Iterator[str]:
    """Yield the pages of a list, by the links to the next one."""
    while address:
        page = browser.get(address)
        yield page.text
        following = re.search(r'rel="next" href="([^"]*)"', page.text)
        address = html.unescape(following[1]) if following else ""
