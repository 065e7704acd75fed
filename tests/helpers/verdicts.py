"""Tables of answers, in tests/data, with verdicts that were decided by hand."""

import re
import unicodedata
from pathlib import Path

DATA = Path(__file__).parent.parent / "data"


def read_rows(name: str) -> dict[str, list[tuple[str, str]]]:
    """The two sides of `::` in each line, by the heading above it. `\\N{NAME}` is a character."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for line in (DATA / name).read_text().splitlines():
        if line.startswith("# "):
            heading = line.removeprefix("# ")
        elif line:
            left, _, right = re.sub(r"\\N\{([^}]*)\}", lambda found: unicodedata.lookup(found[1]), line).partition(
                " ::"
            )
            sections.setdefault(heading, []).append((left, right))
    return sections


def read_verdicts(name: str) -> dict[str, list[tuple[str, str, bool]]]:
    """(gold answer, response, whether it is right) of each line, by heading."""
    return {
        heading: [(left[2:], _response(right), left[0] == "+") for left, right in rows]
        for heading, rows in read_rows(name).items()
    }


def _response(right: str) -> str:
    return right[2:].replace("\\n", "\n") if right.startswith("> ") else rf"so it is $\boxed{{{right[1:]}}}$."
