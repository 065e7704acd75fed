"""Links in the documentation lead to files and headings that exist."""

import re
from functools import cache
from pathlib import Path

import pytest

from tba.tests.helpers.source_files import ROOT, source_files

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and MkDocs give to the headings of a page."""
    headings = re.findall(r"^#+ +(.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", source_files("*.md"), ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    broken = []
    for target in LINK.findall(CODE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def test_the_benchmarks_that_pages_and_make_run_exist():
    pages = [*source_files("*.md"), ROOT / "Makefile"]
    run = {path for page in pages for path in re.findall(r"python3? -m\s+benchmarks\.(\w+)", page.read_text())}
    assert run
    assert run - {path.stem for path in (ROOT / "benchmarks").iterdir()} == set()
